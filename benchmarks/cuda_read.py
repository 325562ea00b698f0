"""The plainest kernel that reads memory: what decode is compared with."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _sum_block(source, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0)
    values = tl.load(source + block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(sums + block, tl.sum(values, 0))


def sum_blocks(data: torch.Tensor, sums: torch.Tensor, block: int) -> None:
    """Write the sum of each `block` numbers of `data` to `sums`. int32 [n * block] and [n]."""
    _sum_block[(sums.numel(),)](data, sums, BLOCK=block, num_warps=8)
