"""GGUF matrices in planes: dequantized bit-equal to the gguf package, products against float32 arithmetic on its values."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from test_dequantize import BLOCK_TYPES, random_blocks, same_bits

from pocketllm.torch_engine.weights import StoredTensor

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels import gguf_linear as kernels
from pocketllm.torch_engine.kernels.gguf_linear import GgufConfig, candidates, dequantize, gguf_linear, gguf_linear_reference, gguf_rows
from pocketllm.torch_engine.kernels.gguf_weight import BLOCK_LAYOUTS, GgufWeight

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BY_TOKEN, JOINT = GgufConfig(32, 256, by_token=True), GgufConfig(32, 256)
# Triton's interpreter takes seconds for what a GPU does at once: there, fewer sizes and dtypes of each type
IS_GPU = torch.cuda.is_available()
PRODUCTS = [
    (kind, config, dtype)
    for kind in BLOCK_TYPES
    for config in (BY_TOKEN, JOINT)
    for dtype in DTYPES
    if IS_GPU or kind == "Q4_1" or dtype == (torch.bfloat16 if config.by_token else torch.float16)
]


def stored(kind: str, *shape: int, scale: float | None = None) -> StoredTensor:
    """Random blocks; with `scale`, their float16 scales and minimums are set so that values are about that size."""
    blocks = random_blocks(kind, *shape)
    if scale is not None:
        num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
        by_block = blocks.reshape(-1, num_bytes)
        places = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(kind, (0, 2) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,))
        largest = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 128, "IQ4_NL": 127, "IQ4_XS": 127 * 32, "Q2_K": 45, "Q3_K": 128}
        rng = np.random.default_rng(6)
        for place in places:
            numbers = rng.uniform(0.5, 1, len(by_block)) * rng.choice([-1, 1], len(by_block)) * scale / largest.get(kind, 63 * 31)
            by_block[:, place : place + 2] = numbers.astype(np.float16)[:, None].view(np.uint8)
    return StoredTensor("t", kind, shape, blocks, None)


def columns_of(kind: str, units: int) -> int:
    return units * gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]


def expected_values(tensor: StoredTensor) -> np.ndarray:
    return gguf.dequantize(tensor.blocks, gguf.GGMLQuantizationType[tensor.type])


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """float32 values as a kernel on their device rounds them: Triton's interpreter cuts bfloat16 off instead."""
    if dtype == torch.bfloat16 and values.device.type == "cpu":
        values = (values.view(torch.int32) & -65536).view(torch.float32)
    return values.to(dtype)


@pytest.mark.parametrize(
    ("kind", "blocks"), [(kind, blocks) for kind in BLOCK_TYPES for blocks in (1, 5) if IS_GPU or blocks == (5 if kind in ("Q5_0", "Q6_K") else 1)]
)
def test_dequantize_is_bit_equal_to_gguf(triton_device: str, kind: str, blocks: int) -> None:
    tensors = [stored(kind, rows, columns_of(kind, blocks)) for rows in (5, 1, 3)]
    weight = GgufWeight.pack(tensors, triton_device)
    assert weight.shape == (9, columns_of(kind, blocks))
    expected = np.concatenate([expected_values(tensor) for tensor in tensors])
    assert np.isfinite(expected).all()
    assert same_bits(dequantize(weight, torch.float32).cpu(), expected)
    assert same_bits(dequantize(weight, torch.float32, slice(3, 8)).cpu(), expected[3:8])
    assert dequantize(weight, torch.float32, slice(4, 4)).shape == (0, weight.shape[1])
    ids = torch.tensor([8, 0, 3, 3, -1, 5], device=triton_device)
    rows = gguf_rows(weight, ids).cpu()
    assert torch.isfinite(rows).all()
    keep = [0, 1, 2, 3, 5]
    assert same_bits(rows[keep], expected[[8, 0, 3, 3, 5]])
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(dequantize(weight, dtype), rounded(torch.from_numpy(expected).to(triton_device), dtype))


@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_planes_are_no_larger_than_the_file(triton_device: str, kind: str) -> None:
    tensor = stored(kind, 8, 2560)
    assert tensor.blocks is not None
    weight = GgufWeight.pack([tensor], triton_device)
    assert weight.num_bytes <= 1.04 * tensor.blocks.nbytes
    assert set(BLOCK_LAYOUTS) == set(BLOCK_TYPES)


