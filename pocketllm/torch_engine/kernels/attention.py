"""Attention over the paged KV cache on a GPU: one query a row (decode), or a stretch of a row's prompt (prefill).

Where rows and heads alone don't fill the GPU, the context of each is split over several programs, and a second kernel combines their
results. Everything that a launch depends on is a shape, so that a CUDA graph can hold it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton

from pocketllm.torch_engine.kernels.attention_config import MAX_SPLITS, DecodeConfig, PrefillConfig, decode_config, padded_head_dim, prefill_config
from pocketllm.torch_engine.kernels.attention_kernels import combine, decode, prefill
from pocketllm.torch_engine.kernels.launch import launch_options

_FEW_SPLITS = 8


def paged_decode(
    queries: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    gate: torch.Tensor | None = None,
    config: DecodeConfig | None = None,
    *,
    out: torch.Tensor | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Attention of one query a row to the row's last `lengths` tokens, its own included, which the cache already holds.

    Args:
        queries: [num_rows, num_heads, head_dim] in the cache's dtype; query head h reads KV head h // (num_heads / num_kv_heads).
        cache_layer: [num_blocks, block_size, 2, num_kv_heads, head_dim], keys before values.
        block_tables: [max_rows, max_blocks] int32.
        row_slots: [num_rows] int32, lines of block_tables; -1 stands for no row.
        lengths: [num_rows] int32; 0 for no row, whose result is 0.
        scale: of the scores.
        window: only this many last tokens are attended to; None is all.
        gate: [num_rows, num_heads * head_dim], rows any stride apart; the result is multiplied by its sigmoid.
        config: how the kernel is cut; None is decode_config's choice.
        out: where the result goes, contiguous; None makes it.
        early: whether the cache but for the rows' last tokens, the tables, slots and lengths may be read while the kernel ahead still runs; see launch.py.

    Returns:
        [num_rows, num_heads * head_dim] in the cache's dtype.
    """
    num_rows, num_heads, head_dim = queries.shape
    num_kv_heads = cache_layer.shape[3]
    group = num_heads // num_kv_heads
    config = config or decode_config(queries, cache_layer, block_tables)
    if out is None:
        out = queries.new_empty(num_rows, num_heads * head_dim)
    call = _Call(queries, cache_layer, block_tables, row_slots, lengths, scale, window, gate, out, config.splits)
    decode[(num_rows, num_kv_heads, config.splits)](
        *call.tensors,
        *call.numbers,
        GROUP=group,
        PADDED_GROUP=max(16, triton.next_power_of_2(group)),
        BLOCK_TOKENS=config.block_tokens,
        EARLY=early,
        **call.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **call.options,
    )
    call.combine()
    return out


def paged_prefill(
    queries: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    max_query: int,
    scale: float,
    window: int | None = None,
    gate: torch.Tensor | None = None,
    config: PrefillConfig | None = None,
    *,
    out: torch.Tensor | None = None,
    is_padded: bool = False,
) -> torch.Tensor:
    """Causal attention of the last tokens of each row to the row, which the cache already holds.

    Args:
        queries: [num_tokens, num_heads, head_dim] in the cache's dtype, the rows' one after another.
        starts: [num_rows + 1] int32, where each row's queries begin in `queries`; the last is num_tokens.
        lengths: [num_rows] int32, tokens of each row up to its last query.
        max_query: the most queries that a row has.
        config: how the kernel is cut; None is prefill_config's choice.
        is_padded: there are fewer rows and queries than the shapes say: rows that have no query come last, and after the last row's query come ones that
            are no row's, whose result is 0.

    The other arguments and the result [num_tokens, num_heads * head_dim] are those of paged_decode, with a gate for each token.
    """
    num_tokens, num_heads, head_dim = queries.shape
    num_rows = row_slots.shape[0]
    # One long row is what leaves most of a GPU idle: a padded call is cut for that.
    config = config or prefill_config(queries, cache_layer, block_tables, 1 if is_padded else num_rows, max_query)
    if out is None:
        out = queries.new_empty(num_tokens, num_heads * head_dim)
    if is_padded and config.splits == 1:
        out.zero_()
    call = _Call(queries, cache_layer, block_tables, row_slots, lengths, scale, window, gate, out, config.splits, is_padded=is_padded)
    # Neighbouring programs are the heads of one stretch of queries, which share tiles of keys and values in the L2 cache.
    prefill[(num_heads * config.splits, triton.cdiv(max_query, config.block_queries), num_rows)](
        *call.tensors,
        starts,
        *call.numbers,
        GROUP=num_heads // cache_layer.shape[3],
        BLOCK_QUERIES=config.block_queries,
        BLOCK_TOKENS=config.block_tokens,
        **call.constants,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **call.options,
    )
    call.combine()
    return out


