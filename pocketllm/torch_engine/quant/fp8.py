"""FP8 matrices with a scale for each block."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BlockScales:
    """Scales of a matrix [out, in]: value = stored * scale of its block.

    Args:
        values: [ceil(out / block[0]), ceil(in / block[1])], any float dtype.
        block: rows and columns that share a scale.
    """

    values: torch.Tensor
    block: tuple[int, int]

    def select_rows(self, order: torch.Tensor) -> BlockScales:
        """Scales of the matrix whose rows are those at `order`. Where whole blocks move they stay blocks; else rows of several mix, and each has its own."""
        height = self.block[0]
        if order.numel() % height == 0:
            by_block = order.view(-1, height)
            if bool((by_block == by_block[:, :1] + torch.arange(height)).all() & (by_block[:, 0] % height == 0).all()):
                return BlockScales(self.values[by_block[:, 0] // height], self.block)
        return BlockScales(self.values[order // self.block[0]], (1, self.block[1]))


def dequantize_fp8(stored: torch.Tensor, scales: BlockScales, out: torch.Tensor) -> None:
    """Write stored * scale, computed in float32, to `out`.

    Args:
        stored: float8_e4m3fn [out, in].
        scales: of `stored`.
        out: [out, in], any float dtype.
    """
    rows, columns = stored.shape
    height, width = scales.block
    for index in range(scales.values.shape[0]):
        part = slice(index * height, min((index + 1) * height, rows))
        by_column = scales.values[index].float().repeat_interleave(width)[:columns]
        out[part] = stored[part].float() * by_column
