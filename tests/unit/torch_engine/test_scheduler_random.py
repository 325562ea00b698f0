"""The scheduler under random arrivals, cancels, faults and pool sizes, in the loop of either kind of runner: each row's ids are
those that it has alone, and everything ends."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from fake_model import VOCAB_SIZE, FakeModel, Work, alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.scheduler import Row, ScheduledRow, Scheduler
from pocketllm.torch_engine.state_pool import StatePool
from tests.id_constraint import IdConstraint

MAX_PROMPT, MAX_TOKENS = 24, 12


@dataclass(frozen=True)
class Arrival:
    request: EngineRequest
    turn: int
    cancel_after: int | None  # turns after its arrival
    fails_at: int | None  # the draw that is an error


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Requests whose prompts often begin alike."""
    stem = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=MAX_PROMPT - 4))
    found = []
    for place in range(draw(st.integers(1, 7))):
        prompt = stem[: draw(st.integers(0, len(stem)))] + draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4))
        eos = draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2))
        constraint = draw(st.sampled_from([None, None, None, IdConstraint(range(VOCAB_SIZE))]))
        request = EngineRequest(f"r{place}", tuple(prompt), draw(st.integers(1, MAX_TOKENS)), eos_token_ids=eos, constraint=constraint)
        fails_at = draw(st.sampled_from([None, None, None, None, 0, 1, 3]))
        found.append(Arrival(request, draw(st.integers(0, 12)), draw(st.none() | st.integers(0, 8)), fails_at))
    return found


