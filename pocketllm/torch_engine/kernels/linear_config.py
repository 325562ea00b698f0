"""Tile sizes of the skinny matrix products: what is chosen for a shape, and what a benchmark may try instead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pocketllm.torch_engine.kernels.launch import DeviceLimits

MAX_SPLIT_BLOCKS = 4096  # row blocks of a product whose columns are split
MAX_ROWS = 64  # rows of x up to which a product is bound by reading the weights


@dataclass(frozen=True, slots=True)
class VectorConfig:
    """How one row is multiplied.

    Args:
        block_n: rows of the weight a program computes, of gate and up each in a gated product.
        block_k: columns it reads at a time.
        num_warps: of a program.
        words: 32-bit words of FP8 weights a thread loads at once, 2 or 4: 2 suits a float32 row, that of a product with a norm.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    words: int = 4


@dataclass(frozen=True, slots=True)
class MatrixConfig:
    """How 2 to 64 rows are multiplied, on tensor cores.

    Args:
        block_n: rows of the weight a program computes, of gate and up each in a gated product.
        block_k: columns it multiplies at a time.
        num_warps: of a program.
        num_stages: tiles on their way at a time.
        split: programs that share the columns of the same rows.
    """

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    split: int = 1


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How one row is multiplied by programs that stay for many blocks of weight rows.

    Args:
        block_n: rows of a block, of gate and up each in a gated product.
        block_k: columns of it that are read at a time.
        num_warps: of a program.
        per_multiprocessor: programs of a multiprocessor.
        words: 32-bit words of weights a thread loads at once, 2 or 4.
    """

    block_n: int
    block_k: int
    num_warps: int = 8
    per_multiprocessor: int = 2
    words: int = 4


Config = VectorConfig | MatrixConfig | StreamConfig


def vector_config(rows: int, columns: int, itemsize: int, gated: bool, device: DeviceLimits) -> VectorConfig:
    """The choice for one row of x and a weight of `rows` (those of the gate, where gated) x `columns` values of `itemsize` bytes."""
    widest, whole_row = 8192 // itemsize, max(64, 1 << (columns - 1).bit_length())
    words = 2
    if itemsize == 1:
        block_k, num_warps = min(2048, whole_row), 4
        block_n = 8 if rows >= 8192 else 4
        words = 4 if rows < 8192 and columns <= 4096 else 2
    else:
        block_k = min(widest, whole_row)
        block_n, num_warps = (2, 4) if gated else (4, 8)
    while block_n > 1 and rows * num_warps < block_n * device.num_multiprocessors * 12:  # fewer than 12 warps a multiprocessor
        block_n //= 2
    return VectorConfig(block_n, block_k, num_warps, words=words)


def matrix_config(num_rows: int, rows: int, columns: int, itemsize: int, gated: bool, device: DeviceLimits) -> MatrixConfig:
    """The choice for `num_rows` rows of x, 2 to 64, and a weight as in `vector_config`. Without tensor cores all of a tile is in registers."""
    if not device.tensor_cores:
        return MatrixConfig(16, 16, num_warps=4, num_stages=2)
    if (measured := _measured(num_rows, rows, columns, itemsize, gated)) is not None:
        tile = measured.block_k * (measured.block_n * (1 + gated) * itemsize + max(16, 1 << (num_rows - 1).bit_length()) * 2)
        if tile * measured.num_stages <= device.shared_memory:
            return measured
    block_k = min(128, 256 // itemsize, max(16, 1 << (columns - 1).bit_length()))
    weight_rows = rows * 2 if gated else rows

    def cost(block_n: int, split: int) -> float:
        """Bytes through the busiest multiprocessor beside its even share of the weights: x again for each block, and the shares' sums
        twice, with a little for the wait of the last share."""
        programs = -(-rows // block_n) * split
        idle = -(-programs // device.num_multiprocessors) * device.num_multiprocessors / programs
        reread = num_rows * 2 * rows / (block_n * weight_rows * itemsize)
        shares = 0.0 if split == 1 else 0.03 + num_rows * 8 * split / (columns * itemsize)
        return idle * (1 + 0.4 * reread + shares)

    blocks = (16, 32, 64) if num_rows <= 16 else (32, 64)
    most = MAX_SPLIT_BLOCKS // 8 * blocks[0]  # more rows fill the device without
    splits = [split for split in (1, 2, 4, 8) if split == 1 or (columns // split >= 4 * block_k and rows <= most)]
    block_n, split = min(((block_n, split) for split in splits for block_n in reversed(blocks)), key=lambda choice: cost(*choice))
    padded_rows = max(16, 1 << (num_rows - 1).bit_length())
    column = block_n * (2 if gated else 1) * itemsize + padded_rows * max(2, itemsize)  # bytes of a tile's column
    while device.shared_memory < 3 * column * block_k and block_k > 16:
        block_k //= 2
    return MatrixConfig(block_n, block_k, num_warps=4, num_stages=max(2, min(4, device.shared_memory // (column * block_k))), split=split)


def _measured(num_rows: int, rows: int, columns: int, itemsize: int, gated: bool) -> MatrixConfig | None:
    """What was fastest in a sweep on an H200, for 16-bit matrices of Qwen3.5-9B's shapes."""
    if itemsize != 2 or rows < 4096 or columns < 2048:
        return None
    if gated:
        if num_rows <= 16:
            return MatrixConfig(64, 128, 4, 4)
        return MatrixConfig(128, 128, 8, 3) if num_rows <= 32 else MatrixConfig(32, 128, 4, 3)
    if rows < 8192:
        return MatrixConfig(64, 128, 4, 5, split=2)
    if num_rows <= 16 or (num_rows > 32 and rows > 2**17):
        return MatrixConfig(128, 128, 8, 4)
    return MatrixConfig(64, 128, 4, 4 if num_rows <= 32 else 3)


def choose_config(num_rows: int, rows: int, columns: int, itemsize: int, gated: bool, device: DeviceLimits) -> Config:
    """The tile sizes used where a caller names none."""
    if num_rows == 1:
        # Measured on an H200, where such a product gains from programs that stay; without overlap, and with other shapes, none was seen to.
        if device.overlaps and not gated and 2048 < columns <= 4096 and itemsize < 4 and rows >= (8192 if itemsize == 1 else 2**16):
            return StreamConfig(4, 4096)
        return vector_config(rows, columns, itemsize, gated, device)
    return matrix_config(num_rows, rows, columns, itemsize, gated, device)


def candidates(num_rows: int, itemsize: int, gated: bool) -> Iterator[Config]:
    """What a benchmark tries for `num_rows` rows of x: one row can be multiplied either way."""
    if num_rows == 1:
        for block_n in (1, 2, 4, 8, 16):
            for block_k in (512 // itemsize, 1024 // itemsize, 2048 // itemsize, 4096 // itemsize, 8192 // itemsize):
                for num_warps in (1, 2, 4, 8):
                    if 16 <= block_n * block_k * itemsize * (1 + gated) // (32 * num_warps) <= 256:
                        yield VectorConfig(block_n, block_k, num_warps)
                        if itemsize == 1:
                            yield VectorConfig(block_n, block_k, num_warps, words=2)
    for block_n in (16, 32, 64, 128):
        for block_k in (128 // itemsize, 256 // itemsize, 512 // itemsize):
            for split in (1, 2, 4):
                for num_stages in (3, 4, 6):
                    tile = block_k * (block_n * (1 + gated) * itemsize + max(16, num_rows) * 2)
                    if tile * num_stages <= 200 * 1024:
                        yield MatrixConfig(block_n, block_k, 4 if block_n <= 64 else 8, num_stages, split)
