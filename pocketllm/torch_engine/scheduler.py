"""Continuous batching over plain ints: which rows run, how many tokens each computes this step, in which blocks.

There are no phases. A row catches up `num_computed_tokens` to its length within a budget of prompt tokens a step; the step
in which it catches up gives its next token. Preemption frees a row's blocks and recomputes them later.

A row of a hybrid model also owns a state slot. Its prompt is cut where a snapshot of the state is to be taken, and it starts
from cached blocks only as far as there is a snapshot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.block_pool import ROOT, BlockPool, hash_block
from pocketllm.torch_engine.state_pool import Snapshot, StateCopy, StatePool, Worth

RowFinish = Literal["stop", "length"]


@dataclass(slots=True, eq=False)
class Row:
    """One request in the engine.

    Args:
        request: what was asked for.
        token_ids: the prompt, then what was generated.
        num_computed_tokens: leading tokens whose KV is in the cache.
        block_table: blocks that hold the row's KV, in order.
        block_hashes: prefix digests of the row's full computed blocks.
        cached_tokens: prompt tokens found in the prefix cache when the row first started.
        is_complete: nothing may follow the token that the row has just drawn.
        state_slot: where a running row of a hybrid model has its recurrent state, else -1.
        snapshot: the newest that was taken of it while it runs.
        snapshot_end: tokens up to the last whole block that lay before the row's last token when it started.
    """

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    cached_tokens: int | None = None
    is_complete: bool = False
    state_slot: int = -1
    snapshot: Snapshot | None = None
    snapshot_end: int = 0

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`num_tokens` of `row`, from its num_computed_tokens on, in this step. `samples` when that reaches the row's end."""

    row: Row
    num_tokens: int

    @property
    def samples(self) -> bool:
        return self.num_tokens == self.row.num_pending_tokens


@dataclass(frozen=True, slots=True)
class RowUpdate:
    """What one step did to one row that sampled: the new id, unless it is an EOS id, and whether the row is finished."""

    row: Row
    token_ids: tuple[int, ...]
    num_generated: int
    finish_reason: RowFinish | None


