"""How the attention kernels are cut into tiles and programs, by the shapes of a call and the GPU it runs on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
from triton.runtime import driver

from pocketllm.torch_engine.kernels.launch import capability

_INTERPRETED_SMS = 4
MAX_SPLITS = 64


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a decode kernel is cut: `block_tokens` of the context a tile, `splits` programs for each row and KV head."""

    block_tokens: int
    splits: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, queries: torch.Tensor) -> int:
        """About the shared memory that a program takes for queries of this dtype and head_dim."""
        return _shared_bytes(queries, 16, self.block_tokens, self.num_stages)


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """How a prefill kernel is cut: `block_queries` by `block_tokens` of the context a tile, `splits` programs for each block of queries and head."""

    block_queries: int
    block_tokens: int
    splits: int
    num_warps: int
    num_stages: int

    def shared_bytes(self, queries: torch.Tensor) -> int:
        """About the shared memory that a program takes for queries of this dtype and head_dim."""
        return _shared_bytes(queries, self.block_queries, self.block_tokens, self.num_stages)


def _shared_bytes(queries: torch.Tensor, block_queries: int, block_tokens: int, num_stages: int) -> int:
    row_bytes = padded_head_dim(queries.shape[2]) * queries.element_size()
    return (block_queries + 2 * block_tokens * num_stages) * row_bytes


def padded_head_dim(head_dim: int) -> int:
    """Columns of a tile of heads: at least 32, for Triton 3.6 multiplies wrongly on Hopper where four warps have a right operand of 16 columns (the
    values) and a left one in registers (the weights of the softmax)."""
    return max(32, int(triton.next_power_of_2(head_dim)))


@cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a program may take."""
    if device.type != "cuda":
        return _INTERPRETED_SMS, 1 << 20
    properties = driver.active.utils.get_device_properties(torch.cuda.current_device() if device.index is None else device.index)
    return int(properties["multiprocessor_count"]), int(properties["max_shared_mem"])


def decode_config(queries: torch.Tensor, cache_layer: torch.Tensor, block_tables: torch.Tensor) -> DecodeConfig:
    """The cut for shapes as paged_decode takes them."""
    num_sms, shared = _device_limits(queries.device)
    num_rows, _, head_dim = queries.shape
    token_bytes = 2 * padded_head_dim(head_dim) * cache_layer.element_size()
    programs, capacity = num_rows * cache_layer.shape[3], block_tables.shape[1] * cache_layer.shape[1]
    if 8 * programs <= num_sms:
        # Few rows: what counts is how soon the last program ends, and how little room it takes from the kernel behind.
        stages = max(1, min(3, shared // (16 * token_bytes)))
        return DecodeConfig(16, max(1, min(2 * num_sms // programs, MAX_SPLITS, triton.cdiv(capacity, 16))), num_warps=4, num_stages=stages)
    # Each program has two tiles on their way while it computes on a third; one program a multiprocessor keeps the memory busy.
    block_tokens = 16 if queries.dtype == torch.float32 else 64
    while block_tokens > 16 and 3 * block_tokens * token_bytes > shared:
        block_tokens //= 2
    stages = max(1, min(3, shared // (block_tokens * token_bytes)))
    splits = min(num_sms // programs, MAX_SPLITS, triton.cdiv(capacity, block_tokens))
    wide = block_tokens * token_bytes >= 64 * 1024  # keys and values of a tile are in registers at once
    return DecodeConfig(block_tokens, max(1, splits), num_warps=8 if wide else 4, num_stages=stages)


def prefill_config(queries: torch.Tensor, cache_layer: torch.Tensor, block_tables: torch.Tensor, num_rows: int, max_query: int) -> PrefillConfig:
    """The cut for shapes as paged_prefill takes them."""
    num_sms, shared = _device_limits(queries.device)
    _, num_heads, head_dim = queries.shape
    wide = padded_head_dim(head_dim) > 128
    # As many queries as the registers hold: with more, accumulators are spilled to memory in the loop.
    if queries.dtype == torch.float32:
        block_queries, block_tokens, num_warps, num_stages = 32, 16, 4, 1
    elif capability(queries.device)[0] == 9:
        block_queries, block_tokens, num_warps, num_stages = (128, 64, 8, 2) if wide else (128, 64, 8, 3)
    elif shared >= 96 * 1024:
        block_queries, block_tokens, num_warps, num_stages = (64, 32, 8, 2) if wide else (128, 32, 8, 2)
    else:  # before Ampere, where Triton 3.6 multiplies without tensor cores
        block_queries, block_tokens, num_warps, num_stages = (16, 16, 4, 1) if wide else (32, 16, 8, 1)
    if max_query <= 16:  # the one other size: each is compiled when it is first used
        block_queries, num_warps = 16, 4
    programs = triton.cdiv(max_query, block_queries) * num_heads * num_rows
    splits = 1 if 2 * programs > num_sms else num_sms // programs
    tiles = triton.cdiv(block_tables.shape[1] * cache_layer.shape[1], 4 * block_tokens)  # a split of less than four tiles is not worth its result
    return PrefillConfig(block_queries, block_tokens, max(1, min(splits, 32, tiles)), num_warps, num_stages)


def decode_candidates() -> list[DecodeConfig]:
    """Cuts worth measuring on a new GPU; some don't fit the shared memory of smaller ones."""
    return [
        DecodeConfig(tokens, splits, warps, stages)
        for tokens in (16, 32, 64, 128)
        for splits in (1, 2, 4, 8, 16, 32, 64)
        for warps in (2, 4, 8)
        for stages in (1, 2, 3, 4)
    ]


def prefill_candidates() -> list[PrefillConfig]:
    """Cuts worth measuring on a new GPU; some don't fit the shared memory of smaller ones."""
    return [
        PrefillConfig(queries, tokens, splits, warps, stages)
        for queries, warps in ((64, 4), (64, 8), (128, 4), (128, 8))
        for tokens in (32, 64, 128)
        for stages in (1, 2, 3)
        for splits in (1, 4, 8)
    ]