class _Call:
    """What the launches of one call share: arguments, and the scratch of split contexts."""

    def __init__(
        self,
        queries: torch.Tensor,
        cache_layer: torch.Tensor,
        block_tables: torch.Tensor,
        row_slots: torch.Tensor,
        lengths: torch.Tensor,
        scale: float,
        window: int | None,
        gate: torch.Tensor | None,
        out: torch.Tensor,
        splits: int,
        *,
        is_padded: bool = False,
    ) -> None:
        num_queries, num_heads, head_dim = queries.shape
        assert queries.is_contiguous() and block_tables.stride(1) == 1 and cache_layer.stride(4) == 1
        assert queries.dtype == cache_layer.dtype and num_heads % cache_layer.shape[3] == 0
        assert gate is None or gate.stride(1) == 1
        assert out.is_contiguous()
        self._gate, self._out = gate, out
        partial = logarithms = None
        if splits > 1:
            partial = torch.empty((num_queries, num_heads, splits, head_dim), dtype=torch.float32, device=queries.device)
            logarithms = torch.empty((num_queries, num_heads, splits), dtype=torch.float32, device=queries.device)
            if is_padded:  # queries of no row have seen nothing
                logarithms.fill_(-math.inf)
        self._partial, self._logarithms = partial, logarithms
        self.tensors = (queries, cache_layer, block_tables, row_slots, lengths, gate, out, partial, logarithms)
        self.numbers = (
            scale * math.log2(math.e),
            window or 0,
            block_tables.stride(0),
            0 if gate is None else gate.stride(0),
            *cache_layer.stride()[:4],
            splits,
        )
        self._splits = splits
        self._common = {
            "NUM_HEADS": num_heads,
            "HEAD_DIM": head_dim,
            "HAS_GATE": gate is not None,
        }
        self.constants: dict[str, Any] = {
            **self._common,
            "SPLIT": splits > 1,
            "PADDED_DIM": padded_head_dim(head_dim),
            "BLOCK_SIZE": cache_layer.shape[1],
            "WINDOWED": window is not None,
            "PRECISION": "ieee" if queries.dtype == torch.float32 else "tf32",  # of no effect below 32 bits
        }
        self.options = launch_options(queries.device)

    def combine(self) -> None:
        """Bring the results of a split context together."""
        splits, head_dim = self._splits, self._common["HEAD_DIM"]
        if splits == 1:
            return
        block_dims, is_few = min(triton.next_power_of_2(head_dim), 64), splits <= _FEW_SPLITS
        combine[(self._out.shape[0], self._common["NUM_HEADS"], triton.cdiv(head_dim, block_dims))](
            self._partial,
            self._logarithms,
            self._gate,
            self._out,
            self.numbers[3],
            splits,
            BLOCK_DIMS=block_dims,
            PADDED_SPLITS=_FEW_SPLITS if is_few else max(MAX_SPLITS, triton.next_power_of_2(splits)),  # two kernels serve any number
            **self._common,
            num_warps=1 if is_few else 4,
            **self.options,
        )


def paged_decode_reference(
    queries: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    lengths: torch.Tensor,
    scale: float,
    window: int | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """paged_decode in float32 with torch's operators."""
    starts = torch.arange(queries.shape[0] + 1)
    return paged_prefill_reference(queries, cache_layer, block_tables, row_slots, lengths, starts, 1, scale, window, gate)


def paged_prefill_reference(
    queries: torch.Tensor,
    cache_layer: torch.Tensor,
    block_tables: torch.Tensor,
    row_slots: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor,
    max_query: int,
    scale: float,
    window: int | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """paged_prefill in float32 with torch's operators."""
    num_heads = queries.shape[1]
    out = torch.zeros_like(queries, dtype=torch.float32)
    block_size, num_kv_heads = cache_layer.shape[1], cache_layer.shape[3]
    bounds = starts.tolist()
    for index, (line, length) in enumerate(zip(row_slots.tolist(), lengths.tolist(), strict=True)):
        begin, end = bounds[index], bounds[index + 1]
        assert end - begin <= max_query
        if line < 0 or length == 0:
            continue
        blocks = block_tables[line, : -(-length // block_size)].long()
        keys, values = cache_layer[blocks].flatten(0, 1)[:length].float().repeat_interleave(num_heads // num_kv_heads, dim=2).unbind(1)
        scores = torch.einsum("qhd,khd->hqk", queries[begin:end].float(), keys) * scale
        ages = torch.arange(length - (end - begin), length, device=keys.device)[:, None] - torch.arange(length, device=keys.device)
        hidden = (ages < 0) if window is None else (ages < 0) | (ages >= window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, values)
    result = out.flatten(1)
    return (result if gate is None else result * gate.float().sigmoid()).to(queries.dtype)
