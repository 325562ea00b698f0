"""Attention over a window and a compressed past, of rows that decode, on a GPU; see layers/compressed_attention.py for what is computed.

Nothing is read on the host: grids have the size that the longest context needs, and programs without work end at once. A row of slot -1 is none: nothing
is stored for it, and its result is 0.

After compressed_take_in.py has stored the rows' tokens, `score_entries` and `choose_entries` find a query's best entries, where it has more than it attends
to; `attend_compressed` attends, its programs sharing the keys of some heads, and adds up what they found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.compressed_rows import Rows, entry_places, rotate_end
from pocketllm.torch_engine.kernels.launch import device_limits, launch_options, wait_for_inputs

_HEADS = 16  # query heads of a program, the fewest rows of a tensor core
_KEYS = 32  # that a program attends to at once
_ENTRIES = 64  # that a program scores at once
_MOST_SPLITS = 32
_RANKED, _RANKED_BESIDE = 16, 512  # scores whose places a program finds at once, and those that it looks at for it


def score_entries(
    queries: torch.Tensor,
    first: int,
    shape: tuple[int, int],
    projected: torch.Tensor,
    first_share: int,
    entries: torch.Tensor,
    ratio: int,
    top_k: int,
    rows: Rows,
) -> torch.Tensor:
    """How well each of a row's entries suits its query: the sum over heads of share * max(0, query * key), of rows with more than `top_k` of them.

    Args:
        queries: [T, width], any float dtype, its rows contiguous; those of the indexer begin at column `first`.
        shape: heads and values of each, the latter a power of two.
        projected: [T, ...] float32, its rows contiguous; the heads' shares begin at column `first_share`.
        entries: [num_entries, values], keys.
        ratio: tokens of an entry.

    Returns:
        [T, most entries] float32; what a row has no entry for is not written.
    """
    T, (heads, dim) = queries.shape[0], shape
    scores = torch.empty(T, rows.capacity // ratio, dtype=torch.float32, device=queries.device)
    programs = max(1, min(triton.cdiv(scores.shape[1], _ENTRIES), 4 * device_limits(queries.device).num_multiprocessors // T))
    _score_entries_kernel[(programs, T)](
        queries, queries.stride(0), first, projected, projected.stride(0), first_share, (heads * dim) ** -0.5, entries, scores, scores.shape[1],
        rows.positions, rows.slots, rows.tables, rows.tables.stride(0), rows.cos, rows.sin,
        HEADS=heads, PADDED=max(16, triton.next_power_of_2(heads)), DIM=dim, ROTARY=2 * rows.cos.shape[1], RATIO=ratio, TOP_K=top_k,
        BLOCK_SIZE=rows.block_size, ENTRIES=_ENTRIES, num_warps=4, **launch_options(queries.device),
    )  # fmt: skip
    return scores


def choose_entries(scores: torch.Tensor, ratio: int, top_k: int, rows: Rows) -> torch.Tensor:
    """Numbers of the `top_k` entries with the highest scores [T, top_k] int32, best first, of equal ones the first. Rows with no more are left out."""
    T = scores.shape[0]
    chosen = torch.empty(T, top_k, dtype=torch.int32, device=scores.device)
    programs = max(1, min(triton.cdiv(scores.shape[1], _RANKED), 4 * device_limits(scores.device).num_multiprocessors // T))
    _choose_kernel[(programs, T)](
        scores, scores.shape[1], chosen, rows.positions, rows.slots,
        RATIO=ratio, TOP_K=top_k, OWN=_RANKED, OTHERS=_RANKED_BESIDE, num_warps=4, **launch_options(scores.device),
    )  # fmt: skip
    return chosen


def attend_compressed(
    queries: torch.Tensor, num_heads: int, query_eps: float, windows: torch.Tensor, entries: torch.Tensor | None, ratio: int,
    chosen: torch.Tensor | None, sinks: torch.Tensor, scale: float, rows: Rows, out_dtype: torch.dtype,
) -> torch.Tensor:  # fmt: skip
    """Each row's attention to its window and its entries, or those that were chosen; rotated back by its position.

    Args:
        queries: [T, width], any float dtype, its rows contiguous; heads come first, which are normalised and rotated here.
        query_eps: of the heads' norm.
        windows: [num_slots + 1, window, head_dim].
        entries: [num_entries, head_dim], or None.
        chosen: [T, top_k] int32, for rows with more entries than that; None means all entries.
        sinks: [num_heads] float32.
        scale: of the scores.

    Returns:
        [T, num_heads * head_dim] in out_dtype.
    """
    T, (window, head_dim) = queries.shape[0], windows.shape[1:]
    most = 0 if entries is None else rows.capacity // ratio if chosen is None else chosen.shape[1]
    head_blocks, chunks = triton.cdiv(num_heads, _HEADS), triton.cdiv(window, _KEYS) + triton.cdiv(most, _KEYS)
    splits = max(1, min(chunks, _MOST_SPLITS, 2 * device_limits(queries.device).num_multiprocessors // (head_blocks * T)))
    parts = torch.empty(T, splits, num_heads, head_dim, dtype=torch.float32, device=queries.device)
    tops, totals = (torch.empty(T, splits, num_heads, dtype=torch.float32, device=queries.device) for _ in range(2))
    options = launch_options(queries.device)
    _attend_kernel[(splits, head_blocks, T)](
        queries, queries.stride(0), query_eps, windows, windows if entries is None else entries, rows.positions if chosen is None else chosen,
        parts, tops, totals, num_heads, scale * 1.4426950408889634, rows.positions, rows.slots, rows.tables, rows.tables.stride(0), rows.cos, rows.sin,
        ENTRIES=entries is not None, RATIO=max(1, ratio), TOP_K=0 if chosen is None else chosen.shape[1], WINDOW=window, DIM=head_dim,
        ROTARY=2 * rows.cos.shape[1], BLOCK_SIZE=rows.block_size, HEADS=_HEADS, KEYS=_KEYS, num_warps=8, num_stages=1, **options,
    )  # fmt: skip
    out = torch.empty(T, num_heads * head_dim, dtype=out_dtype, device=queries.device)
    _add_up_kernel[(num_heads, T)](
        parts, tops, totals, sinks, out, num_heads, splits, rows.positions, rows.cos, rows.sin,
        DIM=head_dim, ROTARY=2 * rows.cos.shape[1], SPLITS=triton.next_power_of_2(splits), num_warps=4, **options,
    )  # fmt: skip
    return out


@triton.jit
def _score_entries_kernel(
    queries, query_stride, first, projected, stride, first_share, factor, entries, scores, capacity,
    positions, slots, tables, table_stride, cos, sin,
    HEADS: tl.constexpr, PADDED: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ENTRIES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(1).to(tl.int64)
    wait_for_inputs(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    count = (position + 1) // RATIO
    begin = tl.program_id(0) * ENTRIES
    if (slot >= 0) & (count > TOP_K) & (begin < count):
        head = tl.arange(0, PADDED)
        column = tl.arange(0, DIM)
        is_head = head < HEADS
        query = tl.load(queries + token * query_stride + first + head[:, None] * DIM + column[None, :], mask=is_head[:, None], other=0.0).to(tl.float32)
        at = position * (ROTARY // 2)
        query = rotate_end(query, cos + at, sin + at, 1.0, PADDED, DIM, ROTARY).to(entries.dtype.element_ty)
        share = tl.load(projected + token * stride + first_share + head, mask=is_head, other=0.0) * factor
        table = tables + slot * table_stride
        for start in range(begin, count, tl.num_programs(0) * ENTRIES):
            number = start + tl.arange(0, ENTRIES)
            has = number < count
            place = entry_places(number, has, table, RATIO, BLOCK_SIZE)
            keys = tl.load(entries + place[:, None] * DIM + column[None, :], mask=has[:, None], other=0.0)
            products = tl.dot(keys, tl.trans(query), input_precision="ieee")  # [ENTRIES, PADDED]
            score = tl.sum(tl.maximum(products, 0.0) * share[None, :], 1)
            tl.store(scores + token * capacity + number, score, mask=has)


@triton.jit
def _choose_kernel(
    scores, capacity, chosen, positions, slots, RATIO: tl.constexpr, TOP_K: tl.constexpr, OWN: tl.constexpr, OTHERS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """An entry's place is the number of those ahead of it, which is looked for in all of them: more work than sorting, for many programs at once."""
    token = tl.program_id(1).to(tl.int64)
    wait_for_inputs(PDL)
    slot = tl.load(slots + token)
    count = (tl.load(positions + token) + 1) // RATIO
    begin = tl.program_id(0) * OWN
    if (slot >= 0) & (count > TOP_K) & (begin < count):
        at = scores + token * capacity
        for start in range(begin, count, tl.num_programs(0) * OWN):
            own = start + tl.arange(0, OWN)
            mine = tl.load(at + own, mask=own < count, other=0.0)
            mine = tl.where(mine == mine, mine, float("-inf"))  # no number: a place of its own all the same
            ahead = tl.zeros([OWN], tl.int32)
            for first in range(0, count, OTHERS):
                other = first + tl.arange(0, OTHERS)
                theirs = tl.load(at + other, mask=other < count, other=float("-inf"))
                theirs = tl.where(theirs == theirs, theirs, float("-inf"))
                is_ahead = (theirs[None, :] > mine[:, None]) | ((theirs[None, :] == mine[:, None]) & (other[None, :] < own[:, None]))
                ahead += tl.sum(is_ahead.to(tl.int32), 1)
            tl.store(chosen + token * TOP_K + ahead, own, mask=(own < count) & (ahead < TOP_K))


