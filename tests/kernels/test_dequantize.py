"""Quantized tensors as float values: bit-equal to the gguf package, and to FP8 times scale."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tiny_llama import write_tiny_llama

from pocketllm.backends.select import TORCH_GGUF_TYPES
from pocketllm.checkpoint import open_checkpoint
from pocketllm.errors import ConfigurationError
from pocketllm.torch_engine.weights import StoredTensor, Weights

BLOCK_TYPES = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")


def random_blocks(kind: str, *shape: int) -> np.ndarray:
    """Every bit at random but for scales, which stay finite: uint8 [*shape[:-1], bytes of a row]."""
    size, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    data = np.random.default_rng(5).integers(0, 256, (*shape[:-1], shape[-1] // size, num_bytes), dtype=np.uint8)
    ends = {"Q2_K": (81, 83), "Q3_K": (109,), "Q6_K": (209,)}.get(kind, (1, 3) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (1,))
    for high_byte in ends:  # of a float16: an exponent below 16
        data[..., high_byte] &= 0xBF
    return data.reshape(*shape[:-1], -1)


def stored(kind: str, *shape: int) -> StoredTensor:
    return StoredTensor("t", kind, shape, random_blocks(kind, *shape), None)


def same_bits(found: torch.Tensor, expected: np.ndarray) -> bool:
    return found.dtype == torch.float32 and found.numpy().tobytes() == expected.tobytes()


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("shape", [(3, 256), (700, 512), (2, 5, 768)])  # one piece, several with a rest, experts
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_block_types_are_bit_equal_to_gguf(kind: str, shape: tuple[int, ...], threads: int) -> None:
    tensor = stored(kind, *shape)
    expected = gguf.dequantize(tensor.blocks, gguf.GGMLQuantizationType[kind])
    assert np.isfinite(expected).all()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = tensor.float()
    finally:
        torch.set_num_threads(before)
    assert tuple(found.shape) == shape
    assert same_bits(found, expected)
    order = torch.randperm(shape[0])[: shape[0] // 2 + 1]
    part = tensor.select_rows(order)
    assert part.shape == (len(order), *shape[1:])
    assert same_bits(part.float(), expected[order.numpy()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_other_dtypes_are_rounded_from_float32(kind: str, dtype: torch.dtype) -> None:
    tensor = stored(kind, 600, 256)
    assert torch.equal(tensor.to(dtype), tensor.float().to(dtype))


def test_a_block_without_a_number_gives_what_gguf_gives() -> None:
    blocks = random_blocks("Q4_0", 2, 64)
    blocks[0, :2] = (0xFF, 0x7E)  # a float16 that is no number
    with np.errstate(all="ignore"):
        expected = gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q4_0)
    with np.errstate(all="raise"):
        found = StoredTensor("t", "Q4_0", (2, 64), blocks, None).float()
    assert same_bits(found, expected)


def test_each_type_that_is_offered_is_tested() -> None:
    assert {"F32", "F16", "BF16", *BLOCK_TYPES} == TORCH_GGUF_TYPES


def test_float32_values_are_a_copy(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, {"a": torch.ones(2, 2)})
    tensor = Weights(open_checkpoint(tmp_path), str).take("a", (2, 2))
    tensor.float().zero_()
    assert tensor.float().tolist() == [[1, 1], [1, 1]]


def fp8_tensors(rows: int, columns: int, scale_dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(rows, columns, generator=generator).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator).add(0.1).to(scale_dtype)
    return {"a.weight": weight, "a.weight_scale_inv": scales}


@pytest.mark.parametrize("scale_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "columns"), [(256, 128), (300, 200), (5, 130)])
def test_fp8_is_the_stored_value_times_its_blocks_scale(rows: int, columns: int, scale_dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = fp8_tensors(rows, columns, scale_dtype)
    write_tiny_llama(tmp_path, tensors)
    weights = Weights(open_checkpoint(tmp_path), str)
    tensor = weights.take("a.weight", (rows, columns))
    weights.finish()
    expected = torch.empty(rows, columns)
    for row in range(0, rows, 128):
        for column in range(0, columns, 128):
            scale = tensors["a.weight_scale_inv"][row // 128, column // 128].float()
            expected[row : row + 128, column : column + 128] = tensors["a.weight"][row : row + 128, column : column + 128].float() * scale
    assert torch.equal(tensor.float(), expected)
    assert torch.equal(tensor.to(torch.bfloat16), expected.bfloat16())
    order = torch.randperm(rows)
    assert torch.equal(tensor.select_rows(order).float(), expected[order])
    assert torch.equal(tensor.select_rows(order).select_rows(order.argsort()).float(), expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"a.weight_scale_inv": None}, r"a\.weight of .* is F8_E4M3, and a\.weight_scale_inv is missing where \[3, 2\] in F32 or "),
        ({"a.weight_scale_inv": torch.ones(2, 2)}, r"a\.weight_scale_inv has the shape \[2, 2\] in F32 where \[3, 2\] in "),
        ({"a.weight": torch.zeros(300).to(torch.float8_e4m3fn)}, "no matrix"),
    ],
)
def test_fp8_without_the_scales_that_it_needs_is_refused(change: dict[str, torch.Tensor | None], words: str, tmp_path: Path) -> None:
    tensors = {name: tensor for name, tensor in {**fp8_tensors(300, 200), **change}.items() if tensor is not None}
    write_tiny_llama(tmp_path, {})
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=words) as caught:
        Weights(open_checkpoint(tmp_path), str).take("a.weight", tuple(tensors["a.weight"].shape))
    assert "\n" not in str(caught.value)


def test_scales_of_a_tensor_that_is_not_fp8_are_left_over(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, {**fp8_tensors(128, 128), "a.weight": torch.ones(128, 128)})
    weights = Weights(open_checkpoint(tmp_path), str)
    weights.take("a.weight", (128, 128))
    with pytest.raises(ConfigurationError, match=r"holds the tensor a\.weight_scale_inv"):
        weights.finish()
