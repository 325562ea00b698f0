"""Rows that decode over a compressed past, as kernels read them: what they are given, and what they share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step.

    Args:
        positions: [T] int32, of their tokens.
        slots: [T] int32, their lines in `tables`, and of their states; or -1.
        tables: [max_rows, max_blocks] int32, contiguous.
        block_size: tokens a block.
        cos, sin: [max_positions, rotary_dim / 2] float32, contiguous.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    block_size: int
    cos: torch.Tensor
    sin: torch.Tensor

    @property
    def capacity(self) -> int:
        """Most tokens of a row."""
        return self.tables.shape[1] * self.block_size


@triton.jit
def rotate_end(x, cos, sin, sign, ROWS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr):
    """x [ROWS, DIM] float32 with its last ROTARY values rotated, each two neighbours together; cos and sin point to the position's."""
    place = tl.arange(0, DIM // 2) - (DIM - ROTARY) // 2
    a = tl.load(cos + place, mask=place >= 0, other=1.0)[None, :]
    b = tl.load(sin + place, mask=place >= 0, other=0.0)[None, :] * sign
    even, odd = tl.split(tl.reshape(x, [ROWS, DIM // 2, 2]))
    return tl.reshape(tl.join(even * a - odd * b, odd * a + even * b), [ROWS, DIM])


@triton.jit
def entry_places(numbers, has, table, RATIO: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the row of `table` keeps its entries `numbers`, int64."""
    ends = (numbers + 1) * RATIO - 1
    blocks = tl.load(table + ends // BLOCK_SIZE, mask=has, other=0).to(tl.int64)
    return blocks * ((BLOCK_SIZE + RATIO - 1) // RATIO) + ends % BLOCK_SIZE // RATIO
