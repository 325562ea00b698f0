"""Handing out a checkpoint's tensors: each fault of a file is one line that names the tensor."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import CONFIG, tiny_tensors, write_tiny_llama

from pocketllm.checkpoint import Checkpoint, GenerationDefaults, TensorInfo, open_checkpoint
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.gguf_file import open_gguf
from pocketllm.torch_engine.layers.cpu import CpuDevice
from pocketllm.torch_engine.models.llama import Llama
from pocketllm.torch_engine.weights import StoredTensor, Weights

NAME = "model.layers.1.mlp.up_proj.weight"


def load(directory: Path) -> Llama:
    return Llama(open_checkpoint(directory), CpuDevice(torch.float32), 64, lambda done: None)


def message_of(directory: Path) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load(directory)
    assert caught.value.param == "model"
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    return str(caught.value)


def test_a_whole_checkpoint_loads(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors())
    layers: list[int] = []
    model = Llama(open_checkpoint(tmp_path), CpuDevice(torch.float32), 64, layers.append)
    assert layers == [1, 2]
    assert model.num_bytes >= 2 * 50 * 32 * 4


def test_a_missing_tensor(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    del tensors[NAME]
    write_tiny_llama(tmp_path, tensors)
    assert message_of(tmp_path) == f"{tmp_path} lacks the tensor {NAME}: download or convert the model again."


def test_a_tensor_of_another_shape(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors() | {NAME: torch.zeros(32, 64)})
    assert f"Tensor {NAME} of {tmp_path} has the shape [32, 64] where the model's config asks for [64, 32]" in message_of(tmp_path)


def test_leftover_tensors(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors() | {"model.extra.weight": torch.zeros(1)})
    assert f"{tmp_path} holds the tensor model.extra.weight, which a llama model has no place for" in message_of(tmp_path)


def test_several_leftover_tensors_are_counted(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors() | {f"model.extra{place}.weight": torch.zeros(1) for place in range(3)})
    assert "holds the tensor model.extra0.weight and 2 more tensors, which" in message_of(tmp_path)


def test_one_more_leftover_tensor_is_no_plural(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors() | {f"model.extra{place}.weight": torch.zeros(1) for place in range(2)})
    assert "model.extra0.weight and 1 more tensor, which" in message_of(tmp_path)


@pytest.mark.parametrize("fault", ["gone", "cut", "other"])
def test_a_file_that_changed_since_its_header_was_read(fault: str, tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors())
    file = tmp_path / "model.safetensors"
    checkpoint = open_checkpoint(tmp_path)
    if fault == "gone":
        file.unlink()
    elif fault == "cut":
        file.write_bytes(file.read_bytes()[:-100])
    else:
        save_file({"something": torch.zeros(3)}, file)
    with pytest.raises(ConfigurationError) as caught:
        Llama(checkpoint, CpuDevice(torch.float32), 64, lambda done: None)
    assert str(file) in str(caught.value)
    assert "can't be read" in str(caught.value)
    assert "download the file again" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "model"


def test_ignored_tensors_are_not_left_over(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, {"a": torch.ones(2), "b": torch.ones(3)})
    weights = Weights(open_checkpoint(tmp_path), Llama.gguf_name, frozenset({"b"}))
    assert weights.take("a", (2,)).float().tolist() == [1, 1]
    weights.finish()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_float_types_come_as_they_are(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(4, 8).to(dtype)
    write_tiny_llama(tmp_path, {"a": values})
    tensor = Weights(open_checkpoint(tmp_path), Llama.gguf_name).take("a", (4, 8))
    assert tensor.values is not None
    assert torch.equal(tensor.values, values)
    assert torch.equal(tensor.float(), values.float())


GGUF_KINDS = {kind: gguf.GGMLQuantizationType[kind] for kind in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")}


def gguf_checkpoint(path: Path, values: np.ndarray) -> Checkpoint:
    """A file with `values` in each type under the type's name."""
    writer = gguf.GGUFWriter(path, "llama")
    for name, kind in GGUF_KINDS.items():
        writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    infos = tuple(
        TensorInfo(tensor.name, tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name, int(tensor.n_bytes), path)
        for tensor in file.tensors.values()
    )
    return Checkpoint(path, "gguf", "tiny", "llama", {}, 64, GenerationDefaults(), infos, file)


@pytest.mark.parametrize("kind", list(GGUF_KINDS))
def test_gguf_types_hold_what_gguf_says(kind: str, tmp_path: Path) -> None:
    values = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)
    tensor = Weights(gguf_checkpoint(tmp_path / "t.gguf", values), str).take(kind, (6, 64))
    expected = torch.from_numpy(gguf.dequantize(gguf.quantize(values, GGUF_KINDS[kind]), GGUF_KINDS[kind]))
    assert (tensor.type, tensor.shape) == (kind, (6, 64))
    assert torch.equal(tensor.float(), expected)
    order = torch.tensor([5, 0, 3, 1, 2, 4])
    assert torch.equal(tensor.select_rows(order).float(), expected[order])


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_a_vector_of_a_block_type_is_refused(kind: str, tmp_path: Path) -> None:
    weights = Weights(gguf_checkpoint(tmp_path / "t.gguf", np.ones(64, np.float32)), str)
    assert weights.take("F16", (64,)).float().tolist() == [1.0] * 64
    with pytest.raises(ConfigurationError, match=f"Tensor {kind} of .* is a vector stored as {kind}, and vectors are stored as F32, F16, BF16") as caught:
        weights.take(kind, (64,))
    assert "\n" not in str(caught.value)


def test_heads_of_an_odd_size_are_refused(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors())
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "head_dim": 7}), encoding="utf-8")
    with pytest.raises(UnsupportedFeatureError, match="has heads of 7 values"):
        load(tmp_path)


def test_gguf_names() -> None:
    assert Llama.gguf_name("model.embed_tokens.weight") == "token_embd.weight"
    assert Llama.gguf_name("model.layers.12.self_attn.o_proj.weight") == "blk.12.attn_output.weight"
    assert Llama.gguf_name("model.layers.0.post_attention_layernorm.weight") == "blk.0.ffn_norm.weight"
    assert Llama.gguf_name("model.norm.weight") == "output_norm.weight"


def test_select_rows_keeps_the_original() -> None:
    tensor = StoredTensor("t", "F32", (2, 2), None, torch.tensor([[1.0, 2], [3, 4]]))
    assert tensor.select_rows(torch.tensor([1, 0])).float().tolist() == [[3, 4], [1, 2]]
    assert tensor.float().tolist() == [[1, 2], [3, 4]]
