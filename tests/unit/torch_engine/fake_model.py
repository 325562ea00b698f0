"""A model of one int a slot, for tests of what drives a model.

The value of a token is a digest of its id and of the value before it, which is read through the row's block table. So a
wrong block, a block that was shared too early or a token that was skipped changes every later id. With state slots the value
is also carried in the row's slot, with its position, so a wrong slot or a copy out of order is noticed as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.scheduler import ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy

VOCAB_SIZE = 11


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

    def compute(self, step: Sequence[ScheduledRow], copies: Sequence[StateCopy] = ()) -> dict[int, int | None]:
        """Compute `step` after `copies`. Returns the sampled id of each row that samples, by its place, or None."""
        for copy in copies:
            self._states[copy.target] = (0, 0) if copy.source is None else self._states[copy.source]
        self.num_steps += 1
        if self.num_steps == self.fail_at_step:
            raise RuntimeError("a fault was asked for")
        sampled: dict[int, int | None] = {}
        for place, scheduled in enumerate(step):
            row, start = scheduled.row, scheduled.row.num_computed_tokens
            for position in range(start, start + scheduled.num_tokens):
                before = None if position == 0 else self._values[self._slot(row.block_table, position - 1)]
                assert position == 0 or before is not None, "a row reads a slot that nobody wrote"
                value = self._values[self._slot(row.block_table, position)] = _value(before or 0, row.token_ids[position])
                if self._states:
                    assert self._states[row.state_slot] == (position, before or 0), "a row's state is another row's, or of another position"
                    self._states[row.state_slot] = (position + 1, value)
            self.num_computed += scheduled.num_tokens
            if scheduled.samples:
                last = self._values[self._slot(row.block_table, len(row.token_ids) - 1)]
                assert last is not None
                sampled[place] = None if self.nan_token in row.token_ids else last % VOCAB_SIZE
        return sampled

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
