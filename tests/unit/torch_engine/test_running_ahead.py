"""Choosing, launching and publishing while a step is under way: what it may do, what it costs, and what must wait."""

from __future__ import annotations

import random
import threading
import time

import pytest
from engine_setup import WAIT, Answer, Setup, eventually, request, running
from fake_model import VOCAB_SIZE, FakeModel, alone

from pocketllm.backends.base import EngineRequest, StepOutput
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.scheduler import UNKNOWN, Row, RowUpdate, Scheduler
from pocketllm.torch_engine.state_pool import StatePool
from tests.id_constraint import IdConstraint


def make_request(name: str, length: int, max_tokens: int = 9, eos: frozenset[int] = frozenset()) -> EngineRequest:
    return EngineRequest(name, tuple(range(10, 10 + length)), max_tokens, eos_token_ids=eos)


class Ahead:
    """A scheduler, block_size 4, with the fake model."""

    def __init__(self, num_blocks: int = 32, slots: int = 3, states: StatePool | None = None) -> None:
        self.states = states
        self.scheduler = Scheduler(BlockPool(num_blocks, 4), slots, 0, states)
        self.model = FakeModel(num_blocks, 4, state_slots=0 if states is None else states.num_slots)

    def add(self, one: EngineRequest) -> Row:
        return self.scheduler.add(one)

    def launch(self) -> tuple[list[tuple[str, int]], dict[int, int]]:
        """Choose a step, which is remembered, and compute it. What it chose, and drew."""
        self.step = self.scheduler.schedule()
        sampled = self.model.draw(self.step, self.scheduler.take_copies())
        self.scheduler.check_integrity()
        return [(one.row.request.request_id, one.num_tokens) for one in self.step], sampled


def test_a_row_is_scheduled_while_its_id_is_under_way() -> None:
    ahead = Ahead()
    row = ahead.add(make_request("a", 4, 3))
    expected = alone(row.request)
    _, first = ahead.launch()
    before = ahead.step
    ahead.scheduler.advance(before)
    assert (row.token_ids[-1], row.num_generated, row.num_computed_tokens) == (UNKNOWN, 1, 4)
    chosen, second = ahead.launch()
    assert chosen == [("a", 1)]
    assert ahead.scheduler.resolve(before, first) == [RowUpdate(row, (expected[0],), 1, None)]
    ahead.scheduler.advance(ahead.step)
    assert row.token_ids[4:] == [expected[0], UNKNOWN]
    assert ahead.scheduler.resolve(ahead.step, second) == [RowUpdate(row, (expected[1],), 2, None)]


def test_a_row_whose_last_id_is_under_way_is_not_scheduled() -> None:
    ahead = Ahead()
    ahead.add(make_request("a", 4, 1))
    other = ahead.add(make_request("b", 5, 2))
    _, sampled = ahead.launch()
    before = ahead.step
    ahead.scheduler.advance(before)
    assert ahead.launch()[0] == [("b", 1)]
    assert [update.finish_reason for update in ahead.scheduler.resolve(before, sampled)] == ["length", None]
    assert ahead.scheduler.running == [other]


def test_a_row_that_ended_is_skipped_and_its_blocks_hold_nothing_of_the_step_behind() -> None:
    ahead = Ahead()
    row = ahead.add(make_request("a", 7, 9))
    eos = alone(row.request)[0]
    row.request = make_request("a", 7, 9, frozenset([eos]))
    _, first = ahead.launch()
    before = ahead.step
    ahead.scheduler.advance(before)
    ahead.launch()  # computes the eighth token, which fills the second block
    assert ahead.scheduler.resolve(before, first) == [RowUpdate(row, (), 1, "stop")]
    ahead.scheduler.advance(ahead.step)
    assert ahead.scheduler.resolve(ahead.step, {}) == []
    ahead.scheduler.check_integrity()
    assert (row.slot, row.num_computed_tokens, ahead.scheduler.pool.num_used) == (-1, 7, 0)
    assert len(ahead.scheduler.pool.match_prefix([*row.token_ids, 1])) == 1


def test_blocks_are_shared_once_their_step_is_resolved() -> None:
    ahead = Ahead()
    ahead.add(make_request("a", 9))
    _, sampled = ahead.launch()
    before = ahead.step
    ahead.scheduler.advance(before)
    early = ahead.add(make_request("early", 9))
    chosen, _ = ahead.launch()
    assert chosen == [("a", 1), ("early", 9)]
    ahead.scheduler.resolve(before, sampled)
    ahead.scheduler.advance(ahead.step)
    late = ahead.add(make_request("late", 9))
    ahead.launch()
    assert (early.cached_tokens, late.cached_tokens) == (0, 8)