@triton.jit
def _keys_of_block(
    block, blocks, count, is_chosen, position, windows, entries, chosen, table,
    ENTRIES: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A block of a row's keys [KEYS, DIM], the window's first, and which of them there are."""
    WINDOW_BLOCKS: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    lane = tl.arange(0, KEYS)
    column = tl.arange(0, DIM)
    place = (block * KEYS + lane).to(tl.int64)
    has = (place < WINDOW) & (place <= position) & (block < blocks)  # once a row is longer than the window, every place is
    pointers = windows + place[:, None] * DIM + column[None, :]
    if ENTRIES:  # noqa: SIM102  # known when it is compiled
        if block >= WINDOW_BLOCKS:
            number = (block - WINDOW_BLOCKS) * KEYS + lane
            has = (number < count) & (block < blocks)
            if TOP_K > 0:  # noqa: SIM102
                if is_chosen:
                    number = tl.load(chosen + number, mask=has, other=0)
            place = entry_places(number, has, table, RATIO, BLOCK_SIZE)
            pointers = entries + place[:, None] * DIM + column[None, :]
    return tl.load(pointers, mask=has[:, None], other=0.0), has


@triton.jit
def _attend_kernel(
    queries, query_stride, query_eps, windows, entries, chosen, parts, tops, totals, num_heads, scale,
    positions, slots, tables, table_stride, cos, sin,
    ENTRIES: tl.constexpr, RATIO: tl.constexpr, TOP_K: tl.constexpr, WINDOW: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some heads of a row, and every `splits`-th block of its keys. Each block is on its way while what is before it is computed."""
    split, splits = tl.program_id(0), tl.num_programs(0)
    token = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, DIM)
    is_head = head < num_heads
    WINDOW_BLOCKS: tl.constexpr = (WINDOW + KEYS - 1) // KEYS
    wait_for_inputs(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    count = (position + 1) // RATIO if ENTRIES else 0
    is_chosen = (TOP_K > 0) & (count > TOP_K)
    if TOP_K > 0:
        count = tl.minimum(count, TOP_K)
    blocks = WINDOW_BLOCKS + (count + KEYS - 1) // KEYS
    top = tl.full([HEADS], -1e30, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    at_part = (token * splits + split) * num_heads + head
    if (slot >= 0) & (split < blocks):
        own = windows + slot * (WINDOW * DIM)
        own_chosen = chosen + token * TOP_K
        table = tables + slot * table_stride
        keys, has = _keys_of_block(
            split, blocks, count, is_chosen, position, own, entries, own_chosen, table, ENTRIES, RATIO, TOP_K, WINDOW, DIM, BLOCK_SIZE, KEYS
        )  # fmt: skip
        query = tl.load(queries + token * query_stride + head[:, None] * DIM + column[None, :], mask=is_head[:, None], other=0.0).to(tl.float32)
        query = query * (tl.rsqrt(tl.sum(query * query, 1) / DIM + query_eps) * scale)[:, None]
        turn = position * (ROTARY // 2)
        query = rotate_end(query, cos + turn, sin + turn, 1.0, HEADS, DIM, ROTARY).to(windows.dtype.element_ty)
        out = tl.zeros([HEADS, DIM], tl.float32)
        for block in range(split, blocks, splits):
            next_keys, next_has = _keys_of_block(
                block + splits, blocks, count, is_chosen, position, own, entries, own_chosen, table, ENTRIES, RATIO, TOP_K, WINDOW, DIM, BLOCK_SIZE, KEYS
            )  # fmt: skip
            score = tl.where(has[None, :], tl.dot(query, tl.trans(keys), input_precision="ieee"), -1e30)
            higher = tl.maximum(top, tl.max(score, 1))
            share = tl.where(has[None, :], tl.exp2(score - higher[:, None]), 0.0)
            kept = tl.exp2(top - higher)
            out = tl.dot(share.to(keys.dtype), keys, out * kept[:, None], input_precision="ieee")
            total = total * kept + tl.sum(share, 1)
            top, keys, has = higher, next_keys, next_has
        tl.store(parts + at_part[:, None] * DIM + column[None, :], out, mask=is_head[:, None])
    tl.store(tops + at_part, top, mask=is_head)
    tl.store(totals + at_part, total, mask=is_head)


@triton.jit
def _add_up_kernel(
    parts, tops, totals, sinks, out, num_heads, splits, positions, cos, sin, DIM: tl.constexpr, ROTARY: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    head = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    split = tl.arange(0, SPLITS)
    column = tl.arange(0, DIM)
    sink = tl.load(sinks + head) * 1.4426950408889634
    wait_for_inputs(PDL)
    at = (token * splits + split) * num_heads + head
    total = tl.load(totals + at, mask=split < splits, other=0.0)
    top = tl.load(tops + at, mask=split < splits, other=-1e30)
    has = total > 0.0  # the others wrote no part
    highest = tl.maximum(tl.max(top, 0), sink)
    share = tl.where(has, tl.exp2(top - highest), 0.0)
    part = tl.load(parts + at[:, None] * DIM + column[None, :], mask=has[:, None], other=0.0)
    result = tl.sum(part * share[:, None], 0) / (tl.sum(total * share, 0) + tl.exp2(sink - highest))
    position = tl.load(positions + token) * (ROTARY // 2)
    turned = rotate_end(tl.reshape(result, [1, DIM]), cos + position, sin + position, -1.0, 1, DIM, ROTARY)
    tl.store(out + (token * num_heads + head) * DIM + column[None, :], turned.to(out.dtype.element_ty))
