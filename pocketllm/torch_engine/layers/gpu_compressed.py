"""Attention over a compressed past on a GPU: rows that decode are computed by kernels, without the host; prompts by torch's operators."""

from __future__ import annotations

from typing import cast

import torch

from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.kernels.compressed_decode import attend_compressed, choose_entries, score_entries
from pocketllm.torch_engine.kernels.compressed_rows import Rows
from pocketllm.torch_engine.kernels.compressed_take_in import PooledInputs, take_in
from pocketllm.torch_engine.kernels.grouped_linear import grouped_linear
from pocketllm.torch_engine.kernels.linear import Weight
from pocketllm.torch_engine.layers.compressed_attention import CompressedAttention, CompressedAttentionWeights
from pocketllm.torch_engine.layers.compressed_cache import CompressedCache
from pocketllm.torch_engine.layers.compressed_step import CompressedStep
from pocketllm.torch_engine.layers.gpu_linear import GpuLinear

_LEAST_DIM = 16  # of a tensor core


class GpuGroupedLinear:
    """See linear.GroupedLinear: one matrix of float or FP8 values."""

    def __init__(self, weight: Weight, groups: int) -> None:
        self._weight, self._groups = weight, groups
        self.num_bytes = weight.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x, self._weight, self._groups)


class GpuCompressedAttention(CompressedAttention):
    """See CompressedAttention. A step of rows that decode, all of it, is the DeviceBatch itself."""

    def __init__(self, weights: CompressedAttentionWeights, index: int) -> None:
        super().__init__(weights, index)
        self._input, self._query, self._output = (cast(GpuLinear, one) for one in (weights.input, weights.query, weights.output))
        sizes = [weights.head_dim, *(one.width for one in weights.compressors), *([weights.indexer.head_dim] if weights.indexer else [])]
        self.is_capturable = all(size & (size - 1) == 0 and size >= _LEAST_DIM for size in sizes)
        self._starts = [sum(self._sizes[:place]) for place in range(len(self._sizes))]
        self._pooled: list[PooledInputs] | None = None
        self._pooled_of: CompressedCache | None = None

    def __call__(self, x: torch.Tensor, step: CompressedStep | DeviceBatch, cache: CompressedCache) -> torch.Tensor:
        if isinstance(step, CompressedStep):
            return super().__call__(x, step, cache)
        weights, shape, indexer, index = self._w, self._w.shape, self._w.indexer, self._index
        rows = Rows(step.positions, step.row_slots, step.block_tables, cache.block_size, weights.rope.cos, weights.rope.sin)
        windows, norm = cache.states.windows[index], weights.key_norm
        projected = self._input(x, torch.float32)
        take_in(projected, self._starts[1], (norm.weight, norm.eps), windows, self._inputs_of(cache), shape.ratio, rows, overlaps=shape.overlaps)
        query_norm = weights.query_norm
        queries = self._query.after_norm(projected[:, : self._sizes[0]], query_norm)
        entries, chosen = cache.entries[index], None
        if indexer is not None and rows.capacity // shape.ratio > indexer.top_k:
            sizes, first = (indexer.num_heads, indexer.head_dim), weights.num_heads * weights.head_dim
            scores = score_entries(queries, first, sizes, projected, self._starts[-1], entries[1], shape.ratio, indexer.top_k, rows)
            chosen = choose_entries(scores, shape.ratio, indexer.top_k, rows)
        attended = attend_compressed(
            queries, weights.num_heads, query_norm.eps, windows, entries[0] if entries else None, shape.ratio, chosen, weights.sinks, self._scale, rows,
            weights.activations,
        )  # fmt: skip
        return self._output(weights.groups(attended), torch.float32)

    def _inputs_of(self, cache: CompressedCache) -> list[PooledInputs]:
        if self._pooled is None or self._pooled_of is not cache:
            states, entries = cache.states.inputs[self._index], cache.entries[self._index]
            self._pooled_of, self._pooled = cache, [
                PooledInputs(self._starts[2 + place], one.width, states[place], one.bias, (one.norm.weight, one.norm.eps), entries[place])
                for place, one in enumerate(self._w.compressors)
            ]  # fmt: skip
        return self._pooled
