"""A step of the engine as the numbers that rank 0 sends, and on the other ranks as rows again.

Rows are known by their slots. A row's blocks are sent once, and those that it gets later with the step that needs them; a step has the tokens that
it computes and what their draws depend on. docs/architecture.md has the order of the messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.logit_terms import NO_TERMS, LogitTerms
from pocketllm.torch_engine.logit_edits import LogitEdits, SentEdits, edits_of, has_mask, penalty_bits
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy

_NO_STATE = -1


class StepWriter:
    """On rank 0: steps to numbers. It remembers which blocks of each slot's row were sent."""

    def __init__(self) -> None:
        self._sent: dict[int, tuple[list[int], int]] = {}  # by slot: the row's blocks, and how many of them were sent
        self._released: list[int] = []

    def release(self, slot: int) -> None:
        """The row of `slot` has left it."""
        self._sent.pop(slot, None)
        self._released.append(slot)

    def write(self, step: Sequence[ScheduledRow], copies: Sequence[StateCopy]) -> list[int]:
        numbers = [len(self._released), *self._released, len(copies)]
        self._released = []
        for copy in copies:
            numbers += (_NO_STATE if copy.source is None else copy.source, copy.target)
        for one in step:
            numbers += self._row(one)
        return numbers

    def _row(self, one: ScheduledRow) -> list[int]:
        row, request = one.row, one.row.request
        table, count = self._sent.get(row.slot, (None, 0))
        if table is not row.block_table:  # a row's list of blocks is made anew whenever it starts
            count = 0
        blocks = row.block_table[count:]
        self._sent[row.slot] = row.block_table, len(row.block_table)
        start, end = row.num_computed_tokens, row.num_computed_tokens + one.num_tokens
        return [
            row.slot,
            start,
            one.num_tokens,
            one.samples,
            len(request.prompt_token_ids),
            has_mask(request),
            request.terms is not None,
            -1 if request.logprobs is None else request.logprobs,
            -1 if request.prompt_logprobs is None else request.prompt_logprobs,
            row.num_ranked,
            request.top_k,
            _signed(request.seed),
            *struct.unpack("<2q", struct.pack("<2d", request.temperature, request.top_p)),
            count,
            len(blocks),
            *blocks,
            *row.token_ids[start:end],
            *(_edits_numbers(row) if one.samples else ()),
        ]


class StepReader:
    """On another rank: numbers to steps, whose rows are like those of rank 0 in all that a runner reads."""

    def __init__(self) -> None:
        self._rows: dict[int, Row] = {}

    def read(self, numbers: Sequence[int]) -> tuple[list[Row], list[ScheduledRow], list[StateCopy]]:
        """Rows that have left their slots before the step, its rows, and the copies between states before it."""
        rest = iter(numbers)
        released = [row for slot in _take(rest, next(rest)) if (row := self._rows.pop(slot, None)) is not None]
        copies = []
        for _ in range(next(rest)):
            source, target = _take(rest, 2)
            copies.append(StateCopy(None if source == _NO_STATE else source, target))
        step = []
        for slot in rest:
            step.append(self._row(slot, rest))
        return released, step, copies

    def _row(self, slot: int, rest: Iterator[int]) -> ScheduledRow:
        start, count, samples, prompt_length, has_mask, has_terms, logprobs, prompt_logprobs, num_ranked, *more = _take(rest, 15)
        top_k, seed, temperature, top_p, known_blocks, num_blocks = more
        row = self._rows.get(slot)
        if row is None or known_blocks == 0:
            temperature_, top_p_ = struct.unpack("<2d", struct.pack("<2q", temperature, top_p))
            request = EngineRequest(
                f"slot {slot}",
                (0,) * prompt_length,
                1,
                temperature=temperature_,
                top_p=top_p_,
                top_k=top_k,
                seed=seed % 2**64,
                logprobs=None if logprobs < 0 else logprobs,
                prompt_logprobs=None if prompt_logprobs < 0 else prompt_logprobs,
                constraint=_Elsewhere() if has_mask else None,
                terms=NO_TERMS if has_terms else None,
            )
            row = self._rows[slot] = Row(request)
            row.token_ids = []
            row.slot = slot
        row.block_table += _take(rest, num_blocks)
        row.num_computed_tokens, row.num_ranked = start, num_ranked
        row.token_ids += [0] * (start - len(row.token_ids))  # of a cached prefix; nothing reads them here
        row.token_ids[start:] = _take(rest, count)
        if has_terms and samples:
            row.edits = SentEdits(_read_edits(rest))
        return ScheduledRow(row, count, bool(samples))


def _edits_numbers(row: Row) -> list[int]:
    """The edits of the row's next draw, if it has terms: their lengths, what `edited` and the kernels read of the terms, and the tables."""
    edits = edits_of(row)
    if edits is None:
        return []
    terms = edits.terms
    scalars = (terms.repetition_penalty, terms.frequency_penalty, terms.presence_penalty, terms.min_p)
    lengths = (len(edits.table), len(edits.pairs), edits.awaits_last)
    return [*lengths, *struct.unpack("<4q", struct.pack("<4d", *scalars)), *edits.table.ravel().tolist(), *edits.pairs.ravel().tolist()]


def _read_edits(rest: Iterator[int]) -> LogitEdits:
    num_entries, num_pairs, awaits_last = _take(rest, 3)
    repetition, frequency, presence, min_p = struct.unpack("<4d", struct.pack("<4q", *_take(rest, 4)))
    terms = LogitTerms(repetition, frequency, presence, min_p=min_p)
    table = np.array(_take(rest, 3 * num_entries), np.int32).reshape(num_entries, 3)
    return LogitEdits(terms, table, np.array(_take(rest, 2 * num_pairs), np.int32).reshape(num_pairs, 2), bool(awaits_last), penalty_bits(terms))


class _Elsewhere:
    """Stands for a constraint, which rank 0 has; its masks come from there."""

    is_complete = False

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        raise AssertionError("masks are computed on rank 0")

    def accept(self, token_id: int) -> None:
        raise AssertionError("tokens are accepted on rank 0")


def _take(rest: Iterator[int], count: int) -> list[int]:
    return [next(rest) for _ in range(count)]


def _signed(number: int) -> int:
    """The int64 with the bits of a number below 2^64."""
    return number - 2**64 if number >= 2**63 else number
