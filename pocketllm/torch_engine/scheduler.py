"""Continuous batching over plain ints: which rows run, how many tokens each computes this step, in which blocks.

There are no phases. A row catches up `num_computed_tokens` to its length within a budget of prompt tokens a step; the step
in which it catches up gives its next token. Preemption frees a row's blocks and recomputes them later.

A step is chosen by `schedule`, counted as computed by `advance`, and its ids come in by `resolve`. Between the two a row's last id is
UNKNOWN, and the next step may be chosen and launched; it is counted once the one before is resolved. So when a row turns out to
have ended, at most one step was computed for nothing. What that step writes lies behind what the row has counted, in blocks and a slot
that are free by then: whoever gets them writes them in a later step, which the device runs after it.

Each running row owns a slot, a number below max_batch_size; in a hybrid model its state is in that slot. Such a row's prompt is cut where
a snapshot of the state is to be taken, and it starts from cached blocks only as far as there is a snapshot.
"""

from __future__ import annotations

from bisect import insort_left, insort_right
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from pocketllm.backends.base import EngineRequest, TokenLogprobs
from pocketllm.torch_engine.block_pool import ROOT, BlockPool, hash_block
from pocketllm.torch_engine.state_pool import Snapshot, StateCopy, StatePool, Worth

if TYPE_CHECKING:
    from pocketllm.torch_engine.logit_edits import RowEdits, SentEdits
RowFinish = Literal["stop", "length"]

_priority = attrgetter("request.priority")
UNKNOWN = -1  # stands for an id that a step under way draws


