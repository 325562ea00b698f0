"""Storing a decoded token of attention over a compressed past on a GPU: its key, the compressors' inputs, and the entries that it completes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.compressed_rows import Rows, entry_places, rotate_end
from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs


@dataclass(frozen=True, slots=True)
class PooledInputs:
    """One compressor of a layer.

    Args:
        first: column of its inputs in the projection.
        width: values of an entry, a power of two.
        states: [num_slots + 1, span, input_width] float32.
        bias: [ratio, input_width / 2] float32.
        norm: weights [width] float32 and eps.
        entries: [num_entries, width].
    """

    first: int
    width: int
    states: torch.Tensor
    bias: torch.Tensor
    norm: tuple[torch.Tensor, float]
    entries: torch.Tensor


def take_in(
    projected: torch.Tensor, first: int, norm: tuple[torch.Tensor, float], windows: torch.Tensor, compressors: Sequence[PooledInputs], ratio: int,
    rows: Rows, *, overlaps: bool,
) -> None:  # fmt: skip
    """Store each row's token.

    Args:
        projected: [T, width] float32, its rows contiguous.
        first: column of the key.
        norm: of the key, weights [head_dim] float32 and eps.
        windows: [num_slots + 1, window, head_dim], of the tokens themselves.
        compressors: none, the attention's, or that and the indexer's.
        ratio: tokens of an entry.
        overlaps: an entry is pooled from the tokens before its own, too.
    """
    T, head_dim = projected.shape[0], windows.shape[2]
    none = PooledInputs(0, 1, projected, projected, (projected, 0.0), windows)
    one, two = (*compressors, none, none)[:2]
    _take_in_kernel[(1 + len(compressors), T)](
        projected, projected.stride(0), first, *norm, windows, rows.positions, rows.slots, rows.tables, rows.tables.stride(0), rows.cos, rows.sin,
        one.first, one.states, one.bias, *one.norm, one.entries, two.first, two.states, two.bias, *two.norm, two.entries,
        WINDOW=windows.shape[1], DIM=head_dim, ROTARY=2 * rows.cos.shape[1], RATIO=max(1, ratio), OVERLAPS=overlaps,
        COMPRESSORS=len(compressors), WIDTH=one.width, OTHER=two.width, BLOCK_SIZE=rows.block_size, num_warps=4, **launch_options(projected.device),
    )  # fmt: skip


@triton.jit
def _compress(
    inputs, state, bias, norm_weight, eps, entries, table, position, cos, sin,
    RATIO: tl.constexpr, OVERLAPS: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Store one token's inputs, and the entry that it completes."""
    SPAN: tl.constexpr = 2 * RATIO if OVERLAPS else RATIO
    VALUES: tl.constexpr = 2 * WIDTH if OVERLAPS else WIDTH  # of a token; as many weights follow them
    columns = tl.arange(0, 2 * VALUES)
    tl.store(state + position % SPAN * (2 * VALUES) + columns, tl.load(inputs + columns))
    if (position + 1) % RATIO == 0:
        tl.debug_barrier()
        column = tl.arange(0, WIDTH)
        window = position // RATIO
        top = tl.full([WIDTH], -1e30, tl.float32)
        total = tl.zeros([WIDTH], tl.float32)
        pooled = tl.zeros([WIDTH], tl.float32)
        first = tl.where(window == 0, SPAN - RATIO, 0)  # there is no window before the first
        for place in range(first, SPAN):
            at = state + (position - SPAN + 1 + place) % SPAN * (2 * VALUES) + tl.where(place >= SPAN - RATIO, VALUES - WIDTH, 0) + column
            own = bias + place % RATIO * VALUES + tl.where(place >= SPAN - RATIO, VALUES - WIDTH, 0) + column
            gate = tl.load(at + VALUES) + tl.load(own)
            higher = tl.maximum(top, gate)
            share, kept = tl.exp(gate - higher), tl.exp(top - higher)
            total = total * kept + share
            pooled = pooled * kept + share * tl.load(at)
            top = higher
        pooled = pooled / total
        pooled = pooled * tl.rsqrt(tl.sum(pooled * pooled, 0) / WIDTH + eps) * tl.load(norm_weight + column)
        first_position = window * RATIO * (ROTARY // 2)
        entry = rotate_end(tl.reshape(pooled, [1, WIDTH]), cos + first_position, sin + first_position, 1.0, 1, WIDTH, ROTARY)
        place = entry_places(window, window >= 0, table, RATIO, BLOCK_SIZE)
        tl.store(entries + place * WIDTH + column[None, :], entry.to(entries.dtype.element_ty))


@triton.jit
def _take_in_kernel(
    projected, stride, first, norm_weight, eps, windows, positions, slots, tables, table_stride, cos, sin,
    first_1, state_1, bias_1, norm_1, eps_1, entries_1, first_2, state_2, bias_2, norm_2, eps_2, entries_2,
    WINDOW: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, RATIO: tl.constexpr, OVERLAPS: tl.constexpr, COMPRESSORS: tl.constexpr,
    WIDTH: tl.constexpr, OTHER: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token stores its key, the others are those of the compressors."""
    part = tl.program_id(0)
    token = tl.program_id(1)
    wait_for_inputs(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    row = projected + token.to(tl.int64) * stride
    table = tables + slot * table_stride
    SPAN: tl.constexpr = 2 * RATIO if OVERLAPS else RATIO
    INPUTS: tl.constexpr = 4 if OVERLAPS else 2
    if slot >= 0:
        if part == 0:
            column = tl.arange(0, DIM)
            key = tl.load(row + first + column)
            key = key * tl.rsqrt(tl.sum(key * key, 0) / DIM + eps) * tl.load(norm_weight + column)
            at = position * (ROTARY // 2)
            turned = rotate_end(tl.reshape(key, [1, DIM]), cos + at, sin + at, 1.0, 1, DIM, ROTARY)
            tl.store(windows + (slot * WINDOW + position % WINDOW) * DIM + column[None, :], turned.to(windows.dtype.element_ty))
        if COMPRESSORS >= 1:  # noqa: SIM102  # known when it is compiled, as the place in the grid is not
            if part == 1:
                own = state_1 + slot * (SPAN * INPUTS * WIDTH)
                _compress(row + first_1, own, bias_1, norm_1, eps_1, entries_1, table, position, cos, sin, RATIO, OVERLAPS, WIDTH, ROTARY, BLOCK_SIZE)
        if COMPRESSORS >= 2:  # noqa: SIM102
            if part == 2:
                own = state_2 + slot * (SPAN * INPUTS * OTHER)
                _compress(row + first_2, own, bias_2, norm_2, eps_2, entries_2, table, position, cos, sin, RATIO, OVERLAPS, OTHER, ROTARY, BLOCK_SIZE)