@pytest.mark.parametrize("is_resolved", [True, False])
def test_what_a_failed_step_left_is_not_taken_up(is_resolved: bool) -> None:
    ahead = Ahead(states=StatePool(3, 6, 1))
    assert ahead.states is not None
    row = ahead.add(make_request("a", 8, 9))
    _, sampled = ahead.launch()  # the first block, since a snapshot is kept there
    ahead.scheduler.advance(ahead.step)
    ahead.scheduler.resolve(ahead.step, sampled)
    _, sampled = ahead.launch()
    ahead.scheduler.advance(ahead.step)
    assert ahead.states.num_snapshots == 2
    if is_resolved:
        ahead.scheduler.resolve(ahead.step, sampled)
    ahead.scheduler.remove(row)  # the step failed for it, or nobody waited
    ahead.scheduler.check_integrity()
    assert ahead.states.num_snapshots == (2 if is_resolved else 1)
    again = ahead.add(make_request("b", 11))
    ahead.launch()
    assert again.cached_tokens == (8 if is_resolved else 4)


def test_running_ahead_waits_for_masks_and_for_room() -> None:
    ahead = Ahead(num_blocks=4, slots=2)
    row = ahead.add(make_request("a", 6))
    assert ahead.scheduler.can_run_ahead()
    ahead.launch()
    ahead.scheduler.advance(ahead.step)
    assert ahead.scheduler.can_run_ahead()
    ahead.add(EngineRequest("b", (1, 2), 2, constraint=IdConstraint(range(VOCAB_SIZE))))
    assert not ahead.scheduler.can_run_ahead(), "a row with a constraint would start"
    ahead.scheduler.remove(ahead.scheduler.waiting[0])
    assert ahead.scheduler.can_run_ahead()
    ahead.scheduler.resolve(ahead.step, {0: 1})
    ahead.add(EngineRequest("c", (5,) * 6, 9))
    ahead.launch()
    ahead.scheduler.advance(ahead.step)
    ahead.scheduler.resolve(ahead.step, {0: 1, 1: 1})
    ahead.launch()
    ahead.scheduler.advance(ahead.step)  # now both need a third block
    assert row.num_pending_tokens == 1
    assert not ahead.scheduler.can_run_ahead(), "the younger row would be preempted"


def test_a_constraint_that_waits_for_a_slot_does_not_hold_the_others() -> None:
    ahead = Ahead(slots=1)
    ahead.add(make_request("a", 6))
    ahead.launch()
    ahead.scheduler.advance(ahead.step)
    ahead.add(EngineRequest("b", (1, 2), 2, constraint=IdConstraint(range(VOCAB_SIZE))))
    assert ahead.scheduler.can_run_ahead()


def test_a_slot_goes_to_the_row_that_waits_longest_and_comes_back() -> None:
    scheduler = Scheduler(BlockPool(32, 4), 2, 0)
    released: list[tuple[str, int]] = []
    scheduler.on_release = lambda row: released.append((row.request.request_id, row.slot))
    rows = [scheduler.add(make_request(name, 3)) for name in "abc"]
    scheduler.schedule()
    assert [row.slot for row in rows] == [0, 1, -1]
    scheduler.remove(rows[0])
    scheduler.schedule()
    assert [row.slot for row in rows] == [-1, 1, 0]
    scheduler.preempt(rows[2])
    scheduler.remove(rows[2])
    assert released == [("a", 0), ("c", 0)]
    scheduler.check_integrity()


def test_a_prompt_takes_smaller_steps_beside_answers() -> None:
    scheduler = Scheduler(BlockPool(64, 4), 3, 12, prefill_chunk_beside_answers=5)
    model = FakeModel(64, 4)

    def step() -> dict[str, int]:
        chosen = scheduler.schedule()
        sampled = model.draw(chosen)
        scheduler.advance(chosen)
        scheduler.resolve(chosen, sampled)
        return {one.row.request.request_id: one.num_tokens for one in chosen}

    scheduler.add(make_request("a", 20, 4))
    assert [step(), step()] == [{"a": 12}, {"a": 8}]
    scheduler.add(EngineRequest("b", (5,) * 30, 1))
    assert [step() for _ in range(6)] == [{"a": 1, "b": 5}] * 3 + [{"b": 12}, {"b": 3}, {}]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Setup, "runs_ahead", True)


@pytest.mark.usefixtures("ahead")
def test_the_next_step_is_launched_before_a_result_is_taken() -> None:
    with running() as setup:
        computed_at: list[tuple[int, int]] = []
        answer = Answer()

        def listener(output: StepOutput) -> None:
            computed_at.append((output.num_generated, setup.model.num_steps))
            answer(output)

        setup.engine.submit(request("a", max_tokens=5), listener)
        answer.end()
        assert setup.model.most_flying == 2
        assert computed_at == [(number, number) for number in range(1, 6)], "a token waits for no later step"
        assert setup.model.num_steps == 5, "and none is computed behind the last"


