"""The terms of rows on the device, in place: torch_engine/logit_edits.py's tables, with the id that a row drew last where the host does not have it yet.

1. edit: one program a row that has any. It changes the logits of the ids in the row's table, then that of the last id where the table lacks it, then
   forbids what the last id forbids.
2. largest, cut: for rows with min_p, chunks side by side. Each finds its largest allowed logit, and then what lies too far below the largest of all
   becomes minus infinity.

A logit that is not finite stays so, or becomes NaN: the row fails as it would without terms.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs
from pocketllm.torch_engine.kernels.sampler import SamplingTensors

HEAD = 12  # numbers of a row before its table: row, slot or -1, start and length of the table, start and number of pairs, three penalties, then nothing
CUT_HEAD = 2  # and of a row with min_p: row, and how far below the largest a logit may lie, bits of a float32


def edit_logits(logits: torch.Tensor, numbers: torch.Tensor, num_edited: int, last_ids: torch.Tensor, *, tile: int = 512) -> None:
    """Change the logits of some rows.

    Args:
        logits: [num_rows, vocab_size] float32, a row's values side by side.
        numbers: int32, [num_edited, HEAD], then the tables and pairs that those point to.
        last_ids: [num_slots] int64, the id that each slot's row drew last.
        tile: entries that a program reads at once, a power of two.
    """
    _edit[(num_edited,)](logits, logits.stride(0), logits.shape[1], numbers, last_ids, HEAD=HEAD, TILE=tile, num_warps=4, **launch_options(logits.device))


def cut_unlikely(logits: torch.Tensor, numbers: torch.Tensor, num_cut: int, how: SamplingTensors, *, chunk: int = 4096) -> None:
    """Minus infinity for what min_p leaves out of some rows.

    Args:
        logits: [num_rows, vocab_size] float32, a row's values side by side.
        numbers: int32, [num_cut, CUT_HEAD].
        how: its masks come before the cut.
        chunk: ids that one program reads, a power of two.
    """
    vocab_size, device = logits.shape[1], logits.device
    num_chunks = triton.cdiv(vocab_size, chunk)
    largest = torch.empty((num_cut, num_chunks), dtype=torch.float32, device=device)
    masks = numbers if how.masks is None else how.masks
    mask_rows = numbers if how.mask_rows is None else how.mask_rows
    rows = (logits, logits.stride(0), vocab_size, numbers, masks, masks.stride(0), mask_rows, largest, num_chunks)
    fixed = {"HEAD": CUT_HEAD, "HAS_MASKS": how.masks is not None, "CHUNK": chunk, "num_warps": max(1, min(8, chunk // 512)), **launch_options(device)}
    _largest[(num_chunks, num_cut)](*rows, **fixed)
    _cut[(num_chunks, num_cut)](*rows, PADDED_CHUNKS=triton.next_power_of_2(num_chunks), **fixed)


@triton.jit
def _changed(value, seen, repetition, frequency, presence):
    """A logit of an id that was seen: bit 0 in the prompt, the others times in the answer."""
    value = tl.where(seen > 0, tl.where(value > 0.0, value / repetition, value * repetition), value)
    count = seen >> 1
    return value - (frequency * count.to(tl.float32) + tl.where(count > 0, presence, 0.0))


@triton.jit
def _edit(logits, row_stride, vocab_size, numbers, last_ids, HEAD: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    wait_for_inputs(PDL)
    head = numbers + tl.program_id(0) * HEAD
    row_logits = logits + tl.load(head).to(tl.int64) * row_stride
    slot = tl.load(head + 1)
    table = numbers + tl.load(head + 2)
    count = tl.load(head + 3)
    pairs = numbers + tl.load(head + 4)
    num_pairs = tl.load(head + 5)
    repetition = tl.load(head + 6).to(tl.float32, bitcast=True)
    frequency = tl.load(head + 7).to(tl.float32, bitcast=True)
    presence = tl.load(head + 8).to(tl.float32, bitcast=True)
    last = tl.load(last_ids + tl.maximum(slot, 0)).to(tl.int32)
    last = tl.where(slot >= 0, last, -1)
    lane = tl.arange(0, TILE)
    number_found = tl.zeros([TILE], tl.int32)
    start = 0
    while start < count:
        at = start + lane
        inside = at < count
        ids = tl.load(table + 3 * at, mask=inside, other=0)
        seen = tl.load(table + 3 * at + 1, mask=inside, other=0)
        added = tl.load(table + 3 * at + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
        is_last = inside & (ids == last)
        number_found += is_last.to(tl.int32)
        inside &= ids < vocab_size  # an end of rows that some checkpoints name is no id of theirs
        value = tl.load(row_logits + ids, mask=inside, other=0.0)
        value = _changed(value, seen + tl.where(is_last, 2, 0), repetition, frequency, presence) + added
        tl.store(row_logits + ids, value, mask=inside)
        start += TILE
    if (last >= 0) & (tl.sum(number_found, 0) == 0):
        value = tl.load(row_logits + last)
        tl.store(row_logits + last, _changed(value, last * 0 + 2, repetition, frequency, presence))
    if num_pairs > 0:
        tl.debug_barrier()  # what the program has stored by now is overwritten
        start = 0
        while start < num_pairs:
            at = start + lane
            inside = at < num_pairs
            is_met = tl.load(pairs + 2 * at, mask=inside, other=-2) == last
            ids = tl.load(pairs + 2 * at + 1, mask=inside, other=0)
            value = tl.load(row_logits + ids, mask=is_met, other=0.0)
            tl.store(row_logits + ids, value + float("-inf"), mask=is_met)
            start += TILE


@triton.jit
def _load_allowed(row, row_logits, ids, vocab_size, masks, mask_stride, mask_rows, HAS_MASKS: tl.constexpr):
    """Logits, minus infinity outside and where the row's mask forbids."""
    inside = ids < vocab_size
    value = tl.load(row_logits + ids, mask=inside, other=float("-inf"))
    if HAS_MASKS:
        line = tl.load(mask_rows + row)
        words = masks + tl.maximum(line, 0).to(tl.int64) * mask_stride
        word = tl.load(words + ids // 32, mask=inside & (line >= 0), other=-1)
        value = tl.where(((word >> (ids % 32)) & 1) != 0, value, float("-inf"))
    return value


@triton.jit
def _largest(
    logits, row_stride, vocab_size, numbers, masks, mask_stride, mask_rows, largest, num_chunks,
    HEAD: tl.constexpr, HAS_MASKS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, index = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    row = tl.load(numbers + index * HEAD)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    value = _load_allowed(row, logits + row.to(tl.int64) * row_stride, ids, vocab_size, masks, mask_stride, mask_rows, HAS_MASKS)
    tl.store(largest + index * num_chunks + chunk, tl.max(value, 0))


@triton.jit
def _cut(
    logits, row_stride, vocab_size, numbers, masks, mask_stride, mask_rows, largest, num_chunks,
    HEAD: tl.constexpr, HAS_MASKS: tl.constexpr, CHUNK: tl.constexpr, PADDED_CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk, index = tl.program_id(0), tl.program_id(1)
    wait_for_inputs(PDL)
    row = tl.load(numbers + index * HEAD)
    depth = tl.load(numbers + index * HEAD + 1).to(tl.float32, bitcast=True)
    lane = tl.arange(0, PADDED_CHUNKS)
    best = tl.max(tl.load(largest + index * num_chunks + lane, mask=lane < num_chunks, other=float("-inf")), 0)
    row_logits = logits + row.to(tl.int64) * row_stride
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    value = _load_allowed(row, row_logits, ids, vocab_size, masks, mask_stride, mask_rows, HAS_MASKS)
    # What a mask forbids stays as it is: the mask is there when the row is drawn from, and a value that is not finite has to be seen.
    tl.store(row_logits + ids, tl.zeros([CHUNK], tl.float32) + float("-inf"), mask=(ids < vocab_size) & (value > float("-inf")) & (best - value > depth))
