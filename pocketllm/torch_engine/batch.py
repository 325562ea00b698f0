"""One step's rows as tensors: what the scheduler chose, in the form that a model reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from pocketllm.torch_engine.layers.rope import RotaryEmbedding
from pocketllm.torch_engine.scheduler import ScheduledRow

_LEAST_PIECE = 64  # tokens of a prompt that attend together: a narrow window is not worth a call for each of its tokens


@dataclass(frozen=True, slots=True)
class Prefill:
    """One row that computes several tokens.

    Args:
        tokens: its tokens in the batch.
        blocks: its blocks [num_blocks] int64, or the run that they form.
        length: tokens that it attends to, its last one included.
        mask: [num_tokens, length], 0 where a token may attend and -inf elsewhere; None when the row starts at its beginning.
        table: the row's blocks as numbers.
    """

    tokens: slice
    blocks: torch.Tensor | slice
    length: int
    mask: torch.Tensor | None
    table: list[int]


@dataclass(frozen=True, slots=True)
class Decode:
    """The rows that compute one token, as one kind of attention reads them.

    Args:
        blocks: their blocks one after another, equally many a row, [num_decode * width] int64; or one row's run.
        seen: of one row, the slots within its blocks that it attends to.
        mask: of several rows, [num_decode, 1, 1, slots a row], 0 or -inf; None for one row.
    """

    blocks: torch.Tensor | slice
    seen: slice
    mask: torch.Tensor | None


@dataclass(frozen=True)
class Batch:
    """The tokens of one step: first one a row of the rows that decode, then those of each row that prefills.

    Args:
        rows: the scheduled rows in the order of their tokens.
        token_ids, positions, slot_mapping: [num_tokens] int64.
        num_decode: rows that compute one token.
        decode_tables: their block tables, padded to equally many blocks with one of their own, [num_decode, width] int64.
        decode_lengths: [num_decode] int64, tokens that each of them attends to, its own included.
        prefills: the other rows.
        sample_index: [num_sampling] int64, tokens whose logits are wanted.
        sampling: the scheduled rows that those belong to.
        block_size: tokens a block.
        mask_dtype: dtype of the attention's queries.
    """

    rows: list[ScheduledRow]
    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    num_decode: int
    decode_tables: torch.Tensor
    decode_lengths: torch.Tensor
    prefills: list[Prefill]
    sample_index: torch.Tensor
    sampling: list[ScheduledRow]
    block_size: int
    mask_dtype: torch.dtype

    @cached_property
    def state_slots(self) -> list[int]:
        """Slot of the recurrent state of each of `rows`, in a hybrid model."""
        return [scheduled.row.slot for scheduled in self.rows]

    def rotation(self, rope: RotaryEmbedding) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the tokens' positions under `rope`, as RotaryEmbedding.at gives them."""
        if rope not in self._rotations:
            self._rotations[rope] = rope.at(self.positions)
        return self._rotations[rope]

    @cached_property
    def _rotations(self) -> dict[RotaryEmbedding, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @cached_property
    def decode_blocks(self) -> torch.Tensor | slice:
        """Blocks of the decoding rows one after another, [num_decode * width] int64; or one row's run."""
        return _run_or_list(self.decode_tables[0].tolist()) if self.num_decode == 1 else self.decode_tables.flatten()

    @cached_property
    def decode_mask(self) -> torch.Tensor | None:
        """[num_decode, 1, 1, slots a row], 0 or -inf; None for one row, which is cut to its length instead."""
        if self.num_decode == 1:
            return None
        past_end = torch.arange(self.decode_tables.shape[1] * self.block_size) >= self.decode_lengths.unsqueeze(1)  # [num_decode, slots a row]
        return torch.zeros(past_end.shape, dtype=self.mask_dtype).masked_fill_(past_end, float("-inf"))[:, None, None, :]

    def decode(self, window: int | None) -> Decode:
        """The decoding rows for layers whose tokens attend to the last `window` tokens, themselves included; None is all of them."""
        if window not in self._decodes:
            self._decodes[window] = self._full_decode() if window is None else self._windowed_decode(window)
        return self._decodes[window]

    def windowed_prefills(self, window: int | None) -> list[Prefill]:
        """The prefilling rows for such layers. A row of more tokens than the window comes in pieces, each with the blocks that it sees."""
        if window is None:
            return self.prefills
        if window not in self._prefills:
            self._prefills[window] = [piece for prefill in self.prefills for piece in self._pieces(prefill, window)]
        return self._prefills[window]

    @cached_property
    def _decodes(self) -> dict[int | None, Decode]:
        return {}

    @cached_property
    def _prefills(self) -> dict[int, list[Prefill]]:
        return {}

    def _full_decode(self) -> Decode:
        return Decode(self.decode_blocks, slice(0, int(self.decode_lengths[0])), self.decode_mask)

    def _windowed_decode(self, window: int) -> Decode:
        size, lengths = self.block_size, self.decode_lengths.tolist()
        firsts = [max(0, length - window) // size for length in lengths]  # each row's first block that is still seen
        width = max(-(-length // size) - first for length, first in zip(lengths, firsts, strict=True))
        if self.num_decode == 1:
            table = self.decode_tables[0, firsts[0] : firsts[0] + width].tolist()
            end = lengths[0] - firsts[0] * size
            return Decode(_run_or_list(table), slice(max(0, end - window), end), None)
        places = torch.tensor(firsts).unsqueeze(1) + torch.arange(width)  # [num_decode, width]
        # Past a row's end stands a block of its own, masked.
        blocks = self.decode_tables.gather(1, places.clamp(max=self.decode_tables.shape[1] - 1))
        positions = torch.tensor(firsts).unsqueeze(1) * size + torch.arange(width * size)  # [num_decode, slots a row]
        ends = self.decode_lengths.unsqueeze(1)
        unseen = (positions >= ends) | (positions < ends - window)
        mask = torch.zeros(unseen.shape, dtype=self.mask_dtype).masked_fill_(unseen, float("-inf"))
        return Decode(blocks.flatten(), slice(0, 0), mask[:, None, None, :])

    def _pieces(self, prefill: Prefill, window: int) -> list[Prefill]:
        count = prefill.tokens.stop - prefill.tokens.start
        start = prefill.length - count
        if prefill.length <= window:
            return [prefill]
        step = max(window, _LEAST_PIECE)
        pieces = []
        for at in range(0, count, step):
            begin, end = start + at, start + min(at + step, count)
            first = max(0, begin + 1 - window) // self.block_size
            table = prefill.table[first : -(-end // self.block_size)]
            offset = first * self.block_size
            tokens = slice(prefill.tokens.start + at, prefill.tokens.start + min(at + step, count))
            mask = _causal_mask(begin - offset, end - offset, self.mask_dtype, window)
            pieces.append(Prefill(tokens, _run_or_list(table), end - offset, mask, table))
        return pieces

    def prefill_part(self) -> Batch:
        """The same step without the rows that decode."""
        count = self.num_decode
        prefills = [replace(prefill, tokens=slice(prefill.tokens.start - count, prefill.tokens.stop - count)) for prefill in self.prefills]
        return replace(
            self,
            rows=self.rows[count:],
            token_ids=self.token_ids[count:],
            positions=self.positions[count:],
            slot_mapping=self.slot_mapping[count:],
            num_decode=0,
            decode_tables=self.decode_tables[:0],
            decode_lengths=self.decode_lengths[:0],
            prefills=prefills,
        )


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
            prefills.append(Prefill(slice(first, len(token_ids)), _run_or_list(table), end, mask, table))
        if scheduled.samples:
            sample_index.append(len(token_ids) - 1)
            sampling.append(scheduled)
    lengths = [scheduled.row.num_computed_tokens + 1 for scheduled in decoding]
    width = -(-max(lengths, default=0) // block_size)
    # Padded with a block of its own, so that one row never reads another's values.
    tables = [(scheduled.row.block_table + scheduled.row.block_table[:1] * width)[:width] for scheduled in decoding]
    return Batch(
        ordered,
        torch.tensor(token_ids),
        torch.tensor(positions),
        torch.tensor(slots),
        len(decoding),
        torch.tensor(tables, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int64),
        prefills,
        torch.tensor(sample_index, dtype=torch.int64),
        sampling,
        block_size,
        mask_dtype,
    )


def _run_or_list(table: list[int]) -> torch.Tensor | slice:
    """The blocks of one row: a slice where they are neighbours, which attention reads without gathering."""
    first = table[0]
    if table == list(range(first, first + len(table))):
        return slice(first, first + len(table))
    return torch.tensor(table)


def _causal_mask(start: int, end: int, dtype: torch.dtype, window: int | None = None) -> torch.Tensor:
    """[end - start, end]: token i, at position start + i, attends to positions up to its own, of those to the last `window`."""
    positions, own = torch.arange(end), torch.arange(start, end).unsqueeze(1)
    unseen = positions > own
    if window is not None:
        unseen |= positions <= own - window
    return torch.zeros(unseen.shape, dtype=dtype).masked_fill_(unseen, float("-inf"))
