"""Attention over a window and a compressed past on a GPU, token by token, against torch's operators on the same caches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.layers.compressed_attention import CompressedAttention, CompressedAttentionWeights, IndexerSizes
from pocketllm.torch_engine.layers.compressed_cache import CompressedCache, CompressedShape, LayerShape
from pocketllm.torch_engine.layers.compressed_step import CompressedStep
from pocketllm.torch_engine.layers.compressor import CompressorWeights
from pocketllm.torch_engine.layers.device import Norm
from pocketllm.torch_engine.layers.rope import RotaryEmbedding

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels.compressed_decode import choose_entries
from pocketllm.torch_engine.kernels.compressed_rows import Rows
from pocketllm.torch_engine.kernels.fp8 import Fp8Weight
from pocketllm.torch_engine.kernels.grouped_linear import grouped_linear
from pocketllm.torch_engine.kernels.linear import DenseWeight, linear_reference
from pocketllm.torch_engine.layers.gpu_compressed import GpuCompressedAttention
from pocketllm.torch_engine.layers.gpu_linear import GpuLinear

HIDDEN, HEADS, DIM, LATENT, WINDOW, BLOCK_SIZE, BLOCKS = 32, 3, 32, 16, 40, 16, 12
SHAPES = {
    "window": LayerShape(),
    "sparse": LayerShape(4, (DIM, 16), overlaps=True),
    "heavy": LayerShape(32, (DIM,)),
}


def layer(shape: LayerShape, device: str) -> tuple[CompressedAttentionWeights, CompressedCache]:
    """Random weights, and a cache that is full of noise."""
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, generator=generator) * scale).to(device)

    def matrix(rows: int, columns: int) -> GpuLinear:
        return GpuLinear([DenseWeight(draw(rows, columns, scale=columns**-0.5))], None, torch.float32)

    def norm(size: int) -> Norm:
        return Norm(draw(size).abs() + 0.5, 1e-5)

    indexer = IndexerSizes(4, 16, 7) if len(shape.widths) == 2 else None
    compressors = [CompressorWeights(width, draw(shape.ratio, shape.input_width(width) // 2), norm(width)) for width in shape.widths]
    inputs = LATENT + DIM + sum(shape.input_width(width) for width in shape.widths) + (indexer.num_heads if indexer else 0)
    weights = CompressedAttentionWeights(
        num_heads=HEADS,
        head_dim=DIM,
        shape=shape,
        rope=RotaryEmbedding(8, 100.0, BLOCKS * BLOCK_SIZE, device=device),
        input=matrix(inputs, HIDDEN),
        query_norm=norm(LATENT),
        query=matrix(HEADS * DIM + (indexer.num_heads * indexer.head_dim if indexer else 0), LATENT),
        key_norm=norm(DIM),
        sinks=draw(HEADS),
        compressors=compressors,
        indexer=indexer,
        groups=matrix(24, HEADS * DIM),
        output=matrix(HIDDEN, 24),
        activations=torch.float32,
    )
    cache = CompressedCache(CompressedShape(WINDOW, DIM, (shape,)), 3 * BLOCKS, BLOCK_SIZE, 4, torch.float32, device)
    for one in (*cache.states.windows, *cache.states.inputs[0], *cache.entries[0]):
        one.copy_(draw(*one.shape))
    return weights, cache


def tensors(cache: CompressedCache) -> list[torch.Tensor]:
    return [*cache.states.windows, *cache.states.inputs[0], *cache.entries[0]]


def batch_of(positions: list[int], device: str) -> DeviceBatch:
    """Rows in slots 2, 0 and 1, and where there are more positions than that, rows that are none."""
    count = len(positions)
    slots = [2, 0, 1, *[-1] * count][:count]
    numbers: dict[str, Any] = {"dtype": torch.int32, "device": device}
    tables = torch.randperm(3 * BLOCKS, generator=torch.Generator().manual_seed(2)).view(3, BLOCKS).to(**numbers)
    return DeviceBatch(
        token_ids=torch.zeros(count, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, **numbers),
        slot_mapping=torch.zeros(count, **numbers),
        block_tables=tables,
        row_slots=torch.tensor(slots, **numbers),
        state_slots=torch.tensor(slots, **numbers),
        lengths=torch.tensor([position + 1 for position in positions], **numbers),
        num_decode=count,
        prompts=None,
        longest_prompt=0,
        is_padded=False,
    )


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("positions", [[0, 62, 127], [3, 30, 99]])
def test_steps(name: str, positions: list[int], triton_device: str) -> None:
    """Rows at their beginning, with fewer entries than are chosen and with more, some of which complete an entry; and one that is none."""
    weights, cache = layer(SHAPES[name], triton_device)
    _, own = layer(SHAPES[name], triton_device)
    plain, fast = CompressedAttention(weights, 0), GpuCompressedAttention(weights, 0)
    assert fast.is_capturable
    generator = torch.Generator().manual_seed(3)
    for step in range(3):
        x = torch.randn(4, HIDDEN, generator=generator).to(triton_device)
        now = [position + step for position in positions]
        wanted = plain(x[:3], CompressedStep.of(batch_of(now, triton_device), BLOCK_SIZE), cache)
        found = fast(x, batch_of([*now, 0], triton_device), own)
        assert (found[:3] - wanted).abs().max() <= 1e-4 * wanted.abs().max()
        assert found[3].abs().max() == 0
        for one, other in zip(tensors(own), tensors(cache), strict=True):
            assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype: torch.dtype, triton_device: str) -> None:
    weights, cache = layer(SHAPES["heavy"], triton_device)
    half = CompressedCache(cache.shape, 3 * BLOCKS, BLOCK_SIZE, 4, dtype, triton_device)
    for one, other in zip(tensors(half), tensors(cache), strict=True):
        one.copy_(other)
    batch, x = batch_of([100, 40, 2], triton_device), torch.randn(3, HIDDEN).to(triton_device)
    wanted = CompressedAttention(weights, 0)(x, CompressedStep.of(batch, BLOCK_SIZE), cache)
    found = GpuCompressedAttention(weights, 0)(x, batch, half)
    assert (found - wanted).abs().max() <= 0.03 * wanted.abs().max()


@pytest.mark.parametrize("top_k", [1, 5, 64])
def test_chosen_entries(top_k: int, triton_device: str) -> None:
    """More scores than are looked at at once, and equal ones."""
    scores = torch.randn(3, 1500).mul(2).round().div(2).to(triton_device)
    scores[1] = 0
    batch = batch_of([5999, 1200, 2], triton_device)
    rows = Rows(batch.positions, batch.row_slots, batch.block_tables, BLOCK_SIZE, scores, scores)
    found = choose_entries(scores, 4, top_k, rows)
    for place, count in enumerate((1500, 300)):
        own = scores[place, :count]
        assert torch.equal(own.sort(descending=True, stable=True).indices[:top_k], found[place].long())


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize(("rows", "block"), [(16, 128), (128, 64)])
def test_grouped_linear(num_tokens: int, rows: int, block: int, triton_device: str) -> None:
    """Groups that share a block of scales, and such that have several."""
    groups, columns = 3, 64
    values = torch.randn(groups * rows, columns).to(triton_device).to(torch.float8_e4m3fn)
    weight = Fp8Weight(values, torch.rand(-(-groups * rows // block), 1).to(triton_device) + 0.5, (block, 128))
    x = torch.randn(num_tokens, groups * columns).to(triton_device)
    dense = DenseWeight(linear_reference(torch.eye(columns, device=values.device), weight).t().contiguous())
    parts = [linear_reference(x[:, g * columns : (g + 1) * columns], DenseWeight(dense.values[g * rows : (g + 1) * rows])) for g in range(groups)]
    wanted = torch.cat(parts, dim=1)
    for one in (weight, dense):
        assert (grouped_linear(x, one, groups) - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_scores_that_are_no_numbers(triton_device: str) -> None:
    """What is chosen is there all the same."""
    scores = torch.full((3, 1500), float("nan"), device=triton_device)
    scores[0, 7] = 1.0
    batch = batch_of([5999, 1200, 2], triton_device)
    found = choose_entries(scores, 4, 5, Rows(batch.positions, batch.row_slots, batch.block_tables, BLOCK_SIZE, scores, scores))
    assert found[0].tolist() == [7, 0, 1, 2, 3]
    assert found[1].tolist() == [0, 1, 2, 3, 4]


def test_a_row_that_is_none_stores_nothing(triton_device: str) -> None:
    weights, cache = layer(SHAPES["sparse"], triton_device)
    before = [one.clone() for one in tensors(cache)]
    batch = batch_of([3, 3, 3], triton_device)
    GpuCompressedAttention(weights, 0)(torch.ones(3, HIDDEN, device=triton_device), replace(batch, row_slots=torch.full_like(batch.row_slots, -1)), cache)
    assert all(torch.equal(one, other) for one, other in zip(tensors(cache), before, strict=True))
