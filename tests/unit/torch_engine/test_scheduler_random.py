"""The scheduler under random arrivals, cancels and pool sizes: each row's ids are those that it has alone, and everything ends."""

from __future__ import annotations

from dataclasses import dataclass

from fake_model import VOCAB_SIZE, FakeModel, alone
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.scheduler import Row, Scheduler
from pocketllm.torch_engine.state_pool import StatePool

MAX_PROMPT, MAX_TOKENS = 24, 12


@dataclass(frozen=True)
class Arrival:
    request: EngineRequest
    step: int
    cancel_after: int | None  # steps after its arrival


@st.composite
def arrivals(draw: st.DrawFn) -> list[Arrival]:
    """Requests whose prompts often begin alike."""
    stem = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=MAX_PROMPT - 4))
    found = []
    for place in range(draw(st.integers(1, 7))):
        prompt = stem[: draw(st.integers(0, len(stem)))] + draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=4))
        eos = draw(st.frozensets(st.integers(0, VOCAB_SIZE - 1), max_size=2))
        request = EngineRequest(f"r{place}", tuple(prompt), draw(st.integers(1, MAX_TOKENS)), eos_token_ids=eos)
        found.append(Arrival(request, draw(st.integers(0, 12)), draw(st.none() | st.integers(0, 8))))
    return found


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    arriving=arrivals(),
    block_size=st.integers(1, 5),
    spare_blocks=st.integers(0, 12),
    slots=st.integers(1, 5),
    chunk=st.integers(0, 9),
    caching=st.booleans(),
    snapshots=st.none() | st.integers(0, 6),
    interval_blocks=st.integers(1, 4),
)
def test_every_row_ends_with_the_ids_that_it_has_alone(
    arriving: list[Arrival], block_size: int, spare_blocks: int, slots: int, chunk: int, caching: bool, snapshots: int | None, interval_blocks: int
) -> None:
    """`snapshots` is None for a model of attention alone."""
    largest = max(-(-(len(one.request.prompt_token_ids) + one.request.max_tokens) // block_size) for one in arriving)
    pool = BlockPool(largest + spare_blocks, block_size, enable_prefix_caching=caching)
    states = None if snapshots is None else StatePool(slots, snapshots, interval_blocks)
    scheduler = Scheduler(pool, slots, chunk, states)
    model = FakeModel(pool.num_blocks, block_size, state_slots=0 if states is None else states.num_slots)
    rows: dict[str, Row] = {}
    reasons: dict[str, str] = {}
    answers: dict[str, list[int]] = {one.request.request_id: [] for one in arriving}
    last_event = max(one.step + (one.cancel_after or 0) for one in arriving)
    # Preemption aside, a row needs a step a token; each may also be recomputed, by pieces of `chunk`, for each token of an older one.
    most_steps = last_event + 2 * sum((len(one.request.prompt_token_ids) + one.request.max_tokens) ** 2 for one in arriving)
    step_number = 0
    while step_number <= last_event or scheduler.running or scheduler.waiting:
        for one in arriving:
            name = one.request.request_id
            if one.step == step_number:
                rows[name] = scheduler.add(one.request)
            if one.cancel_after is not None and one.step + one.cancel_after == step_number and name not in reasons:
                scheduler.remove(rows[name])
                reasons[name] = "cancelled"
        scheduler.check_integrity()
        step = scheduler.schedule()
        scheduler.check_integrity()
        assert step or not (scheduler.running or scheduler.waiting), "there are rows and none is scheduled"
        assert len({id(scheduled.row) for scheduled in step}) == len(step), "a row is scheduled twice"
        prompt_tokens = sum(scheduled.num_tokens for scheduled in step if scheduled.row.num_pending_tokens > 1)
        assert not chunk or prompt_tokens <= chunk, "more prompt tokens than the budget"
        sampled = model.compute(step, scheduler.take_copies())
        for update in scheduler.update(step, [token_id for token_id in sampled.values() if token_id is not None]):
            name = update.row.request.request_id
            assert name not in reasons, "something follows a finish"
            answers[name].extend(update.token_ids)
            assert update.num_generated == update.row.num_generated
            if update.finish_reason is not None:
                reasons[name] = update.finish_reason
        scheduler.check_integrity()
        step_number += 1
        assert step_number <= most_steps, "the scheduler goes round in circles"
    assert pool.num_available == pool.num_blocks, "blocks are still held at the end"
    pool.check_integrity([])
    for one in arriving:
        name, expected = one.request.request_id, alone(one.request)
        is_eos = expected[-1] in one.request.eos_token_ids
        text = expected[:-1] if is_eos else expected
        if reasons[name] == "cancelled":
            assert answers[name] == text[: len(answers[name])]
        else:
            assert answers[name] == text
            assert reasons[name] == ("stop" if is_eos else "length")
        cached = rows[name].cached_tokens
        assert cached is None or 0 <= cached < len(one.request.prompt_token_ids)
        assert (caching and snapshots != 0) or not cached
