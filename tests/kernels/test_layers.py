"""Layers against plain float32 (or float64) formulas."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pocketllm.torch_engine.layers.activation import silu_and_mul
from pocketllm.torch_engine.layers.embedding import Embedding
from pocketllm.torch_engine.layers.linear import Biased, build_head, build_linear, has_bfloat16_units, has_float16_packing
from pocketllm.torch_engine.layers.norm import HeadNorm, RMSNorm
from pocketllm.torch_engine.layers.rope import RotaryEmbedding, rotate
from pocketllm.torch_engine.weights import StoredTensor

needs_bfloat16 = pytest.mark.skipif(not has_bfloat16_units(), reason="this processor has no bfloat16 units")
needs_float16 = pytest.mark.skipif(not has_float16_packing(), reason="this build of PyTorch packs no float16 matrices")


def stored(tensor_type: str, shape: tuple[int, int], *, scale: float = 1.0, seed: int = 0) -> StoredTensor:
    """A random matrix as a file would hold it."""
    values = (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)
    floats = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
    if tensor_type in floats:
        return StoredTensor("t", tensor_type, shape, None, torch.from_numpy(values).to(floats[tensor_type]))
    return StoredTensor("t", tensor_type, shape, gguf.quantize(values, gguf.GGMLQuantizationType[tensor_type]), None)


@pytest.mark.parametrize("size", [1, 7, 64, 576])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_rms_norm(size: int, scale: float, eps: float) -> None:
    x, weight = torch.randn(9, size) * scale, torch.randn(size)
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    found = RMSNorm(weight, eps, torch.float32)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=3e-6, atol=3e-6)
    rounded = RMSNorm(weight, eps, torch.bfloat16)(x)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.double(), expected, rtol=2**-8, atol=3e-6)


def test_rms_norm_does_not_subtract_the_mean() -> None:
    x = torch.full((2, 8), 5.0)
    torch.testing.assert_close(RMSNorm(torch.ones(8), 0.0, torch.float32)(x), torch.ones(2, 8))


def test_rms_norm_of_one_large_value_among_small_ones() -> None:
    x = torch.randn(3, 576)
    x[:, 17] = 4e3  # as the first token's residual stream has in real models
    wide = x.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(RMSNorm(torch.ones(576), 1e-5, torch.float32)(x).double(), expected, rtol=5e-6, atol=1e-7)


def test_rms_norm_of_zeros_and_leaves_its_input() -> None:
    x = torch.zeros(2, 8)
    assert RMSNorm(torch.ones(8), 1e-5, torch.float32)(x).tolist() == [[0.0] * 8] * 2
    x = torch.randn(2, 8)
    before = x.clone()
    RMSNorm(torch.ones(8), 1e-5, torch.float32)(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize(("head_dim", "theta"), [(2, 1e4), (16, 1e4), (64, 1e5)])
def test_rotation(head_dim: int, theta: float) -> None:
    positions = torch.tensor([0, 1, 5, 100, 1999])
    x = torch.randn(5, 3, head_dim)
    half = head_dim // 2
    frequency = theta ** (-2 * torch.arange(half, dtype=torch.float64) / head_dim)
    turn = torch.polar(torch.ones(5, 1, half, dtype=torch.float64), (positions.double().unsqueeze(1) * frequency).unsqueeze(1))
    turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn
    cos, sin = RotaryEmbedding(head_dim, theta, 2000).at(positions)
    found = rotate(x, cos, sin)
    assert found.dtype == torch.float32
    # the angle itself is a float32: at position 1999 it is known to 1e-4
    torch.testing.assert_close(found.double(), torch.cat([turned.real, turned.imag], -1), rtol=0, atol=8e-4)
    torch.testing.assert_close(found[:4].double(), torch.cat([turned.real, turned.imag], -1)[:4], rtol=0, atol=5e-5)


def test_position_zero_is_not_rotated() -> None:
    x = torch.randn(1, 2, 8)
    cos, sin = RotaryEmbedding(8, 1e4, 4).at(torch.tensor([0]))
    assert torch.equal(rotate(x, cos, sin), x)


def test_scores_depend_on_the_distance_alone() -> None:
    query, key = torch.randn(1, 1, 16), torch.randn(1, 1, 16)
    rope = RotaryEmbedding(16, 1e4, 100)

    def score(at: int, to: int) -> float:
        return float((rotate(query, *rope.at(torch.tensor([at]))) * rotate(key, *rope.at(torch.tensor([to])))).sum())

    assert score(9, 4) == pytest.approx(score(59, 54), abs=1e-4)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_what_is_past_the_rotary_values_stays() -> None:
    x = torch.randn(3, 2, 12)
    cos, sin = RotaryEmbedding(8, 1e4, 9).at(torch.tensor([1, 2, 8]))
    found = rotate(x, cos, sin)
    assert torch.equal(found[..., :8], rotate(x[..., :8], cos, sin))
    assert torch.equal(found[..., 8:], x[..., 8:])


def test_frequency_factors_divide() -> None:
    factors = torch.tensor([1.0, 1.0, 2.0, 8.0])
    scaled = RotaryEmbedding(8, 1e4, 9, {"rope_type": "frequency_factors"}, factors)
    plain = RotaryEmbedding(8, 1e4, 9)
    slow, fast = scaled.at(torch.tensor([8])), plain.at(torch.tensor([8]))
    assert torch.equal(slow[0][..., :2], fast[0][..., :2])
    torch.testing.assert_close(slow[1][..., 2], plain.at(torch.tensor([4]))[1][..., 2])
    torch.testing.assert_close(slow[1][..., 3], plain.at(torch.tensor([1]))[1][..., 3])


def test_heads_are_normalised_by_themselves() -> None:
    x, query, key = torch.randn(3, 6, 8), torch.randn(8), torch.randn(8)
    found = HeadNorm(query, key, 4, 2, 1e-6)(x)
    for head in range(6):
        torch.testing.assert_close(found[:, head], RMSNorm(query if head < 4 else key, 1e-6, torch.float32)(x[:, head]), rtol=1e-5, atol=1e-6)


@needs_bfloat16
def test_a_bias_is_added_under_every_dtype() -> None:
    x, bias = torch.randn(3, 64), torch.randn(32)
    for dtype in (torch.float32, torch.bfloat16):
        linear = build_linear([stored("F32", (32, 64))], dtype)
        found = Biased(linear, bias)(x.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found.float(), linear(x.to(dtype)).float() + bias, rtol=2**-7, atol=2**-6)


def test_rotation_of_bfloat16_is_float32() -> None:
    x = torch.randn(2, 2, 8).bfloat16()
    cos, sin = RotaryEmbedding(8, 1e4, 4).at(torch.tensor([1, 2]))
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2)])
def test_silu_and_mul(dtype: torch.dtype, tolerance: float) -> None:
    x = (torch.randn(5, 24) * 3).to(dtype)
    gate, up = x.double()[:, :12], x.double()[:, 12:]
    found = silu_and_mul(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), gate / (1 + (-gate).exp()) * up, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tensor_type", ["Q8_0", "F32", "F16", "BF16"])
@pytest.mark.parametrize("exact", [True, False])
def test_embedding_keeps_its_type_exactly(tensor_type: str, exact: bool) -> None:
    tensor = stored(tensor_type, (50, 96))
    ids = torch.tensor([3, 49, 0, 3])
    embedding = Embedding(tensor, exact=exact)
    found = embedding(ids)
    assert found.dtype == torch.float32
    assert torch.equal(found, tensor.float()[ids])
    bits = {"Q8_0": 8.5, "F32": 32, "F16": 16, "BF16": 16}[tensor_type]
    assert embedding.num_bytes == 50 * 96 * bits / 8


def test_an_embedding_of_other_blocks_is_float16_unless_exact() -> None:
    tensor = stored("Q4_1", (20, 64))
    ids = torch.arange(20)
    assert torch.equal(Embedding(tensor, exact=True)(ids), tensor.float())
    rounded = Embedding(tensor, exact=False)
    assert torch.equal(rounded(ids), tensor.float().half().float())
    assert rounded.num_bytes == 20 * 64 * 2


def test_adding_to_an_embedding_leaves_the_table() -> None:
    embedding = Embedding(stored("F32", (4, 8)), exact=True)
    first = embedding(torch.tensor([1]))
    before = first.clone()
    first += 1
    assert torch.equal(embedding(torch.tensor([1])), before)


# Tolerances are of the result's scale: sqrt(in) for random weights and inputs of size one.
LAYOUTS = [
    pytest.param(torch.float32, 2e-6, id="float32"),
    pytest.param(torch.float16, 1e-3, id="float16", marks=needs_float16),
    pytest.param(torch.bfloat16, 2e-2, id="bfloat16", marks=needs_bfloat16),
]


@pytest.mark.parametrize(("dtype", "tolerance"), LAYOUTS)
@pytest.mark.parametrize("tensor_type", ["F32", "BF16", "Q8_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("num_rows", [1, 2, 6, 7, 8, 65])
def test_linear(dtype: torch.dtype, tolerance: float, tensor_type: str, num_rows: int) -> None:
    tensor = stored(tensor_type, (48, 128))
    layer = build_linear([tensor], dtype)
    activation = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    x = torch.randn(num_rows, 128).to(activation)
    found = layer(x)
    assert found.dtype == activation
    expected = x.double() @ tensor.float().double().T
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance * 128**0.5)


@pytest.mark.parametrize(("dtype", "tolerance"), LAYOUTS)
@pytest.mark.parametrize("types", [("Q4_1", "Q4_1", "Q4_1"), ("Q4_0", "Q4_1", "Q8_0")])
def test_stacked_matrices_keep_their_order(dtype: torch.dtype, tolerance: float, types: tuple[str, ...]) -> None:
    tensors = [stored(tensor_type, (rows, 64), seed=rows) for tensor_type, rows in zip(types, (32, 16, 48), strict=True)]
    activation = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    for num_rows in (1, 9):
        x = torch.randn(num_rows, 64).to(activation)
        expected = torch.cat([x.double() @ tensor.float().double().T for tensor in tensors], dim=-1)
        torch.testing.assert_close(build_linear(tensors, dtype)(x).double(), expected, rtol=tolerance, atol=tolerance * 8)


@pytest.mark.parametrize(("dtype", "tolerance"), LAYOUTS)
@pytest.mark.parametrize("shape", [(33, 64), (48, 32), (10, 96)])
def test_linear_of_shapes_that_int4_does_not_take(dtype: torch.dtype, tolerance: float, shape: tuple[int, int]) -> None:
    tensor = stored("Q4_1", shape)
    activation = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    x = torch.randn(2, shape[1]).to(activation)
    torch.testing.assert_close(build_linear([tensor], dtype)(x).double(), x.double() @ tensor.float().double().T, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize(("dtype", "tolerance"), LAYOUTS)
def test_a_row_of_a_linear_does_not_see_its_neighbours(dtype: torch.dtype, tolerance: float) -> None:
    layer = build_linear([stored("Q4_1", (48, 128))], dtype)
    x = torch.randn(9, 128).to(torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    whole = layer(x)
    x[4] = float("nan")
    spoiled = layer(x)
    assert spoiled[4].isnan().all()
    rest = [row for row in range(9) if row != 4]
    torch.testing.assert_close(spoiled[rest].float(), whole[rest].float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-3)])
def test_the_head_is_float32_in_and_out(dtype: torch.dtype, tolerance: float) -> None:
    tensor = stored("Q8_0", (100, 64))
    x = torch.randn(5, 64)
    found = build_head(tensor, dtype)(x)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), x.double() @ tensor.float().double().T, rtol=tolerance, atol=tolerance * 8)
