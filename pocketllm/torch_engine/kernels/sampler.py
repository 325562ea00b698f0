"""From logits to token ids for all rows of a step at once, on the device: the draws of torch_engine/sampler.py without a host in between.

Four kernels, each launched for every row and left at once by the rows that don't need it:

1. scan: a row's chunks side by side. Each finds its largest logit and, for a row that draws from all ids, its largest sum of logit and noise.
2. histogram: for a row with top-k or top-p, how many ids lie how far below the largest, and the mass of all.
3. collect: the ids above the bin in which top-k or top-p must cut, into a short list.
4. choose: one program a row. Greedy rows and draws from all ids compare their chunks; the others search the list for the exact cut and draw from what it
   keeps. A list that would be too long is not used: the search then runs over the row itself.

Ids are ordered by (logit, largest first; id, lowest first), so that a cut is exact with equal logits too. Masses are integers, in units of the largest
id's mass / 2**40: their sums depend neither on the order nor on the tiling, so a row draws the same id whatever it is batched with.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs
from pocketllm.torch_engine.sampler import gumbel

MAX_VOCAB_SIZE = 1 << 20  # an id has 20 bits of the order's number
OK, NOT_FINITE, NOTHING_ALLOWED = 0, 1, 2

_COLD = tl.constexpr(1e-20)  # no two logits of a model are that close: a lower temperature is greedy
_BINS = tl.constexpr(256)
_BIN_SCALE = tl.constexpr(32.0)  # bin b holds what lies (b / 32)**2 to ((b + 1) / 32)**2 below the largest, in units of the temperature; the last, all below
_UNIT = tl.constexpr(1099511627776.0)  # 2**40
_LOG2E = tl.constexpr(1.4426950408889634)
LOWEST_ORDER = tl.constexpr(-(1 << 63))
_NO_ID = tl.constexpr(2147483647)
_OF_A_STEP = ("mask_stride", "chunk_size", "num_chunks")  # numbers that depend on how many rows there are


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How each row draws, on the device; [num_rows] each.

    Args:
        temperature: float32; 0 is greedy, and then only the mask is read beside it.
        top_k: int32; 0 is off.
        top_p: float32, in (0, 1]; 1 is off.
        seeds: int64.
        draws: int64, how many tokens the row has drawn before.
        masks: [num_masks, ceil(vocab_size / 32)] int32 words, bit i % 32 of word i // 32 set where id i may be drawn; None where no row has one.
        mask_rows: int32, the row's line of `masks`, or -1.
    """

    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    seeds: torch.Tensor
    draws: torch.Tensor
    masks: torch.Tensor | None = None
    mask_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class LastIds:
    """The id that each slot's row drew last, on the device.

    Args:
        ids: [num_slots] int64.
        slots: [num_rows] int64, each row's slot.
    """

    ids: torch.Tensor
    slots: torch.Tensor


