"""A model of one int a slot, for tests of what drives a model.

The value of a token is a digest of its id and of the value before it, which is read through the row's block table. So a
wrong block, a block that was shared too early or a token that was skipped changes every later id. With state slots the value
is also carried in the row's slot, with its position, so a wrong slot or a copy out of order is noticed as well.

Work is read from the rows in `prepare` and may be done any time later, in the order in which it was prepared, as a device does that
works behind the engine's back. An id that was still UNKNOWN is then taken from where the row's slot drew it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.scheduler import UNKNOWN, Row, ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy

VOCAB_SIZE = 11


@dataclass(frozen=True)
class RowWork:
    """What one row computes in one step, apart from the row."""

    row: Row  # for its request alone
    slot: int
    start: int
    token_ids: list[int]
    table: list[int]
    samples: bool
    is_finite: bool


@dataclass(frozen=True)
class Work:
    """One step."""

    rows: list[RowWork]
    copies: list[StateCopy]


class FakeModel:
    """`nan_token`: a row that computes this id has no finite logits; `fail_at_step`: that step raises; `state_slots`: of a hybrid model, else 0."""

    def __init__(self, num_blocks: int, block_size: int, *, nan_token: int | None = None, fail_at_step: int | None = None, state_slots: int = 0) -> None:
        self.block_size = block_size
        self.nan_token = nan_token
        self.fail_at_step = fail_at_step
        self.num_steps = 0
        self.num_computed = 0
        self._values: list[int | None] = [None] * (num_blocks * block_size)
        self._states: list[tuple[int, int] | None] = [None] * state_slots  # tokens read, and the value of the last one
        self._drawn: dict[int, tuple[str, int, int | None]] = {}  # by slot: who drew last, in which step, and what

    def prepare(self, step: Sequence[ScheduledRow], copies: Sequence[StateCopy] = ()) -> Work:
        """What `step` needs, after `copies`."""
        rows = []
        for scheduled in step:
            row, start = scheduled.row, scheduled.row.num_computed_tokens
            ids = row.token_ids[start : start + scheduled.num_tokens]
            assert UNKNOWN not in row.token_ids[:-1], "an id is unknown that is not the last"
            table = row.block_table[: -(-(start + len(ids)) // self.block_size)]
            rows.append(RowWork(row, row.slot, start, ids, table, scheduled.samples, self.nan_token not in row.token_ids))
        assert len({row.slot for row in rows}) == len(rows)
        assert all(row.slot >= 0 for row in rows)
        return Work(rows, list(copies))

    def run(self, work: Work) -> dict[int, int | None]:
        """Do it. Returns the sampled id of each row that samples, by its place, or None."""
        for copy in work.copies:
            self._states[copy.target] = (0, 0) if copy.source is None else self._states[copy.source]
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("a fault was asked for")
        sampled: dict[int, int | None] = {}
        for place, row in enumerate(work.rows):
            value = 0
            for position, token_id in enumerate(row.token_ids, row.start):
                if token_id == UNKNOWN:
                    drawer, number, drawn = self._drawn[row.slot]
                    assert (drawer, number) == (row.row.request.request_id, self.num_steps - 1), "an id is not from the row's step before"
                    token_id = 0 if drawn is None else drawn  # a row that failed computes one step for nothing
                before = None if position == 0 else self._values[self._slot(row.table, position - 1)]
                assert position == 0 or before is not None, "a row reads a slot that nobody wrote"
                value = self._values[self._slot(row.table, position)] = _value(before or 0, token_id)
                if self._states:
                    assert self._states[row.slot] == (position, before or 0), "a row's state is another row's, or of another position"
                    self._states[row.slot] = (position + 1, value)
            self.num_computed += len(row.token_ids)
            if row.samples:
                sampled[place] = value % VOCAB_SIZE if row.is_finite else None
                self._drawn[row.slot] = (row.row.request.request_id, self.num_steps, sampled[place])
        return sampled

    def draw(self, step: Sequence[ScheduledRow], copies: Sequence[StateCopy] = ()) -> dict[int, int]:
        """Compute `step` at once, where every row's logits are finite."""
        sampled = self.run(self.prepare(step, copies))
        return {place: token_id for place, token_id in sampled.items() if token_id is not None}

    def _slot(self, table: Sequence[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size


def alone(request: EngineRequest) -> list[int]:
    """The ids that `request` generates with nothing else in the engine, its EOS id included."""
    value = 0
    for token_id in request.prompt_token_ids:
        value = _value(value, token_id)
    ids: list[int] = []
    while len(ids) < request.max_tokens and not (ids and ids[-1] in request.eos_token_ids):
        ids.append(value % VOCAB_SIZE)
        value = _value(value, ids[-1])
    return ids


def _value(before: int, token_id: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"{before},{token_id}".encode(), digest_size=6).digest(), "big")
