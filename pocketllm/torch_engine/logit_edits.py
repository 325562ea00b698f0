"""Which logits of a row its terms change, as numbers for whatever draws: ids with what they have been and what is added, and scalars of the row.

Nothing here depends on slots, blocks or the cache: all follows from the ids that a row has, so a row that is preempted or starts from a cached prefix
needs nothing made anew, and a step takes time for the ids that the row has had since the last one, not for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.torch_engine.scheduler import UNKNOWN, Row

Int32s = npt.NDArray[np.int32]

_IN_PROMPT = 1  # of an entry's `seen`; each time in the answer adds 2
_LEAST_ROOM = 64


@dataclass(slots=True)  # not frozen, which would make it slower to build, a row and a step
class LogitEdits:
    """What changes the logits of one row at one draw. `table` and `pairs` are those of RowEdits, and stay as they are until its next step.

    Args:
        terms: of the row.
        table: [num_entries, 3] int32, its entries side by side, each id once: id; 1 where it is in the prompt and 2 for each time that it is in the answer;
            the bits of a float32 that is added, minus infinity where it can't be drawn.
        pairs: [num_pairs, 2] int32: where the id that the row drew last is the first one, the second can't be drawn.
        awaits_last: the id drawn last is not known yet. It is not in the table, and whoever draws has it; else it is in the table, and no pairs are left.
        penalty_bits: repetition, frequency and presence penalty, each as the bits of a float32.
    """

    terms: LogitTerms
    table: Int32s
    pairs: Int32s
    awaits_last: bool
    penalty_bits: tuple[int, int, int]

    @property
    def ids(self) -> Int32s:
        ids: Int32s = self.table[:, 0]
        return ids

    @property
    def seen(self) -> Int32s:
        seen: Int32s = self.table[:, 1]
        return seen

    @property
    def added(self) -> npt.NDArray[np.float32]:
        added: npt.NDArray[np.float32] = self.table.view(np.float32)[:, 2]
        return added


class RowEdits:
    """The edits of one row, from its first draw to its last.

    Args:
        request: whose terms are not None.
    """

    def __init__(self, request: EngineRequest) -> None:
        terms = request.terms
        assert terms is not None, "a row without terms has no edits"
        self._terms, self._penalty_bits = terms, penalty_bits(terms)
        self._prompt_length = len(request.prompt_token_ids)
        self._num_counted = 0  # ids of the answer that are in the table
        self._counts_answer = terms.frequency_penalty != 0 or terms.presence_penalty != 0 or terms.repetition_penalty != 1
        self._places: dict[int, int] = {}  # of ids in the table
        self._table = np.zeros((_LEAST_ROOM, 3), np.int32)
        if terms.repetition_penalty != 1:
            self._add(np.unique(np.array(request.prompt_token_ids, np.int32)), _IN_PROMPT)
        for token_id, bias in terms.logit_bias:
            place = self._place(token_id)
            self._table[place, 2] = np.float32(bias).view(np.int32)
        self._ends = [self._place(token_id) for token_id in sorted(request.eos_token_ids)] if terms.min_tokens else []
        self._end_bias = self._table[self._ends, 2]
        for place in self._ends:
            self._ban(place)
        self._words: dict[int, list[tuple[int, ...]]] = {}  # of three ids and more, by their last but two
        couples = [word for word in terms.bad_words if len(word) == 2]
        self._couples = np.array(couples, np.int32).reshape(-1, 2)
        for word in terms.bad_words:
            if len(word) == 1:
                self._banned_always(word[0])
            elif len(word) > 2:
                self._words.setdefault(word[-3], []).append(word)
        self._banned_now: list[tuple[int, int]] = []  # places of the table that the last step banned, and what they had
        self._allowed: npt.NDArray[np.uint32] | None = None

    def step(self, token_ids: Sequence[int], num_drawn: int) -> LogitEdits:
        """The edits of draw number `num_drawn` of the row, whose draws are asked for in their order.

        Args:
            token_ids: prompt and answer; the last may be UNKNOWN.
        """
        for place, bits in reversed(self._banned_now):
            self._table[place, 2] = bits
        self._banned_now = []
        awaits_last = token_ids[-1] == UNKNOWN
        if self._ends and num_drawn >= self._terms.min_tokens:
            self._table[self._ends, 2] = self._end_bias
            self._ends = []
        answer_start, known = self._prompt_length, len(token_ids) - awaits_last
        if self._counts_answer:
            for token_id in token_ids[answer_start + self._num_counted : known]:
                place = self._place(token_id)
                self._table[place, 1] += 2
            self._num_counted = known - answer_start
        pairs = self._pairs(token_ids[answer_start:known] if self._words else (), token_ids[-1] if num_drawn and not awaits_last else UNKNOWN, awaits_last)
        return LogitEdits(self._terms, self._table[: len(self._places)], pairs, awaits_last, self._penalty_bits)

    def allowed_words(self, vocab_size: int) -> npt.NDArray[np.uint32]:
        """The bits of allowed_token_ids, which is not None, as `TokenConstraint.fill` writes them."""
        if self._allowed is None:
            bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
            bits[list(self._terms.allowed_token_ids or ())] = 1
            self._allowed = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32, copy=False)
            self._allowed.setflags(write=False)  # so that whoever has it on a device knows that it stays as it is
        return self._allowed

    def _pairs(self, answer: Sequence[int], last: int, awaits_last: bool) -> Int32s:
        """The pairs of a step whose last id is awaited; with `last` known, they are banned in the table and none is left."""
        found = [self._couples] if self._couples.size else []
        before = answer if awaits_last else answer[:-1]
        if before and (words := self._words.get(before[-1])):
            tail = [(word[-2], word[-1]) for word in words if tuple(before[-(len(word) - 2) :]) == word[:-2]]
            found.append(np.array(tail, np.int32).reshape(-1, 2))
        if not found:
            return _NO_PAIRS
        pairs = found[0] if len(found) == 1 else np.concatenate(found)
        if awaits_last:
            return pairs
        for token_id in pairs[pairs[:, 0] == last, 1].tolist():
            place = self._place(token_id)
            self._banned_now.append((place, int(self._table[place, 2])))
            self._ban(place)
        return _NO_PAIRS

    def _banned_always(self, token_id: int) -> None:
        place = self._place(token_id)
        self._ban(place)
        if place in self._ends:
            self._end_bias[self._ends.index(place)] = _NEVER

    def _ban(self, place: int) -> None:
        self._table[place, 2] = _NEVER

    def _place(self, token_id: int) -> int:
        """Of an id in the table, which it is added to where it is not there."""
        place = self._places.get(token_id)
        if place is None:
            place = self._places[token_id] = len(self._places)
            if place == self._table.shape[0]:
                self._grow(1)
            self._table[place, 0] = token_id
        return place

    def _add(self, ids: Int32s, seen: int) -> None:
        """`ids`, none of which is in the table."""
        self._grow(len(ids))
        first = len(self._places)
        self._table[first : first + len(ids), 0] = ids
        self._table[first : first + len(ids), 1] = seen
        self._places.update(zip(ids.tolist(), range(first, first + len(ids)), strict=True))

    def _grow(self, count: int) -> None:
        self._table = np.concatenate([self._table, np.zeros((count + len(self._table), 3), np.int32)])


_NEVER = int(np.float32(-np.inf).view(np.int32))
_NO_PAIRS = np.zeros((0, 2), np.int32)


def penalty_bits(terms: LogitTerms) -> tuple[int, int, int]:
    """See LogitEdits."""
    repetition, frequency, presence = np.array([terms.repetition_penalty, terms.frequency_penalty, terms.presence_penalty], np.float32).view(np.int32).tolist()
    return repetition, frequency, presence


class SentEdits:
    """Of a row of another rank, which sends them: they come in place of its RowEdits."""

    def __init__(self, edits: LogitEdits) -> None:
        self._edits = edits

    def step(self, token_ids: Sequence[int], num_drawn: int) -> LogitEdits:
        """Those that were sent with the step under way."""
        del token_ids, num_drawn
        return self._edits


def edits_of(row: Row) -> LogitEdits | None:
    """The edits of the row's next draw; None where it has no terms."""
    if row.request.terms is None:
        return None
    if row.edits is None:
        row.edits = RowEdits(row.request)
    return row.edits.step(row.token_ids, row.num_generated)


def allowed_words(row: Row, vocab_size: int) -> npt.NDArray[np.uint32] | None:
    """Bits of the ids that the row's request allows, as `TokenConstraint.fill` writes them; None where it allows all."""
    terms = row.request.terms
    if terms is None or terms.allowed_token_ids is None:
        return None
    if row.edits is None:
        row.edits = RowEdits(row.request)
    assert isinstance(row.edits, RowEdits), "another rank's rows get their masks from rank 0"
    return row.edits.allowed_words(vocab_size)


def has_mask(request: EngineRequest) -> bool:
    """Whether some ids of its rows are masked: it has a constraint, or allows some ids alone."""
    return request.constraint is not None or (request.terms is not None and request.terms.allowed_token_ids is not None)