def test_packing_in_pieces_changes_nothing(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [stored("Q6_K", rows, 512) for rows in (7, 2)]
    whole = GgufWeight.pack(tensors, triton_device)
    monkeypatch.setattr("pocketllm.torch_engine.kernels.gguf_weight._PIECE_BYTES", 3 * 420)
    pieces = GgufWeight.pack(tensors, triton_device)
    assert pieces.high is not None
    assert whole.high is not None
    assert torch.equal(pieces.quants, whole.quants)
    assert torch.equal(pieces.high, whole.high)
    assert torch.equal(pieces.scales, whole.scales)


@pytest.mark.parametrize(
    ("kind", "config", "dtype"), PRODUCTS, ids=[f"{kind}-{'by_token' if config.by_token else 'joint'}-{dtype}" for kind, config, dtype in PRODUCTS]
)
def test_products(triton_device: str, kind: str, config: GgufConfig, dtype: torch.dtype) -> None:
    num_columns = columns_of(kind, 11 if columns_of(kind, 1) == 32 else 3)  # no multiple of the tile's
    tensor = stored(kind, 19, num_columns, scale=0.5)
    weight = GgufWeight.pack([tensor], triton_device)
    x = torch.randn(2, num_columns, device=triton_device).to(dtype)
    values = torch.from_numpy(expected_values(tensor)).to(triton_device)
    expected = gguf_linear_reference(x, values if config.by_token else rounded(values, dtype))
    found = gguf_linear(x, weight, torch.float32, config=config)
    assert found.dtype == torch.float32
    bound = gguf_linear_reference(x.abs(), values.abs())
    assert ((found - expected).abs() <= 2e-6 * bound).all()
    assert torch.equal(gguf_linear(x, weight, config=config), rounded(found, dtype))


@pytest.mark.parametrize("tokens", [1, 2, 9, 17, 65] if IS_GPU else [1, 17, 65])
def test_stacked_types_write_ranges_of_columns(triton_device: str, tokens: int) -> None:
    """Q, K and V of different types, a strided input, a bias, and a sum with what is there."""
    tensors = [stored("Q4_K", 20, 256, scale=0.5), stored("Q6_K", 7, 256, scale=0.5)]
    weights = [GgufWeight.pack([tensor], triton_device) for tensor in tensors]
    values = torch.from_numpy(np.concatenate([expected_values(tensor) for tensor in tensors])).to(triton_device)
    x = torch.randn(tokens, 300, device=triton_device)[:, 10:266]
    out = torch.full((tokens, 40), 7.0, device=triton_device)
    bias = torch.randn(27, device=triton_device)
    expected = gguf_linear_reference(x, values) + bias
    for add in (False, True):
        for weight, part in zip(weights, (slice(0, 20), slice(20, 27)), strict=True):
            target = out[:, 5:32][:, part]
            assert gguf_linear(x, weight, bias=bias[part], out=target, add=add) is target
        torch.testing.assert_close(out[:, 5:32], expected * (2 if add else 1), rtol=1e-5, atol=1e-4)
    assert (out[:, :5] == 7).all()
    assert (out[:, 32:] == 7).all()


def test_many_tokens_go_through_slices(triton_device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = stored("Q5_K", 21, 512, scale=0.5)
    weight = GgufWeight.pack([tensor], triton_device)
    x = torch.randn(70, 512, device=triton_device)
    expected = gguf_linear_reference(x, torch.from_numpy(expected_values(tensor)).to(triton_device))
    monkeypatch.setattr(kernels, "_SCRATCH_BYTES", 8 * 512 * 4)
    torch.testing.assert_close(gguf_linear(x, weight), expected, rtol=1e-5, atol=1e-4)
    assert gguf_linear(x[:0], weight).shape == (0, 21)


@pytest.mark.parametrize("tokens", [1, 5] if IS_GPU else [3])
def test_every_candidate_tile_gives_the_same(triton_device: str, tokens: int) -> None:
    tensor = stored("Q3_K", 19, 256, scale=0.5)
    weight = GgufWeight.pack([tensor], triton_device)
    x = torch.randn(tokens, 256, device=triton_device)
    expected = gguf_linear_reference(x, torch.from_numpy(expected_values(tensor)).to(triton_device))
    for config in candidates(tokens)[:: 1 if IS_GPU else 18]:  # else one of each way
        torch.testing.assert_close(gguf_linear(x, weight, config=config), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not IS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("kind", BLOCK_TYPES)
def test_large_matrices_on_a_gpu(kind: str, dtype: torch.dtype) -> None:
    """The tiles chosen for many rows, which Hopper's warpgroups multiply."""
    if dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("the GPU has no bfloat16")
    tensor = stored(kind, 8200, 512, scale=0.5)
    weight, values = GgufWeight.pack([tensor], "cuda"), torch.from_numpy(expected_values(tensor)).to("cuda")
    for tokens in (2, 3, 16, 17, 64):
        x = torch.randn(tokens, 512, device="cuda").to(dtype)
        expected = gguf_linear_reference(x, values if kernels.default_config(weight, tokens).by_token else values.to(dtype))
        bound = gguf_linear_reference(x.abs(), values.abs())
        assert ((gguf_linear(x, weight, torch.float32) - expected).abs() <= 1e-5 * bound).all()