class Scheduler:
    """Holds the waiting and the running rows.

    Args:
        pool: KV blocks.
        max_batch_size: most running rows.
        prefill_chunk_tokens: most prompt tokens a step over all rows; 0 computes each prompt in one step.
        states: state slots of a hybrid model, one for each of max_batch_size rows.
    """

    def __init__(self, pool: BlockPool, max_batch_size: int, prefill_chunk_tokens: int, states: StatePool | None = None) -> None:
        self.pool = pool
        self.states = states
        if states is not None:
            pool.on_evict = states.drop
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.num_preemptions = 0

    def add(self, request: EngineRequest) -> Row:
        """Queue a request behind those that wait."""
        row = Row(request)
        self.waiting.append(row)
        return row

    def remove(self, row: Row) -> None:
        """Take a row out, wherever it is, and free its blocks."""
        if row in self.running:
            self.running.remove(row)
            self._release(row)
        else:
            self.waiting.remove(row)

    def schedule(self) -> list[ScheduledRow]:
        """Choose this step's rows and give them blocks. Empty when there is nothing to do.

        Running rows come first, oldest first, so that an answer under way is not stalled by a new prompt; then waiting rows,
        in order of arrival, while there is a slot, budget, and room.
        """
        budget = self.prefill_chunk_tokens or float("inf")
        step: list[ScheduledRow] = []
        preemptions = self.num_preemptions
        for row in list(self.running):
            if row not in self.running:
                continue  # preempted to make room for an older row
            wanted = row.num_pending_tokens
            count = wanted if wanted == 1 else self._cut(row, int(min(wanted, budget)))
            if count == 0 or not self._make_room(row):
                continue
            if wanted > 1:
                budget -= count
            step.append(ScheduledRow(row, count))
        if self.num_preemptions > preemptions:
            return step  # a row that comes back now would take the blocks it just gave up
        while self.waiting and len(self.running) < self.max_batch_size and budget > 0 and self._start(self.waiting[0]):
            row = self.waiting.popleft()
            self.running.append(row)
            count = self._cut(row, int(min(row.num_pending_tokens, budget)))
            budget -= count
            step.append(ScheduledRow(row, count))
        return step

    def take_copies(self) -> Sequence[StateCopy]:
        """Copies between state slots that must be carried out, in order, before the step that was just scheduled is computed."""
        return () if self.states is None else self.states.take_copies()

    def update(self, step: Sequence[ScheduledRow], sampled: Sequence[int]) -> list[RowUpdate]:
        """Record that `step` was computed and that its sampling rows, in order, drew `sampled`. Finished rows leave."""
        ids = iter(sampled)
        updates = []
        for scheduled in step:
            row, samples = scheduled.row, scheduled.samples
            row.num_computed_tokens += scheduled.num_tokens
            self._extend_hashes(row)
            if self.states is not None:
                self._take_snapshot(self.states, row)
            if not samples:
                continue
            token_id = next(ids)
            row.token_ids.append(token_id)
            is_eos = token_id in row.request.eos_token_ids
            finish: RowFinish | None = "stop" if is_eos or row.is_complete else "length" if row.num_generated >= row.request.max_tokens else None
            updates.append(RowUpdate(row, () if is_eos else (token_id,), row.num_generated, finish))
            if finish is not None:
                self.remove(row)
        return updates

    def preempt(self, row: Row) -> None:
        """Free a running row's blocks and slot and put it first in the queue; what it computed is recomputed later."""
        self.running.remove(row)
        self._release(row)
        row.num_computed_tokens = 0
        self.waiting.appendleft(row)
        self.num_preemptions += 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, tables and pool agree."""
        self.pool.check_integrity(row.block_table for row in self.running)
        assert len(self.running) <= self.max_batch_size, "more rows run than there are slots"
        for row in self.running:
            assert row.num_computed_tokens < len(row.token_ids), "a running row has nothing to compute"
            assert self._blocks_for(row.num_computed_tokens) <= len(row.block_table), "computed tokens have no block"
        if self.states is not None:
            self.states.check_integrity((row.state_slot, row.snapshot) for row in self.running)
        for row in self.waiting:
            assert row.state_slot < 0 and row.snapshot is None, "a waiting row holds a state slot"
            assert not row.block_table and row.num_computed_tokens == 0, "a waiting row holds KV"

    def rows(self) -> Iterable[Row]:
        """Every row, running ones first."""
        yield from self.running
        yield from self.waiting

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _start(self, row: Row) -> bool:
        """Blocks for all tokens that a waiting row has, cached ones first. False, and nothing taken, if they are not there."""
        cached = self.pool.match_prefix(row.token_ids)
        if self.states is not None:
            while cached and not self.states.has(self.pool.digest_of(cached[-1])):
                cached.pop()
        self.pool.share(cached)
        fresh = self.pool.allocate(self._blocks_for(len(row.token_ids)) - len(cached))
        if fresh is None:
            self.pool.free(cached)
            return False
        row.block_table = cached + fresh
        row.num_computed_tokens = len(cached) * self.pool.block_size
        self._extend_hashes(row)
        if self.states is not None:
            row.state_slot = self.states.start(row.block_hashes[-1] if cached else None)
            row.snapshot_end = (len(row.token_ids) - 1) // self.pool.block_size * self.pool.block_size
        if row.cached_tokens is None:
            row.cached_tokens = row.num_computed_tokens
        return True

    def _make_room(self, row: Row) -> bool:
        """Blocks for all tokens of a running row, preempting the youngest rows. False if `row` itself had to go."""
        needed = self._blocks_for(len(row.token_ids)) - len(row.block_table)
        if needed <= 0:
            return True
        while (fresh := self.pool.allocate(needed)) is None:
            victim = self.running[-1]
            self.preempt(victim)
            if victim is row:
                return False
        row.block_table.extend(fresh)
        return True

    def _release(self, row: Row) -> None:
        self.pool.free(row.block_table)
        row.block_table = []
        row.block_hashes = []
        if self.states is not None:
            self.states.end(row.state_slot, row.snapshot)
            row.state_slot, row.snapshot = -1, None

    def _cut(self, row: Row, count: int) -> int:
        """`count`, or fewer so that the row's next tokens end where a snapshot is to be kept."""
        if self.states is None or not self.pool.enable_prefix_caching:
            return count
        start, interval = row.num_computed_tokens, self.states.interval_blocks * self.pool.block_size
        ends = ((start // interval + 1) * interval, row.snapshot_end)
        return min([count, *(end - start for end in ends if end > start)])

    def _take_snapshot(self, states: StatePool, row: Row) -> None:
        """Snapshot a row that is at the end of a block. One that decodes gives up the one before, so that it leaves a late one when it ends."""
        position, size = row.num_computed_tokens, self.pool.block_size
        if self.pool.enable_prefix_caching and position % size == 0:
            is_mark = position % (states.interval_blocks * size) == 0
            worth = Worth.LASTING if position == row.snapshot_end else Worth.INTERVAL if is_mark else Worth.PASSING
            row.snapshot = states.save(row.state_slot, row.block_hashes[-1], row.snapshot, worth)

    def _extend_hashes(self, row: Row) -> None:
        size = self.pool.block_size
        if not self.pool.enable_prefix_caching:
            return
        while (len(row.block_hashes) + 1) * size <= row.num_computed_tokens:
            index = len(row.block_hashes)
            parent = row.block_hashes[-1] if row.block_hashes else ROOT
            row.block_hashes.append(hash_block(parent, row.token_ids[index * size : (index + 1) * size]))
            self.pool.register(row.block_table[index], row.block_hashes[-1])