class Loop:
    """The engine's loop, turn by turn, around a model that computes as late as it may. Checked after each thing that it does."""

    def __init__(self, scheduler: Scheduler, model: FakeModel, arriving: list[Arrival], runs_ahead: bool) -> None:
        self.scheduler, self.model, self.runs_ahead = scheduler, model, runs_ahead
        self.arrivals = {one.request.request_id: one for one in arriving}
        self.rows: dict[str, Row] = {}
        self.reasons: dict[str, str] = {}
        self.answers: dict[str, list[int]] = {name: [] for name in self.arrivals}
        self.launched_draws: Counter[str] = Counter()
        self.flying: tuple[list[ScheduledRow], Work] | None = None

    @property
    def is_busy(self) -> bool:
        return bool(self.flying or self.scheduler.running or self.scheduler.waiting)

    def add(self, name: str) -> None:
        self.rows[name] = self.scheduler.add(self.arrivals[name].request)
        self.scheduler.check_integrity()

    def end(self, name: str, reason: str) -> None:
        if name not in self.reasons:
            self.reasons[name] = reason
            self.scheduler.remove(self.rows[name])
            self.scheduler.check_integrity()
            assert self.rows[name].num_generated == len(self.answers[name]), "an id counts that was not published"

    def turn(self) -> None:
        scheduler = self.scheduler
        if self.flying and not scheduler.can_run_ahead():
            self._land()
            return
        preemptions = scheduler.num_preemptions
        decodes = any(row.num_pending_tokens == 1 and row.num_generated < row.request.max_tokens for row in scheduler.running)
        step = scheduler.schedule()
        scheduler.check_integrity()
        assert step or self.flying or not (scheduler.running or scheduler.waiting), "there are rows and none is scheduled"
        assert not self.flying or scheduler.num_preemptions == preemptions, "a row is preempted that may be about to end"
        self._check_step(step, decodes)
        work = self.model.prepare(step, scheduler.take_copies()) if step else None
        if self.flying:
            self._land()
        if work is not None:
            scheduler.advance(step)
            scheduler.check_integrity()
            self.flying = step, work
            if not self.runs_ahead:
                self._land()

    def _check_step(self, step: list[ScheduledRow], decodes: bool) -> None:
        scheduler = self.scheduler
        assert len({id(scheduled.row) for scheduled in step}) == len(step), "a row is scheduled twice"
        prompt_tokens = sum(one.num_tokens for one in step if one.row.num_pending_tokens > 1)
        budgets = [scheduler.prefill_chunk_tokens or 1000]
        if decodes and scheduler.prefill_chunk_beside_answers is not None:
            budgets.append(scheduler.prefill_chunk_beside_answers)
        assert prompt_tokens <= min(budgets), "more prompt tokens than the budget"
        for one in step:
            assert not (self.flying and one.row.request.constraint is not None), "a mask depends on an id that is not known"
            assert one.row.num_generated < one.row.request.max_tokens, "a row is scheduled that can only end"
            self.launched_draws[one.row.request.request_id] += one.samples

    def _land(self) -> None:
        assert self.flying
        (step, work), self.flying = self.flying, None
        sampled = {place: token_id for place, token_id in self.model.run(work).items() if step[place].row.slot >= 0}
        for place in list(sampled):
            name = step[place].row.request.request_id
            if self.arrivals[name].fails_at == len(self.answers[name]):
                del sampled[place]
                self.end(name, "error")
        for update in self.scheduler.resolve(step, {place: token_id for place, token_id in sampled.items() if token_id is not None}):
            name = update.row.request.request_id
            assert name not in self.reasons, "something follows a finish"
            self.answers[name].extend(update.token_ids)
            assert update.num_generated == update.row.num_generated
            if update.finish_reason is not None:
                self.reasons[name] = update.finish_reason
        self.scheduler.check_integrity()


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arriving=arrivals(),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    slots=st.integers(1, 5),
    chunk=st.integers(0, 9),
    beside_answers=st.none() | st.integers(1, 6),
    caching=st.booleans(),
    snapshots=st.none() | st.integers(0, 6),
    interval_blocks=st.integers(1, 4),
    runs_ahead=st.booleans(),
)
def test_every_row_ends_with_the_ids_that_it_has_alone(
    arriving: list[Arrival],
    block_size: int,
    spare_blocks: int,
    slots: int,
    chunk: int,
    beside_answers: int | None,
    caching: bool,
    snapshots: int | None,
    interval_blocks: int,
    runs_ahead: bool,
) -> None:
    """`snapshots` is None for a model of attention alone."""
    largest = max(-(-(len(one.request.prompt_token_ids) + one.request.max_tokens) // block_size) for one in arriving)
    pool = BlockPool(largest + spare_blocks, block_size, enable_prefix_caching=caching)
    states = None if snapshots is None else StatePool(slots, snapshots, interval_blocks)
    scheduler = Scheduler(pool, slots, chunk, states, prefill_chunk_beside_answers=beside_answers)
    loop = Loop(scheduler, FakeModel(pool.num_blocks, block_size, state_slots=0 if states is None else states.num_slots), arriving, runs_ahead)
    last_event = max(one.turn + (one.cancel_after or 0) for one in arriving)
    # Preemption aside, a row needs a step a token; each may also be recomputed, by pieces of `chunk`, for each token of an older one.
    most_turns = last_event + 4 * sum((len(one.request.prompt_token_ids) + one.request.max_tokens) ** 2 for one in arriving)
    number = 0
    while number <= last_event or loop.is_busy:
        for name, one in loop.arrivals.items():
            if one.turn == number:
                loop.add(name)
            if one.cancel_after is not None and one.turn + one.cancel_after == number:
                loop.end(name, "cancelled")
        loop.turn()
        number += 1
        assert number <= most_turns, "the scheduler goes round in circles"
    assert pool.num_available == pool.num_blocks, "blocks are still held at the end"
    pool.check_integrity([])
    for name, one in loop.arrivals.items():
        expected, answer, reason = alone(one.request), loop.answers[name], loop.reasons[name]
        is_eos = expected[-1] in one.request.eos_token_ids
        text = expected[:-1] if is_eos else expected
        if reason == "cancelled":
            assert answer == text[: len(answer)]
        elif reason == "error":
            assert answer == text[: one.fails_at]
        else:
            assert answer == text
            assert reason == ("stop" if is_eos else "length")
        counted = len(answer) + (reason in ("stop", "error"))  # draws that were looked at
        assert counted <= loop.launched_draws[name] <= counted + (runs_ahead and reason != "length")
        if one.request.constraint is not None and reason != "cancelled":
            assert loop.launched_draws[name] == counted, "a step was computed for nothing"
        cached = loop.rows[name].cached_tokens
        assert cached is None or 0 <= cached < len(one.request.prompt_token_ids)
        assert (caching and snapshots != 0) or not cached