def sample_tokens(
    logits: torch.Tensor,
    how: SamplingTensors,
    *,
    has_cuts: bool = True,
    chunk: int | None = None,
    tile: int = 2048,
    list_size: int = 8192,
    keep: LastIds | None = None,
) -> torch.Tensor:
    """One id a row. Reads nothing on the host, so that it can be part of a CUDA graph.

    Args:
        logits: [num_rows, vocab_size] float32, a row's values side by side; they are left as they are.
        how: its vectors have num_rows entries or more.
        has_cuts: False says that no row that draws has top_k or top_p, and saves two launches.
        chunk: ids that one program of the scan reads, a multiple of `tile`; None chooses by the shape.
        tile: ids that a program reads at once, a power of two.
        list_size: ids kept for the exact search, a power of two.
        keep: where each row's id goes as well.

    Returns:
        [num_rows, 2] int64: the id, 0 where there is none, and a status: OK, or 1 where the logits are not finite, or 2 where the mask allows nothing.
    """
    num_rows, vocab_size = logits.shape
    device = logits.device
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert vocab_size <= MAX_VOCAB_SIZE, f"The vocabulary has {vocab_size} ids; the sampler takes at most {MAX_VOCAB_SIZE}."
    chunk = chunk or _chunk(num_rows, vocab_size, tile)
    num_chunks = triton.cdiv(vocab_size, chunk)
    drawn = torch.empty((num_rows, 2), dtype=torch.int64, device=device)
    chunk_values = torch.empty((3, num_rows, num_chunks), dtype=torch.float32, device=device)  # largest with NaN as inf, largest allowed, best sum
    chunk_ids = torch.empty((2, num_rows, num_chunks), dtype=torch.int32, device=device)  # of the last two
    counts = torch.empty((num_rows, 1 + 256), dtype=torch.int32, device=device)  # length of the list, histogram
    mass = torch.empty(num_rows, dtype=torch.int64, device=device)
    masks = how.masks if how.masks is not None else chunk_ids
    mask_rows = how.mask_rows if how.mask_rows is not None else chunk_ids
    rows = (logits, logits.stride(0), vocab_size, how.temperature, how.top_k, how.top_p, masks, masks.stride(0), mask_rows, chunk, num_chunks)
    fixed = {"HAS_MASKS": how.masks is not None, **launch_options(device)}
    padded = {"PADDED_CHUNKS": triton.next_power_of_2(triton.cdiv(vocab_size, tile))}  # of the shortest: one kernel serves any number of rows
    grid = (num_chunks, num_rows)
    warps = max(1, min(8, tile // 256))
    _scan[grid](*rows, how.seeds, how.draws, chunk_values, chunk_ids, counts, mass, TILE=tile, num_warps=warps, **fixed)
    if has_cuts:
        list_values = torch.empty((num_rows, list_size), dtype=torch.float32, device=device)
        list_ids = torch.empty((num_rows, list_size), dtype=torch.int32, device=device)
        _histogram[grid](*rows, chunk_values, counts, mass, TILE=tile, num_warps=warps, **padded, **fixed)
        lists = (list_values, list_ids)
        _collect[grid](*rows, chunk_values, counts, mass, *lists, LIST_SIZE=list_size, TILE=tile, num_warps=warps, **padded, **fixed)
    else:
        lists = (chunk_values, chunk_ids)
    _choose[(num_rows,)](
        *rows, how.seeds, how.draws, chunk_values, chunk_ids, counts, mass, *lists, drawn, *((drawn, drawn) if keep is None else (keep.ids, keep.slots)),
        KEEPS=keep is not None, LIST_SIZE=list_size, HAS_CUTS=has_cuts, TILE=min(tile, 1024), PIVOTS=4,
        num_warps=max(1, min(8, tile // 128)), **padded, **fixed,
    )  # fmt: skip
    return drawn


def _chunk(num_rows: int, vocab_size: int, tile: int) -> int:
    """Few rows are spread over many programs, so that one row does not wait for one processor's loads; of many rows each takes few."""
    tiles = triton.cdiv(vocab_size, tile)
    return int(tile * (1 if num_rows <= 4 else 2 if num_rows <= 16 else 4 if tiles >= 4 else 1))


@triton.jit
def _mix(start, index):
    """Output number `index` of the SplitMix64 stream that begins at `start`; uint64."""
    mixed = start + (index + 1) * 0x9E3779B97F4A7C15
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB
    return mixed ^ (mixed >> 31)


@triton.jit
def _stream(seeds, draws, row):
    """Where the noise of this draw begins; uint64."""
    seed = tl.load(seeds + row).to(tl.uint64)
    return _mix(_mix(seed, tl.zeros_like(seed)), tl.load(draws + row).to(tl.uint64))


@triton.jit
def _noise(start, ids):
    """sampler.gumbel in float32: -log(-log(u)) with u = (n + 0.5) / 2**53, where the upper half is computed from 1 - u, which float32 tells apart from 0."""
    number = (_mix(start, ids.to(tl.uint64) + 1) >> 11).to(tl.int64)
    is_low = number < (1 << 52)
    end = (tl.where(is_low, number, (1 << 53) - 1 - number).to(tl.float32) + 0.5) * 1.1102230246251565e-16  # u or 1 - u, whichever is below a half
    z = end / (2.0 - end)  # -log(1 - e) is 2 atanh(e / (2 - e)), here with |z| <= 1/3
    s = z * z
    series = 1.0 + s * (1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15)))))))
    return -tl.log(tl.where(is_low, -tl.log(end), 2.0 * z * series))