@pytest.mark.usefixtures("ahead")
def test_an_eos_id_costs_one_step() -> None:
    ids = alone(request("a", max_tokens=9))
    place = next(place for place in range(1, 9) if ids[place] not in ids[:place])
    with running() as setup:
        answer = setup.submit(request("a", max_tokens=20, eos=frozenset([ids[place]])))
        assert answer.end().finish_reason == "stop"
        assert answer.token_ids == ids[:place]
        eventually(lambda: not setup.model.num_flying)
        assert setup.model.num_steps == place + 2
        assert setup.submit(request("b", (5, 6))).end().finish_reason == "length"


@pytest.mark.usefixtures("ahead")
def test_rows_with_a_constraint_are_not_run_ahead_of() -> None:
    with running() as setup:
        setup.submit(request("a", max_tokens=6, constraint=IdConstraint(range(VOCAB_SIZE)))).end()
        assert setup.model.most_flying == 1
        setup.model.gate.clear()
        free = setup.submit(request("free", max_tokens=30))
        bound = setup.submit(request("bound", (4, 5), max_tokens=3, constraint=IdConstraint(range(VOCAB_SIZE))))
        setup.model.gate.set()
        assert bound.end().finish_reason == free.end().finish_reason == "length"
        assert free.token_ids == alone(request("free", max_tokens=30))
        assert setup.model.most_flying == 2, "it runs ahead again"


@pytest.mark.usefixtures("ahead")
def test_a_cancel_is_heard_while_a_step_is_under_way() -> None:
    with running() as setup:
        setup.model.gate.clear()
        answer = setup.submit(request("a", max_tokens=30))
        assert setup.model.entered.wait(WAIT)
        setup.engine.cancel("a")
        setup.model.gate.set()
        end = answer.end()
        assert (end.finish_reason, end.num_generated) == ("cancelled", len(answer.token_ids))
        assert len(answer.token_ids) <= 1
        assert setup.engine.stats().kv_blocks_used == 0


@pytest.mark.usefixtures("ahead")
def test_close_publishes_the_step_under_way() -> None:
    setup = Setup()
    setup.model.gate.clear()
    answer = setup.submit(request("a", max_tokens=30))
    assert setup.model.entered.wait(WAIT)
    closing = threading.Thread(target=setup.engine.close)
    closing.start()
    time.sleep(0.05)
    setup.model.gate.set()
    closing.join(WAIT)
    assert (answer.end().finish_reason, answer.end().num_generated) == ("cancelled", len(answer.token_ids))
    assert answer.token_ids == alone(request("a", max_tokens=30))[: len(answer.token_ids)] != []
    assert setup.model.num_flying == 0


@pytest.mark.usefixtures("ahead")
@pytest.mark.parametrize("seed", range(4))
def test_random_clients_get_what_they_get_alone(seed: int) -> None:
    """Cancels, EOS ids, constraints, preemption and shared prefixes at once."""
    dice = random.Random(seed)
    with running(slots=1 + seed * 2, num_blocks=16, chunk=(0, 5, 9, 3)[seed]) as setup:
        asked: list[tuple[EngineRequest, Answer, bool]] = []
        for number in range(120):
            prompt = [*range(1, 1 + dice.randrange(9)), dice.randrange(VOCAB_SIZE)]
            constraint = IdConstraint(range(VOCAB_SIZE)) if dice.random() < 0.1 else None
            eos = frozenset([dice.randrange(VOCAB_SIZE)]) if dice.random() < 0.5 else frozenset()
            one = request(str(number), prompt, dice.randint(1, 14), eos, constraint=constraint)
            asked.append((one, setup.submit(one), dice.random() < 0.2))
            if dice.random() < 0.5:
                time.sleep(dice.random() * 0.002)
            if asked[-1][2]:
                setup.engine.cancel(one.request_id)
        for one, answer, is_cancelled in asked:
            reason = answer.end().finish_reason
            expected = alone(one)
            whole = expected[:-1] if expected[-1] in one.eos_token_ids else expected
            assert reason in ("length", "stop") or (is_cancelled and reason == "cancelled")
            assert answer.token_ids == (whole[: len(answer.token_ids)] if reason == "cancelled" else whole)
            assert answer.end().num_generated == len(answer.token_ids) + (reason == "stop")
        eventually(lambda: not setup.model.num_flying)
        assert setup.model.most_flying == 2
        assert setup.engine.stats().kv_blocks_used == 0
        assert not setup.model.held, "a row left and the runner was not told"
        setup.scheduler.check_integrity()
