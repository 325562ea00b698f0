"""Checkpoints of both formats: one flat config, and one line for each fault."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.checkpoint import GenerationDefaults, open_checkpoint
from pocketllm.errors import ConfigurationError

LLAMA_CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "eos_token_id": 7,
}


def write_safetensors(path: Path, tensors: dict[str, tuple[str, list[int], int]]) -> None:
    entries, end = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(end))


@pytest.fixture
def hf_directory(tmp_path):
    def write(config: dict[str, Any] | None = None, generation: dict[str, Any] | None = None, **changes: Any) -> Path:
        directory = tmp_path / "Tiny-Llama"
        directory.mkdir(exist_ok=True)
        final = {key: value for key, value in {**(config or LLAMA_CONFIG), **changes}.items() if value is not None}
        (directory / "config.json").write_text(json.dumps(final))
        if generation is not None:
            (directory / "generation_config.json").write_text(json.dumps(generation))
        write_safetensors(directory / "model.safetensors", {"w": ("BF16", [3, 2], 12), "n": ("F32", [5], 20)})
        return directory

    return write


def refusal(path: Path, model_format: Any = "auto") -> str:
    with pytest.raises(ConfigurationError) as caught:
        open_checkpoint(path, model_format)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_model(default_model):
    checkpoint = open_checkpoint(default_model)
    assert (checkpoint.name, checkpoint.architecture, checkpoint.model_format) == ("SmolLM2-135M-Instruct", "llama", "gguf")
    assert checkpoint.config["head_dim"] == 64
    assert checkpoint.config["num_key_value_heads"] == 3
    assert checkpoint.config["rope_theta"] == 100000.0
    assert checkpoint.config["vocab_size"] == 49152
    assert checkpoint.config["tie_word_embeddings"] is True
    assert checkpoint.config["rope_scaling"] is None
    assert checkpoint.context_length == 8192
    assert checkpoint.generation_defaults == GenerationDefaults(eos_token_ids=(2,))
    assert checkpoint.num_parameters == 134_515_008
    assert checkpoint.tensors[0].shape == (49152, 576)
    assert {tensor.type for tensor in checkpoint.tensors} == {"Q8_0", "Q4_1", "F32"}


def test_gguf_values_that_are_left_out(write_gguf):
    path = write_gguf(llama__attention__head_count_kv=None, llama__rope__freq_base=None)
    config = open_checkpoint(path).config
    assert (config["num_key_value_heads"], config["head_dim"], config["rope_theta"]) == (4, 8, 10000.0)


@pytest.mark.parametrize(
    "key",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_gguf_key_is_named(write_gguf, key):
    assert f"lacks the key {key}" in refusal(write_gguf(**{key.replace(".", "__"): None}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.block_count", "many"),
        ("llama.block_count", 0),
        ("llama.attention.head_count", [4, 4]),
        ("llama.attention.head_count", 5),
        ("llama.attention.head_count_kv", 3),
        ("llama.rope.freq_base", 0.0),
        ("llama.attention.layer_norm_rms_epsilon", float("nan")),
        ("tokenizer.ggml.eos_token_id", "two"),
    ],
)
def test_a_gguf_value_out_of_range_is_named(write_gguf, key, value):
    assert key in refusal(write_gguf(**{key.replace(".", "__"): value}))


def test_gguf_end_of_turn_and_sampling_defaults(write_gguf):
    path = write_gguf(tokenizer__ggml__eot_token_id=0, general__sampling__temp=0.5, general__sampling__top_p=0.25, general__sampling__top_k=20)
    assert open_checkpoint(path).generation_defaults == GenerationDefaults(0.5, 0.25, 20, (2, 0))


def test_gguf_rope_scaling(write_gguf):
    assert open_checkpoint(write_gguf(llama__rope__scaling__type="linear", llama__rope__scaling__factor=4.0)).config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    tensors = {"rope_freqs.weight": np.ones(4, np.float32)}
    assert open_checkpoint(write_gguf(tensors=tensors)).config["rope_scaling"] == {"rope_type": "frequency_factors", "tensor": "rope_freqs.weight"}


def test_another_gguf_architecture_opens_with_what_is_there(write_gguf):
    path = write_gguf(architecture="mamba9", mamba9__block_count=18, mamba9__attention__head_count=[4, 4], mamba9__context_length=512)
    checkpoint = open_checkpoint(path)
    assert (checkpoint.architecture, checkpoint.config["num_hidden_layers"], checkpoint.context_length) == ("mamba9", 18, 512)
    assert "hidden_size" not in checkpoint.config


def test_a_mixture_of_experts_is_not_taken_for_llama(write_gguf):
    assert open_checkpoint(write_gguf(llama__expert_count=8)).architecture == "mixtral"


def test_a_part_of_a_split_gguf_is_refused(write_gguf):
    assert "one of 3 parts" in refusal(write_gguf(split__count=3))


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("A-7B.Q4_K_M.gguf", "A-7B"),
        ("a-0.5b-q8_0.gguf", "a-0.5b"),
        ("Llama-3.2-1B-BF16.gguf", "Llama-3.2-1B"),
        ("plain.gguf", "plain"),
        ("x-IQ2_XXS.gguf", "x"),
    ],
)
def test_the_name_leaves_out_the_quantization(write_gguf, name, shown):
    assert open_checkpoint(write_gguf(name=name)).name == shown


def test_a_directory_with_one_gguf_opens_it_and_with_several_lists_them(write_gguf):
    path = write_gguf(name="one.gguf")
    assert open_checkpoint(path.parent).path == path
    write_gguf(name="two.gguf")
    message = refusal(path.parent)
    assert "one.gguf" in message
    assert "two.gguf" in message


def test_a_safetensors_directory(hf_directory):
    checkpoint = open_checkpoint(hf_directory())
    assert (checkpoint.name, checkpoint.architecture, checkpoint.model_format, checkpoint.gguf) == ("Tiny-Llama", "llama", "safetensors", None)
    assert [(tensor.name, tensor.shape, tensor.type, tensor.num_bytes) for tensor in checkpoint.tensors] == [("w", (3, 2), "BF16", 12), ("n", (5,), "F32", 20)]
    config = checkpoint.config
    assert (config["num_key_value_heads"], config["head_dim"], config["rope_theta"], config["rope_scaling"]) == (4, 8, 10000.0, None)
    assert config["tie_word_embeddings"] is False
    assert checkpoint.generation_defaults == GenerationDefaults(eos_token_ids=(7,))


def test_both_spellings_of_rope(hf_directory):
    old = open_checkpoint(hf_directory(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2.0})).config
    new = open_checkpoint(hf_directory(rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})).config
    assert old["rope_theta"] == new["rope_theta"] == 5e5
    assert old["rope_scaling"] == new["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert open_checkpoint(hf_directory(rope_parameters={"rope_theta": 9.0, "rope_type": "default"})).config["rope_scaling"] is None
    with pytest.raises(ConfigurationError, match=r"scales rotary embeddings by factor = 2\.0 and has no rope_type: download it again"):
        open_checkpoint(hf_directory(rope_scaling={"factor": 2.0}))


def test_generation_config_wins_over_config(hf_directory):
    directory = hf_directory(generation={"eos_token_id": [5, 6], "do_sample": False, "temperature": 0.7, "top_k": 20})
    assert open_checkpoint(directory).generation_defaults == GenerationDefaults(0.7, None, 20, (5, 6))


def test_a_text_config_is_laid_over_the_top_level(hf_directory):
    text = {"model_type": "qwen3_5_text", "hidden_size": 8, "eos_token_id": 3, "vocab_size": 16, "max_position_embeddings": 64}
    config = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}
    checkpoint = open_checkpoint(hf_directory(config))
    assert checkpoint.architecture == checkpoint.config["model_type"] == "qwen3_5"
    assert (checkpoint.config["hidden_size"], checkpoint.config["tie_word_embeddings"]) == (8, True)
    assert checkpoint.generation_defaults.eos_token_ids == (3,)


@pytest.mark.parametrize("key", ["model_type", "hidden_size", "rms_norm_eps", "vocab_size"])
def test_a_missing_config_key_is_named(hf_directory, key):
    assert f"lacks the key {key}" in refusal(hf_directory(**{key: None}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("hidden_size", "x"), ("num_attention_heads", 0), ("num_key_value_heads", 3), ("rope_theta", -1), ("rms_norm_eps", "x"), ("eos_token_id", "</s>")],
)
def test_a_config_value_out_of_range_is_refused(hf_directory, key, value):
    assert "Tiny-Llama" in refusal(hf_directory(**{key: value}))


def test_shards_and_their_index(hf_directory):
    directory = hf_directory()
    (directory / "model.safetensors").unlink()
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))
    write_safetensors(directory / "model-1.safetensors", {"a": ("F16", [2], 4)})
    assert "model-2.safetensors" in refusal(directory)
    write_safetensors(directory / "model-2.safetensors", {"b": ("F16", [2], 4)})
    checkpoint = open_checkpoint(directory)
    assert [(tensor.name, tensor.file.name) for tensor in checkpoint.tensors] == [("a", "model-1.safetensors"), ("b", "model-2.safetensors")]
    write_safetensors(directory / "model-2.safetensors", {"a": ("F16", [2], 4)})
    assert "The tensor a is in both" in refusal(directory)
    index.write_text("[]")
    assert "not a valid index" in refusal(directory)
    for outside in ("../model-1.safetensors", str(directory / "model-1.safetensors"), "x/../model-1.safetensors"):
        index.write_text(json.dumps({"weight_map": {"a": outside}}))
        assert f"names {outside!r}, which is no file of its directory" in refusal(directory)


def test_a_pipe_in_place_of_the_weights(hf_directory):
    directory = hf_directory()
    (directory / "model.safetensors").unlink()
    os.mkfifo(directory / "model.safetensors")
    assert "is no file" in refusal(directory)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "truncated"),
        (b"\xff" * 40, "truncated"),
        (struct.pack("<Q", 4) + b"\xff\xfe{}" + bytes(9), "corrupt header"),
        (struct.pack("<Q", 2) + b"[]", "corrupt header"),
        (struct.pack("<Q", 10) + b'{"w": 1}  ', "tensor w"),
    ],
)
def test_a_broken_safetensors_file_is_refused(hf_directory, content, words):
    directory = hf_directory()
    (directory / "model.safetensors").write_bytes(content)
    message = refusal(directory)
    assert words in message
    assert "model.safetensors" in message


def test_a_cut_safetensors_file_is_refused(hf_directory):
    file = hf_directory() / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "truncated: tensor n" in refusal(file.parent)


def test_directories_and_files_of_the_wrong_kind(tmp_path, hf_directory, write_gguf):
    assert "has no config.json" in refusal(tmp_path)
    directory = hf_directory()
    assert "has no .gguf file" in refusal(directory, "gguf")
    assert "give its directory" in refusal(directory / "model.safetensors")
    assert '"safetensors"' in refusal(write_gguf(), "safetensors")
    assert "does not exist" in refusal(tmp_path / "nothing")
    (directory / "config.json").write_text("{")
    assert "not valid JSON" in refusal(directory)
    (directory / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    assert "convert them to safetensors" in refusal(directory)


def test_a_snapshot_of_the_hub_is_named_after_its_repo(hf_directory, tmp_path):
    snapshot = tmp_path / "models--org--name" / "snapshots" / "0123"
    snapshot.parent.mkdir(parents=True)
    hf_directory().rename(snapshot)
    assert open_checkpoint(snapshot).name == "org/name"