@triton.jit
def _load_logits(row_logits, ids, inside, words, is_masked, HAS_MASKS: tl.constexpr):
    """(logits, logits with minus infinity where the mask forbids); minus infinity outside."""
    raw = tl.load(row_logits + ids, mask=inside, other=float("-inf"))
    allowed = raw
    if HAS_MASKS:
        word = tl.load(words + ids // 32, mask=inside & is_masked, other=-1)
        allowed = tl.where(((word >> (ids % 32)) & 1) != 0, raw, float("-inf"))
    return raw, allowed


@triton.jit
def order_of(value, ids):
    """int64, the larger the earlier in the order (value, largest first; id, lowest first). Its low 20 bits are 2**20 - 1 - id."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)  # both zeros are equal
    key = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)  # ordered as the values are
    return key * 1048576 + (1048575 - ids)


@triton.jit
def _row_of(row, logits, row_stride, masks, mask_stride, mask_rows, HAS_MASKS: tl.constexpr):
    """Where a row's logits and its mask's words are, and whether it has any."""
    line = -1
    if HAS_MASKS:
        line = tl.load(mask_rows + row)
    return logits + row.to(tl.int64) * row_stride, masks + tl.maximum(line, 0).to(tl.int64) * mask_stride if HAS_MASKS else masks, line >= 0


@triton.jit
def _kind(row, vocab_size, temperature, top_k, top_p):
    """(is greedy, has a cut, 1 / temperature, top_k or 0, top_p)."""
    heat = tl.load(temperature + row)
    k = tl.load(top_k + row)
    k = tl.where(k >= vocab_size, 0, k)
    p = tl.load(top_p + row)
    is_greedy = (heat < _COLD) | (k == 1)
    has_cut = (is_greedy == 0) & ((k > 0) | (p < 1.0))
    return is_greedy, has_cut, 1.0 / tl.maximum(heat, _COLD), k, p


@triton.jit
def _largest(chunk_values, row, num_rows, num_chunks, PADDED_CHUNKS: tl.constexpr):
    """(largest logit of the row, NaN as inf; largest allowed)."""
    lane = tl.arange(0, PADDED_CHUNKS)
    at = chunk_values + row * num_chunks + lane
    raw = tl.load(at, mask=lane < num_chunks, other=float("-inf"))
    allowed = tl.load(at + num_rows * num_chunks, mask=lane < num_chunks, other=float("-inf"))
    return tl.max(raw, 0), tl.max(allowed, 0)


@triton.jit
def _bin(depth):
    """Bin of what lies `depth` >= 0 below the largest, infinity included."""
    return tl.minimum(tl.sqrt(depth) * _BIN_SCALE, _BINS - 1.0).to(tl.int32)


@triton.jit
def _units(depth):
    """Mass of an id, in units: int64."""
    return (tl.exp2(-depth * _LOG2E) * _UNIT).to(tl.int64)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _scan(
    logits, row_stride, vocab_size, temperature, top_k, top_p, masks, mask_stride, mask_rows, chunk_size, num_chunks,
    seeds, draws, chunk_values, chunk_ids, counts, mass, TILE: tl.constexpr, HAS_MASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    num_rows = tl.num_programs(1)
    wait_for_inputs(PDL)
    if chunk == 0:  # the next kernels add to these
        tl.store(counts + row * (1 + _BINS), 0)
        tl.store(counts + row * (1 + _BINS) + 1 + tl.arange(0, _BINS), tl.zeros([_BINS], tl.int32))
        tl.store(mass + row, tl.zeros([], tl.int64))
    row_logits, words, is_masked = _row_of(row, logits, row_stride, masks, mask_stride, mask_rows, HAS_MASKS)
    is_greedy, has_cut, inverse, _k, _p = _kind(row, vocab_size, temperature, top_k, top_p)
    lane = tl.arange(0, TILE)
    highest = tl.full([TILE], float("-inf"), tl.float32)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], _NO_ID, tl.int32)
    for start in range(0, chunk_size, TILE):
        ids = chunk * chunk_size + start + lane
        raw, allowed = _load_logits(row_logits, ids, ids < vocab_size, words, is_masked, HAS_MASKS)
        highest = tl.maximum(highest, tl.where(raw != raw, float("inf"), raw))
        is_better = allowed > best
        best, best_id = tl.where(is_better, allowed, best), tl.where(is_better, ids, best_id)
    largest = tl.max(best, 0)
    at = row * num_chunks + chunk
    tl.store(chunk_values + at, tl.max(highest, 0))
    tl.store(chunk_values + num_rows * num_chunks + at, largest)
    tl.store(chunk_ids + at, tl.min(tl.where(best == largest, best_id, _NO_ID), 0))
    if (is_greedy == 0) & (has_cut == 0) & (largest > float("-inf")):
        stream = _stream(seeds, draws, row)
        best = tl.full([TILE], float("-inf"), tl.float32)
        best_id = tl.full([TILE], _NO_ID, tl.int32)
        for start in range(0, chunk_size, TILE):
            ids = chunk * chunk_size + start + lane
            _raw, allowed = _load_logits(row_logits, ids, ids < vocab_size, words, is_masked, HAS_MASKS)
            sums = (allowed - largest) * inverse + _noise(stream, ids)
            is_better = sums > best
            best, best_id = tl.where(is_better, sums, best), tl.where(is_better, ids, best_id)
        winner = tl.max(best, 0)
        tl.store(chunk_values + 2 * num_rows * num_chunks + at, winner)
        tl.store(chunk_ids + num_rows * num_chunks + at, tl.min(tl.where(best == winner, best_id, _NO_ID), 0))


@triton.jit(do_not_specialize=_OF_A_STEP)
def _histogram(
    logits, row_stride, vocab_size, temperature, top_k, top_p, masks, mask_stride, mask_rows, chunk_size, num_chunks,
    chunk_values, counts, mass, PADDED_CHUNKS: tl.constexpr, TILE: tl.constexpr, HAS_MASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    _is_greedy, has_cut, inverse, _k, _p = _kind(row, vocab_size, temperature, top_k, top_p)
    if has_cut:
        highest, largest = _largest(chunk_values, row, tl.num_programs(1), num_chunks, PADDED_CHUNKS)
        if (highest < float("inf")) & (largest > float("-inf")):
            row_logits, words, is_masked = _row_of(row, logits, row_stride, masks, mask_stride, mask_rows, HAS_MASKS)
            lane = tl.arange(0, TILE)
            bins = tl.zeros([_BINS], tl.int32)
            units = tl.zeros([TILE], tl.int64)
            num_dead = tl.zeros([TILE], tl.int32)
            for start in range(0, chunk_size, TILE):
                ids = chunk * chunk_size + start + lane
                _raw, allowed = _load_logits(row_logits, ids, ids < vocab_size, words, is_masked, HAS_MASKS)
                depth = (largest - allowed) * inverse
                bins += tl.histogram(_bin(depth), _BINS)
                units += _units(depth)
                num_dead += (allowed == float("-inf")).to(tl.int32)
            lanes = tl.arange(0, _BINS)
            bins -= tl.where(lanes == _BINS - 1, tl.sum(num_dead, 0), 0)
            tl.atomic_add(counts + row * (1 + _BINS) + 1 + lanes, bins, mask=bins != 0, sem="relaxed")
            tl.atomic_add(mass + row, tl.sum(units, 0), sem="relaxed")


@triton.jit(do_not_specialize=_OF_A_STEP)
def _collect(
    logits, row_stride, vocab_size, temperature, top_k, top_p, masks, mask_stride, mask_rows, chunk_size, num_chunks,
    chunk_values, counts, mass, list_values, list_ids,
    LIST_SIZE: tl.constexpr, PADDED_CHUNKS: tl.constexpr, TILE: tl.constexpr, HAS_MASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, row = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    _is_greedy, has_cut, inverse, k, p = _kind(row, vocab_size, temperature, top_k, top_p)
    if has_cut:
        highest, largest = _largest(chunk_values, row, tl.num_programs(1), num_chunks, PADDED_CHUNKS)
        if (highest < float("inf")) & (largest > float("-inf")):
            lanes = tl.arange(0, _BINS)
            bins = tl.load(counts + row * (1 + _BINS) + 1 + lanes)
            if k > 0:  # through the bin of the k-th largest
                num_bins = tl.sum((tl.cumsum(bins, 0) < k).to(tl.int32), 0) + 1
            else:  # without those that hold less than 1 - top_p of the mass together, at most
                edge = lanes.to(tl.float32) / _BIN_SCALE
                tail = tl.cumsum(bins.to(tl.float32) * tl.exp2(-edge * edge * _LOG2E), 0, reverse=True)
                limit = (1.0 - p) * (tl.load(mass + row).to(tl.float32) / _UNIT) * 0.999
                num_bins = tl.sum((tail > limit).to(tl.int32), 0)
            row_logits, words, is_masked = _row_of(row, logits, row_stride, masks, mask_stride, mask_rows, HAS_MASKS)
            lane = tl.arange(0, TILE)
            for start in range(0, chunk_size, TILE):
                ids = chunk * chunk_size + start + lane
                _raw, allowed = _load_logits(row_logits, ids, ids < vocab_size, words, is_masked, HAS_MASKS)
                is_wanted = (_bin((largest - allowed) * inverse) < num_bins) & (allowed > float("-inf"))
                number = tl.sum(is_wanted.to(tl.int32), 0)
                if number > 0:
                    place = tl.atomic_add(counts + row * (1 + _BINS), number, sem="relaxed") + tl.cumsum(is_wanted.to(tl.int32), 0) - 1
                    is_kept = is_wanted & (place < LIST_SIZE)
                    tl.store(list_values + row * LIST_SIZE + place, allowed, mask=is_kept)
                    tl.store(list_ids + row * LIST_SIZE + place, ids, mask=is_kept)


@triton.jit
def _load_source(index, count, uses_list, values, list_ids, words, is_masked, HAS_MASKS: tl.constexpr):
    """(logits, ids, order) of entries of the list or of the row; order is int64, larger for what comes first, and the lowest for what can't be drawn."""
    inside = index < count
    ids = tl.load(list_ids + index, mask=inside & uses_list, other=0)
    ids = tl.where(uses_list, ids, index)
    value = tl.load(values + index, mask=inside, other=float("-inf"))
    if HAS_MASKS:
        word = tl.load(words + ids // 32, mask=inside & is_masked, other=-1)
        value = tl.where(((word >> (ids % 32)) & 1) != 0, value, float("-inf"))
    return value, ids, tl.where(value > float("-inf"), order_of(value, ids), LOWEST_ORDER)


@triton.jit
def _totals(floor, source, count, uses_list, list_ids, words, is_masked, largest, inverse, HAS_MASKS: tl.constexpr, TILE: tl.constexpr):
    """(number, mass, lowest and highest order) of the entries whose order is at least `floor`."""
    lane = tl.arange(0, TILE)
    numbers = tl.zeros([TILE], tl.int32)
    units = tl.zeros([TILE], tl.int64)
    low = tl.full([TILE], (1 << 63) - 1, tl.int64)
    high = tl.full([TILE], LOWEST_ORDER, tl.int64)
    start = 0
    while start < count:
        value, _ids, order = _load_source(start + lane, count, uses_list, source, list_ids, words, is_masked, HAS_MASKS)
        is_in = order >= floor
        numbers += is_in.to(tl.int32)
        units += tl.where(is_in, _units((largest - value) * inverse), 0)
        low = tl.minimum(low, tl.where(is_in, order, (1 << 63) - 1))
        high = tl.maximum(high, order)
        start += TILE
    return tl.sum(numbers, 0), tl.sum(units, 0), tl.min(low, 0), tl.max(high, 0)


@triton.jit
def _cut(
    wanted, low, high, number, source, count, uses_list, list_ids, words, is_masked, largest, inverse,
    BY_MASS: tl.constexpr, HAS_MASKS: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The highest order in [low, high] at and above which there are `wanted` entries, or `wanted` units of mass; some order that keeps the same entries.

    `number` entries are at or above `low`, none above `high`. Each round counts at PIVOTS orders between.
    """
    lane = tl.arange(0, TILE)
    steps = tl.arange(0, PIVOTS) + 1
    above = 0  # entries above `high`
    while (number - above > 1) & (BY_MASS | (number != wanted)):
        width = (high - low) // (PIVOTS + 1) + 1
        pivots = low + steps * width
        if BY_MASS:
            units = tl.zeros([PIVOTS, TILE], tl.int64)
        numbers = tl.zeros([PIVOTS, TILE], tl.int32)
        start = 0
        while start < count:
            value, _ids, order = _load_source(start + lane, count, uses_list, source, list_ids, words, is_masked, HAS_MASKS)
            is_in = order[None, :] >= pivots[:, None]
            numbers += is_in.to(tl.int32)
            if BY_MASS:
                units += tl.where(is_in, _units((largest - value) * inverse)[None, :], 0)
            start += TILE
        counted = tl.sum(numbers, 1)
        is_enough = counted >= wanted
        if BY_MASS:
            is_enough = tl.sum(units, 1) >= wanted
        low = tl.maximum(low, tl.max(tl.where(is_enough, pivots, low), 0))
        high = tl.minimum(high, tl.min(tl.where(is_enough, high, pivots - 1), 0))
        number = tl.minimum(number, tl.min(tl.where(is_enough, counted, number), 0))
        above = tl.maximum(above, tl.max(tl.where(is_enough, above, counted), 0))
    return low


@triton.jit
def _best_of_chunks(row, num_rows, is_greedy, largest, inverse, chunk_values, chunk_ids, num_chunks, PADDED_CHUNKS: tl.constexpr):
    """The id of a row that is greedy or draws from all ids."""
    lane = tl.arange(0, PADDED_CHUNKS)
    at = row * num_chunks + lane
    size = num_rows * num_chunks
    inside = lane < num_chunks
    value = tl.load(chunk_values + size + at, mask=inside, other=float("-inf"))
    has_draw = inside & (value > float("-inf")) & (is_greedy == 0)
    ids = tl.load(chunk_ids + at, mask=inside, other=0)
    sums = (value - largest) * inverse + tl.load(chunk_values + 2 * size + at, mask=has_draw, other=0.0)
    ids = tl.where(has_draw, tl.load(chunk_ids + size + at, mask=has_draw, other=0), ids)
    value = tl.where(is_greedy, value, sums)
    return tl.min(tl.where(value == tl.max(value, 0), ids, _NO_ID), 0)


@triton.jit
def _draw_with_cut(
    row_logits, list_values, list_ids, counts, total, words, is_masked, vocab_size, largest, inverse, k, p, stream,
    LIST_SIZE: tl.constexpr, HAS_MASKS: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
):  # fmt: skip
    """The id of a row with top-k or top-p; `total` is the mass of all ids."""
    num_listed = tl.load(counts)
    num_drawable = tl.sum(tl.load(counts + 1 + tl.arange(0, _BINS)), 0)
    uses_list = (num_listed <= LIST_SIZE) & ((k == 0) | (num_listed >= tl.minimum(k, num_drawable)))
    source = row_logits
    count = vocab_size
    if uses_list:
        source = list_values
        count = num_listed
    floor = tl.full([], LOWEST_ORDER + 1, tl.int64)
    number, units, low, high = _totals(floor, source, count, uses_list, list_ids, words, is_masked, largest, inverse, HAS_MASKS, TILE)
    if k == 0:
        if uses_list & (units < (total.to(tl.float64) * p.to(tl.float64)).to(tl.int64)):  # the last digits of the bins' bounds: the row itself decides
            uses_list = num_listed < 0
            source = row_logits
            count = vocab_size
            number, units, low, high = _totals(floor, source, count, uses_list, list_ids, words, is_masked, largest, inverse, HAS_MASKS, TILE)
        units = total
    elif number > k:
        low = _cut(k, low, high, number, source, count, uses_list, list_ids, words, is_masked, largest, inverse, False, HAS_MASKS, TILE, PIVOTS)
        if p < 1.0:
            number, units, low, _high = _totals(low, source, count, uses_list, list_ids, words, is_masked, largest, inverse, HAS_MASKS, TILE)
    if p < 1.0:
        wanted = tl.maximum((units.to(tl.float64) * p.to(tl.float64)).to(tl.int64), 1)
        low = _cut(wanted, low, high, number, source, count, uses_list, list_ids, words, is_masked, largest, inverse, True, HAS_MASKS, TILE, PIVOTS)
    lane = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_id = tl.full([TILE], _NO_ID, tl.int32)
    start = 0
    while start < count:
        value, ids, order = _load_source(start + lane, count, uses_list, source, list_ids, words, is_masked, HAS_MASKS)
        if tl.max(order, 0) >= low:
            sums = tl.where(order >= low, (value - largest) * inverse + _noise(stream, ids), float("-inf"))
            is_better = (sums > best) | ((sums == best) & (ids < best_id))
            best, best_id = tl.where(is_better, sums, best), tl.where(is_better, ids, best_id)
        start += TILE
    return tl.min(tl.where(best == tl.max(best, 0), best_id, _NO_ID), 0)


@triton.jit(do_not_specialize=_OF_A_STEP)
def _choose(
    logits, row_stride, vocab_size, temperature, top_k, top_p, masks, mask_stride, mask_rows, chunk_size, num_chunks,
    seeds, draws, chunk_values, chunk_ids, counts, mass, list_values, list_ids, out, last_ids, slots,
    KEEPS: tl.constexpr, LIST_SIZE: tl.constexpr, HAS_CUTS: tl.constexpr, PADDED_CHUNKS: tl.constexpr, TILE: tl.constexpr, PIVOTS: tl.constexpr,
    HAS_MASKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    num_rows = tl.num_programs(0)
    wait_for_inputs(PDL)
    is_greedy, has_cut, inverse, k, p = _kind(row, vocab_size, temperature, top_k, top_p)
    highest, largest = _largest(chunk_values, row, num_rows, num_chunks, PADDED_CHUNKS)
    is_finite = (highest < float("inf")) & (highest > float("-inf"))
    is_allowed = largest > float("-inf")
    tl.store(out + row * 2 + 1, tl.where(is_finite, tl.where(is_allowed, 0, 2), 1).to(tl.int64))
    drawn = tl.zeros([], tl.int32)
    if is_finite & is_allowed:
        if has_cut == 0:
            drawn = _best_of_chunks(row, num_rows, is_greedy, largest, inverse, chunk_values, chunk_ids, num_chunks, PADDED_CHUNKS)
        elif HAS_CUTS:
            row_logits, words, is_masked = _row_of(row, logits, row_stride, masks, mask_stride, mask_rows, HAS_MASKS)
            drawn = _draw_with_cut(
                row_logits, list_values + row * LIST_SIZE, list_ids + row * LIST_SIZE, counts + row * (1 + _BINS), tl.load(mass + row), words, is_masked,
                vocab_size, largest, inverse, k, p, _stream(seeds, draws, row), LIST_SIZE, HAS_MASKS, TILE, PIVOTS,
            )  # fmt: skip
    tl.store(out + row * 2, drawn.to(tl.int64))
    if KEEPS:
        tl.store(last_ids + tl.load(slots + row), drawn.to(tl.int64))


def sample_reference(logits: np.ndarray, temperature: float, top_k: int, top_p: float, seed: int, draw: int) -> tuple[int, np.ndarray]:
    """One row in float64, as `sample_tokens` defines it.

    Args:
        logits: [vocab_size] float32, minus infinity where a mask forbids.

    Returns:
        The id, and the ids that the cuts keep, most likely first.
    """
    order = np.argsort(-logits, kind="stable")
    order = order[: np.isfinite(logits).sum()]
    if temperature == 0 or top_k == 1:
        return int(order[0]), order[:1]
    if 0 < top_k < len(logits):
        order = order[:top_k]
    scaled = (logits[order].astype(np.float64) - logits[order[0]]) / temperature
    if top_p < 1:
        mass = np.exp(scaled).cumsum()
        size = int(np.searchsorted(mass, float(np.float32(top_p)) * mass[-1])) + 1
        order, scaled = order[:size], scaled[:size]
    return int(order[int((scaled + gumbel(seed, draw, order)).argmax())]), order
