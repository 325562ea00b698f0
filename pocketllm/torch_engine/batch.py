"""One step's rows as tensors: what the scheduler chose, in the form that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pocketllm.torch_engine.scheduler import ScheduledRow


@dataclass(frozen=True, slots=True)
class Prefill:
    """One row that computes several tokens.

    Args:
        tokens: its tokens in the batch.
        blocks: its blocks [num_blocks] int64, or the run that they form.
        length: tokens that it attends to, its last one included.
        mask: [num_tokens, length], 0 where a token may attend and -inf elsewhere; None when the row starts at its beginning.
    """

    tokens: slice
    blocks: torch.Tensor | slice
    length: int
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens of one step: first one a row of the rows that decode, then those of each row that prefills.

    Args:
        rows: the scheduled rows in the order of their tokens.
        token_ids, positions, slot_mapping: [num_tokens] int64.
        num_decode: rows that compute one token.
        decode_blocks: blocks of those rows, padded to equally many, [num_decode * blocks a row] int64; or one row's run.
        decode_length: tokens that the longest of them attends to.
        decode_mask: [num_decode, 1, 1, slots a row], 0 or -inf; None for one row, which is cut to decode_length instead.
        prefills: the other rows.
        sample_index: [num_sampling] int64, tokens whose logits are wanted.
        sampling: the scheduled rows that those belong to.
    """

    rows: list[ScheduledRow]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_decode: int
    decode_blocks: torch.Tensor | slice
    decode_length: int
    decode_mask: torch.Tensor | None
    prefills: list[Prefill]
    sample_index: torch.Tensor
    sampling: list[ScheduledRow]


def build_batch(step: Sequence[ScheduledRow], block_size: int, mask_dtype: torch.dtype) -> Batch:
    """Tensors for `step`. `mask_dtype` is the dtype of the attention's queries."""
    decoding = [scheduled for scheduled in step if scheduled.num_tokens == 1]
    ordered = decoding + [scheduled for scheduled in step if scheduled.num_tokens != 1]
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    prefills: list[Prefill] = []
    sample_index: list[int] = []
    sampling: list[ScheduledRow] = []
    for scheduled in ordered:
        row, start = scheduled.row, scheduled.row.num_computed_tokens
        end, first = start + scheduled.num_tokens, len(token_ids)
        token_ids += row.token_ids[start:end]
        positions += range(start, end)
        slots += [row.block_table[position // block_size] * block_size + position % block_size for position in range(start, end)]
        if scheduled.num_tokens != 1:
            table = row.block_table[: -(-end // block_size)]
            mask = None if start == 0 else _causal_mask(start, end, mask_dtype)
            prefills.append(Prefill(slice(first, len(token_ids)), _run_or_list(table), end, mask))
        if scheduled.samples:
            sample_index.append(len(token_ids) - 1)
            sampling.append(scheduled)
    lengths = [scheduled.row.num_computed_tokens + 1 for scheduled in decoding]
    decode_blocks, decode_mask = _decode_rows([scheduled.row.block_table for scheduled in decoding], lengths, block_size, mask_dtype)
    return Batch(
        ordered,
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.tensor(slots),
        len(decoding),
        decode_blocks,
        max(lengths, default=0),
        decode_mask,
        prefills,
        torch.tensor(sample_index, dtype=torch.int64),
        sampling,
    )


def _decode_rows(tables: list[list[int]], lengths: list[int], block_size: int, mask_dtype: torch.dtype) -> tuple[torch.Tensor | slice, torch.Tensor | None]:
    if not tables:
        return slice(0, 0), None
    width = -(-max(lengths) // block_size)
    if len(tables) == 1:
        return _run_or_list(tables[0][:width]), None
    padded = [(table + table[:1] * width)[:width] for table in tables]  # with a block of its own: one row never reads another
    past_end = torch.arange(width * block_size) >= torch.tensor(lengths).unsqueeze(1)  # [num_rows, slots a row]
    mask = torch.zeros(past_end.shape, dtype=mask_dtype).masked_fill_(past_end, float("-inf"))
    return torch.tensor(padded).flatten(), mask[:, None, None, :]


def _run_or_list(table: list[int]) -> torch.Tensor | slice:
    """The blocks of one row: a slice where they are neighbours, which attention reads without gathering."""
    first = table[0]
    if table == list(range(first, first + len(table))):
        return slice(first, first + len(table))
    return torch.tensor(table)


def _causal_mask(start: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """[end - start, end]: token i, at position start + i, attends to positions up to its own."""
    ahead = torch.arange(end) > torch.arange(start, end).unsqueeze(1)
    return torch.zeros(ahead.shape, dtype=dtype).masked_fill_(ahead, float("-inf"))