@dataclass(slots=True, eq=False)
class Row:
    """One request in the engine.

    Args:
        request: what was asked for.
        token_ids: the prompt, then what was generated; the last is UNKNOWN while the step that draws it is under way.
        num_computed_tokens: leading tokens whose KV is in the cache.
        block_table: blocks that hold the row's KV, in order.
        block_hashes: prefix digests of the row's full computed blocks.
        num_registered_blocks: how many of those were computed by steps that are resolved, and so may be shared.
        cached_tokens: prompt tokens found in the prefix cache when the row first started.
        is_complete: nothing may follow the token that the row has just drawn.
        slot: a running row's own number, in a hybrid model also that of its state slot; else -1.
        snapshot: the newest that was taken of it while it runs.
        edits: what changes its logits, once it has been asked for; belongs to the runner.
        snapshot_end: tokens up to the last whole block that lay before the row's last token when it started.
        num_ranked: how many tokens of the prompt after its first have log probabilities from steps that were advanced, in a row that asks for them.
        prompt_logprobs: of those, once their steps have landed; they are handed out with the row's first output.
    """

    request: EngineRequest
    token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    cached_tokens: int | None = None
    is_complete: bool = False
    slot: int = -1
    snapshot: Snapshot | None = None
    snapshot_end: int = 0
    edits: RowEdits | SentEdits | None = None
    num_ranked: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)

    @property
    def num_generated(self) -> int:
        """One that is UNKNOWN included."""
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def num_pending_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """`num_tokens` of `row`, from its num_computed_tokens on, in this step. `samples` when that reaches the row's end."""

    row: Row
    num_tokens: int
    samples: bool

    @property
    def ranked(self) -> range:
        """Places in `row.token_ids` of the prompt tokens whose log probabilities this step gives, each by the logits of the token before; until `advance`."""
        row = self.row
        if row.request.prompt_logprobs is None:
            return range(0)
        start = row.num_computed_tokens
        return range(max(start, row.num_ranked) + 1, min(start + self.num_tokens + 1, len(row.request.prompt_token_ids)))

    @property
    def ranked_ids(self) -> list[int]:
        """Ids of those tokens. The last of them comes after this step's tokens, so that other ranks than 0 do not know it: there it is any."""
        ranked = self.ranked
        found = self.row.token_ids[ranked.start : ranked.stop]
        return found + [0] * (len(ranked) - len(found))


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
        prefill_chunk_beside_answers: most prompt tokens, at least 1, of a step in which some row decodes; None is as many as in any other.

    Attributes:
        on_release: told a row that leaves the running rows, while it still has its slot.
    """

    def __init__(
        self,
        pool: BlockPool,
        max_batch_size: int,
        prefill_chunk_tokens: int,
        states: StatePool | None = None,
        *,
        prefill_chunk_beside_answers: int | None = None,
    ) -> None:
        assert prefill_chunk_beside_answers is None or prefill_chunk_beside_answers > 0, "no prompt would ever begin beside an answer"
        self.pool = pool
        self.states = states
        if states is not None:
            pool.on_evict = states.drop
        self.max_batch_size = max_batch_size
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self.prefill_chunk_beside_answers = prefill_chunk_beside_answers
        self.on_release: Callable[[Row], None] | None = None
        self._free_slots: deque[int] = deque(range(max_batch_size))
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.num_preemptions = 0

    def add(self, request: EngineRequest) -> Row:
        """Queue a request behind those that wait with its priority or a lower number, which start first and are preempted last."""
        row = Row(request)
        insort_right(self.waiting, row, key=_priority)
        return row

    def remove(self, row: Row) -> None:
        """Take a row out, wherever it is, and free its blocks. An id that is UNKNOWN is taken back."""
        if row.slot >= 0:
            self.running.remove(row)
            self._release(row)
            if row.token_ids[-1] == UNKNOWN:
                row.token_ids.pop()
        else:
            self.waiting.remove(row)

    def can_run_ahead(self) -> bool:
        """Whether the next step can be chosen while ids are UNKNOWN: no row needs its id for its next mask, and none has to be preempted."""
        startable = islice(self.waiting, self.max_batch_size - len(self.running))
        if any(row.request.constraint is not None for row in chain(self.running, startable)):
            return False
        going_on = (row for row in self.running if not self._awaits_end(row))
        needed = sum(max(0, self._blocks_for(len(row.token_ids)) - len(row.block_table)) for row in going_on)
        return needed <= self.pool.num_available

    def schedule(self) -> list[ScheduledRow]:
        """Choose this step's rows and give them blocks. Empty when there is nothing to do.

        Running rows come first, oldest first, so that an answer under way is not stalled by a new prompt; then waiting rows,
        in order of arrival, while there is a slot, budget, and room. While ids are UNKNOWN, ask `can_run_ahead` before.
        """
        budget = self._prompt_budget()
        step: list[ScheduledRow] = []
        preemptions = self.num_preemptions
        for row in list(self.running):
            if row not in self.running:
                continue  # preempted to make room for an older row
            if self._awaits_end(row):
                continue
            wanted = row.num_pending_tokens
            count = wanted if wanted == 1 else self._cut(row, int(min(wanted, budget)))
            if count == 0 or not self._make_room(row):
                continue
            if wanted > 1:
                budget -= count
            step.append(ScheduledRow(row, count, count == wanted))
        if self.num_preemptions > preemptions:
            return step  # a row that comes back now would take the blocks it just gave up
        while self.waiting and len(self.running) < self.max_batch_size and budget > 0 and self._start(self.waiting[0]):
            row = self.waiting.popleft()
            insort_right(self.running, row, key=_priority)
            count = self._cut(row, int(min(row.num_pending_tokens, budget)))
            budget -= count
            step.append(ScheduledRow(row, count, count == row.num_pending_tokens))
        return step

    def take_copies(self) -> Sequence[StateCopy]:
        """Copies between state slots that must be carried out, in order, before the step that was just scheduled is computed."""
        return () if self.states is None else self.states.take_copies()

    def advance(self, step: Sequence[ScheduledRow]) -> None:
        """Count the tokens of `step`, which was launched, as computed; the next id of each of its sampling rows is UNKNOWN from now on.

        All steps before it are resolved, and the next one is not yet scheduled. Rows that have left since it was scheduled are skipped.
        """
        for scheduled in step:
            row = scheduled.row
            if row.slot < 0:
                continue
            row.num_computed_tokens += scheduled.num_tokens
            if row.request.prompt_logprobs is not None:
                row.num_ranked = max(row.num_ranked, min(row.num_computed_tokens, len(row.request.prompt_token_ids) - 1))
            self._extend_hashes(row)
            if self.states is not None:
                self._take_snapshot(self.states, row)
            if scheduled.samples:
                row.token_ids.append(UNKNOWN)

    def resolve(self, step: Sequence[ScheduledRow], sampled: Mapping[int, int]) -> list[RowUpdate]:
        """Record that `step`, the last that was advanced, was computed well, and fill in its ids. Finished rows leave.

        Args:
            step: rows that have left since it was scheduled are skipped; take those that failed out before.
            sampled: by place in `step`, the id that each row drew that samples and has not left.

        Returns:
            One for each of those rows, in the order of their places.
        """
        updates = []
        for place, scheduled in enumerate(step):
            row = scheduled.row
            if row.slot < 0:
                continue
            self._register_blocks(row)
            if not scheduled.samples:
                continue
            token_id = row.token_ids[-1] = sampled[place]
            is_eos = token_id in row.request.eos_token_ids
            finish: RowFinish | None = "stop" if is_eos or row.is_complete else "length" if row.num_generated >= row.request.max_tokens else None
            if row.request.max_tokens == 0:  # what was drawn is not asked for
                updates.append(RowUpdate(row, (), 0, "length"))
            else:
                updates.append(RowUpdate(row, () if is_eos else (token_id,), row.num_generated, finish))
            if finish is not None:
                self.remove(row)
        return updates

    def preempt(self, row: Row) -> None:
        """Free a running row's blocks and slot and put it first among those of its priority in the queue; what it computed is recomputed later."""
        assert row.token_ids[-1] != UNKNOWN, "a row is preempted while its id is under way"
        self.running.remove(row)
        self._release(row)
        row.num_computed_tokens = 0
        insort_left(self.waiting, row, key=_priority)
        self.num_preemptions += 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless rows, tables and pool agree."""
        self.pool.check_integrity(row.block_table for row in self.running)
        assert len(self.running) <= self.max_batch_size, "more rows run than there are slots"
        assert all(sorted(rows, key=_priority) == list(rows) for rows in (self.running, self.waiting)), "a row is before one that goes first"
        for row in self.running:
            assert row.num_computed_tokens < len(row.token_ids), "a running row has nothing to compute"
            assert self._blocks_for(row.num_computed_tokens) <= len(row.block_table), "computed tokens have no block"
            assert UNKNOWN not in row.token_ids[: row.num_computed_tokens], "a token was counted before its id was known"
            hashes = row.num_computed_tokens // self.pool.block_size if self.pool.enable_prefix_caching else 0
            assert row.num_registered_blocks <= len(row.block_hashes) == hashes, "a row has other digests than full blocks"
        slots = [row.slot for row in self.running]
        assert sorted([*slots, *self._free_slots]) == list(range(self.max_batch_size)), "a slot is lost or held twice"
        if self.states is not None:
            self.states.check_integrity(row.snapshot for row in self.running)
        for row in self.waiting:
            assert row.slot < 0 and row.snapshot is None, "a waiting row holds a slot"
            assert not row.block_table and row.num_computed_tokens == 0, "a waiting row holds KV"
            assert UNKNOWN not in row.token_ids, "a waiting row awaits an id"

    def rows(self) -> Iterable[Row]:
        """Every row, running ones first."""
        yield from self.running
        yield from self.waiting

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pool.block_size)

    def _prompt_budget(self) -> float:
        """Most prompt tokens of the next step."""
        most = self.prefill_chunk_tokens or float("inf")
        beside = self.prefill_chunk_beside_answers
        if beside is not None and any(row.num_pending_tokens == 1 and not self._awaits_end(row) for row in self.running):
            return min(most, beside)
        return most

    def _awaits_end(self, row: Row) -> bool:
        """Whether the id under way is the last that the row may draw."""
        return row.num_generated >= max(1, row.request.max_tokens)

    def _start(self, row: Row) -> bool:
        """A slot and blocks for all tokens that a waiting row has, cached ones first. False, and nothing taken, if they are not there."""
        cached = self.pool.match_prefix(row.token_ids)
        if row.request.prompt_logprobs is not None and row.num_ranked < len(row.request.prompt_token_ids) - 1:  # what is not computed can't be ranked
            cached = cached[: row.num_ranked // self.pool.block_size]
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
        row.num_registered_blocks = len(cached)
        row.slot = self._free_slots.popleft()
        if self.states is not None:
            self.states.start(row.slot, row.block_hashes[-1] if cached else None)
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
        if self.on_release is not None:
            self.on_release(row)
        if self.states is not None:
            self.states.end(row.snapshot)
            if row.snapshot is not None and row.num_registered_blocks < len(row.block_hashes) and row.snapshot.digest == row.block_hashes[-1]:
                self.states.drop(row.snapshot.digest)  # of a step that failed, or whose result will not be looked at
            row.snapshot = None
        self.pool.free(row.block_table)
        row.block_table = []
        row.block_hashes = []
        row.num_registered_blocks = 0
        self._free_slots.append(row.slot)
        row.slot = -1

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
            row.snapshot = states.save(row.slot, row.block_hashes[-1], row.snapshot, worth)

    def _extend_hashes(self, row: Row) -> None:
        size = self.pool.block_size
        if not self.pool.enable_prefix_caching:
            return
        while (len(row.block_hashes) + 1) * size <= row.num_computed_tokens:
            index = len(row.block_hashes)
            parent = row.block_hashes[-1] if row.block_hashes else ROOT
            row.block_hashes.append(hash_block(parent, row.token_ids[index * size : (index + 1) * size]))

    def _register_blocks(self, row: Row) -> None:
        for index in range(row.num_registered_blocks, len(row.block_hashes)):
            self.pool.register(row.block_table[index], row.block_hashes[index])
        row.num_registered_blocks = len(row.block_hashes)
