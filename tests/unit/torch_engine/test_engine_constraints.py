"""Rows with constraints and log probabilities in the engine thread; the model alone is a fake."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from typing import NoReturn

import pytest
from engine_setup import WAIT, Answer, Setup, eventually, request, running
from fake_model import VOCAB_SIZE, alone

from pocketllm.backends.base import EngineRequest, StepOutput
from pocketllm.errors import ConfigurationError, PocketLLMError
from tests.id_constraint import IdConstraint

pytestmark = pytest.mark.usefixtures("either_runner")

EVEN = range(0, VOCAB_SIZE, 2)


def mask_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("pocketllm-mask")]


def pending(setup: Setup) -> int:
    return len(setup.engine._masks)


def test_only_allowed_ids_are_drawn_and_each_is_told() -> None:
    with running() as setup:
        constraint = IdConstraint(EVEN)
        answer = setup.submit(request("a", max_tokens=20, constraint=constraint))
        assert answer.end().finish_reason == "length"
        assert len(answer.token_ids) == 20
        assert set(answer.token_ids) <= set(EVEN)
        assert constraint.accepted == answer.token_ids
        assert constraint.num_fills == 20, "one mask a token, and none behind the last"
        assert pending(setup) == 0


def test_masks_are_filled_beside_the_engine_thread() -> None:
    with running() as setup:
        constraint = IdConstraint(EVEN)
        setup.submit(request("a", constraint=constraint)).end()
        assert all(name.startswith("pocketllm-mask") for name in constraint.fill_threads)


def test_a_mask_is_under_way_before_the_device_is_asked() -> None:
    with running() as setup:
        setup.model.gate.clear()
        constraint = IdConstraint(EVEN)
        answer = setup.submit(request("a", max_tokens=1, constraint=constraint))
        assert setup.model.entered.wait(WAIT)
        eventually(lambda: constraint.num_fills == 1)
        setup.model.gate.set()
        assert answer.end().finish_reason == "length"


def test_rows_without_constraint_start_no_thread() -> None:
    with running() as setup:
        setup.submit(request("a", logprobs=3)).end()
        assert mask_threads() == []


def test_a_complete_constraint_ends_the_row_with_its_last_token() -> None:
    with running() as setup:
        constraint = IdConstraint(EVEN, length=3)
        answer = setup.submit(request("a", max_tokens=20, constraint=constraint))
        end = answer.end()
        assert (end.finish_reason, end.num_generated, len(end.token_ids)) == ("stop", 3, 1)
        assert answer.token_ids == constraint.accepted
        assert constraint.num_fills == 3


def test_complete_at_the_budget_is_stop() -> None:
    with running() as setup:
        assert setup.submit(request("a", max_tokens=3, constraint=IdConstraint(EVEN, length=3))).end().finish_reason == "stop"


def test_an_eos_id_ends_the_row_and_is_not_told() -> None:
    with running() as setup:
        constraint = IdConstraint(lambda accepted: [9] if len(accepted) == 2 else [4, 5])
        answer = setup.submit(request("a", max_tokens=20, eos=frozenset([9]), logprobs=0, constraint=constraint))
        assert answer.end() == StepOutput("a", (), 3, "stop")
        assert constraint.accepted == answer.token_ids
        assert len(answer.token_ids) == 2
        assert pending(setup) == 0


class Broken(IdConstraint):
    """Raises `error` in `fill` or in `accept`, at the third token."""

    def __init__(self, place: str, error: BaseException) -> None:
        super().__init__(EVEN)
        self.place, self.error = place, error

    def fill(self, mask: object) -> None:
        if self.place == "fill" and len(self.accepted) == 2:
            raise self.error
        super().fill(mask)  # type: ignore[arg-type]

    def accept(self, token_id: int) -> None:
        if self.place == "accept" and len(self.accepted) == 2:
            raise self.error
        super().accept(token_id)

    @property
    def is_complete(self) -> bool:
        if self.place == "is_complete" and len(self.accepted) == 2:
            raise self.error
        return False


class Panic(BaseException):
    """As a native module's panic, which is no Exception."""


@pytest.mark.parametrize("error", [ConfigurationError("too much work", param="response_format"), ValueError("broken"), Panic("panic")])
@pytest.mark.parametrize("place", ["fill", "accept", "is_complete"])
def test_a_constraint_that_fails_ends_its_row_alone(place: str, error: BaseException) -> None:
    with running() as setup:
        setup.model.gate.clear()
        good = setup.submit(request("good", (1, 2), max_tokens=9))
        bad = setup.submit(request("bad", (5, 6), max_tokens=9, logprobs=2, constraint=Broken(place, error)))
        other = IdConstraint(EVEN)
        last = setup.submit(request("last", (3, 2), max_tokens=9, constraint=other))
        setup.model.gate.set()
        end = bad.end()
        published = 1 if place == "is_complete" else 2
        assert (end.finish_reason, end.token_ids, end.num_generated, end.logprobs) == ("error", (), published, ())
        assert end.error is error
        assert good.end().finish_reason == last.end().finish_reason == "length"
        assert good.token_ids == alone(request("good", (1, 2), max_tokens=9))
        assert last.token_ids == other.accepted
        assert setup.engine.health().state == "ready"
        assert setup.engine.stats().kv_blocks_used == pending(setup) == 0


def test_a_mask_without_ids_is_an_error() -> None:
    with running() as setup:
        end = setup.submit(request("a", constraint=IdConstraint([]))).end()
        assert end.finish_reason == "error"
        assert isinstance(end.error, PocketLLMError)


def test_a_row_that_is_not_finite_drops_its_mask() -> None:
    with running(nan_token=99, chunk=2) as setup:
        end = setup.submit(request("a", (1, 2, 99, 4), constraint=IdConstraint(EVEN))).end()
        assert end.finish_reason == "error"
        eventually(lambda: pending(setup) == 0)


def test_nothing_calls_the_constraint_of_a_cancelled_row() -> None:
    with running(slots=1) as setup:
        setup.model.gate.clear()
        constraints = [IdConstraint(EVEN, seconds=0.05) for _ in range(6)]
        answers = [setup.submit(request(str(place), max_tokens=50, constraint=one)) for place, one in enumerate(constraints)]
        assert setup.model.entered.wait(WAIT)
        for place in range(6):
            assert setup.engine.cancel(str(place))
        setup.model.gate.set()
        ends = [answer.end().finish_reason for answer in answers]
        now = time.monotonic()
        assert ends == ["cancelled"] * 6
        time.sleep(0.2)
        assert max(one.last_call for one in constraints) <= now + 0.04
        assert pending(setup) == 0


def test_a_preempted_row_keeps_its_constraint() -> None:
    with running(num_blocks=6) as setup:
        setup.model.gate.clear()
        constraints = [IdConstraint(EVEN, length=11) for _ in range(5)]
        answers = [setup.submit(request(str(place), (place, 2, 3), max_tokens=12, constraint=one)) for place, one in enumerate(constraints)]
        setup.model.gate.set()
        assert [answer.end().finish_reason for answer in answers] == ["stop"] * 5
        assert setup.engine.stats().preemptions > 0
        for place, (answer, constraint) in enumerate(zip(answers, constraints, strict=True)):
            assert answer.token_ids == constraint.accepted
            assert constraint.num_fills == 11, "its tokens were computed again and not drawn again"
            by_itself = IdConstraint(EVEN, length=11)
            with running() as other:
                other.submit(request("x", (place, 2, 3), max_tokens=12, constraint=by_itself)).end()
            assert by_itself.accepted == constraint.accepted


@pytest.mark.parametrize("ending", ["close", "death"])
def test_the_end_of_the_engine_ends_masks_and_threads(ending: str, either_runner: bool, caplog: pytest.LogCaptureFixture) -> None:
    setup = Setup(slots=2, **({"fail_at_step": 2} if ending == "death" else {}))
    setup.model.gate.clear()
    constraints = [IdConstraint(EVEN, seconds=0.02) for _ in range(20)]
    answers = [setup.submit(request(str(place), max_tokens=200, constraint=one)) for place, one in enumerate(constraints)]
    assert setup.model.entered.wait(WAIT)
    with caplog.at_level("CRITICAL"):
        setup.model.gate.set()
        if ending == "close":
            setup.engine.close()
        reasons = {answer.end().finish_reason for answer in answers}
        setup.engine.close()
    assert reasons == {"cancelled" if ending == "close" else "error"}
    assert pending(setup) == 0
    assert mask_threads() == []
    waits_for_masks = either_runner and ending == "death"  # the step that fails was launched with its masks
    assert sum(one.num_fills for one in constraints) <= (22 if waits_for_masks else 20), "what had not begun never ran"


def test_a_system_without_threads_fails_the_row_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_arguments: object) -> NoReturn:
        raise RuntimeError("can't start new thread")

    with running() as setup:
        monkeypatch.setattr(setup.engine._masks._pool, "submit", refuse)
        end = setup.submit(request("a", constraint=IdConstraint(EVEN))).end()
        assert end.finish_reason == "error"
        assert str(end.error) == "can't start new thread"
        assert setup.submit(request("b")).end().finish_reason == "length"


def test_a_finished_row_lets_go_of_its_constraint() -> None:
    with running() as setup:
        constraint = IdConstraint(EVEN)
        alive = weakref.ref(constraint)
        setup.submit(request("a", constraint=constraint)).end()
        setup.submit(request("b", constraint=IdConstraint(EVEN))).end()
        del constraint
        gc.collect()
        eventually(lambda: alive() is None)


@pytest.mark.parametrize("logprobs", [-1, 21])
def test_logprobs_out_of_range_are_refused(logprobs: int) -> None:
    with running() as setup:
        with pytest.raises(ConfigurationError, match=f'"logprobs" = {logprobs} is not valid') as caught:
            setup.submit(request("a", logprobs=logprobs))
        assert caught.value.param == "logprobs"
        assert setup.submit(request("a", logprobs=20)).end().finish_reason == "length"


def test_log_probabilities_go_with_their_token() -> None:
    with running() as setup:
        answers = [setup.submit(request(name, (place, 2), max_tokens=7, logprobs=asks)) for place, (name, asks) in enumerate([("a", 0), ("b", None), ("c", 1)])]
        for answer, asked in zip(answers, (True, False, True), strict=True):
            answer.end()
            entries = [entry.logprob for output in answer.outputs for entry in output.logprobs]
            assert entries == ([-float(token_id) for token_id in answer.token_ids] if asked else [])


def test_three_hundred_rows_cancelled_at_random_moments_leave_nothing() -> None:
    with running(slots=6, num_blocks=24, chunk=8) as setup:
        failures: list[str] = []

        def client(number: int) -> None:
            delays = random.Random(number)
            for turn in range(30):
                name = f"{number}/{turn}"
                constraint = None if turn % 3 == 0 else IdConstraint(EVEN, length=5 + turn % 20, seconds=0.0005 * (turn % 2))
                one = EngineRequest(
                    name,
                    (number, turn % 11, 3),
                    30,
                    eos_token_ids=frozenset([8]) if turn % 5 == 0 else frozenset(),
                    logprobs=turn % 4 or None,
                    constraint=constraint,
                )
                answer = Answer()
                setup.engine.submit(one, answer)
                time.sleep(delays.random() * 0.01)
                setup.engine.cancel(name)
                if answer.end().finish_reason == "error":
                    failures.append(f"{name}: {answer.end().error}")
                told = None if constraint is None else constraint.accepted
                if told is not None and told != answer.token_ids:
                    failures.append(f"{name}: {told} was told, {answer.token_ids} published")
                if one.logprobs is not None and sum(len(output.logprobs) for output in answer.outputs) != len(answer.token_ids):
                    failures.append(f"{name}: not one entry a token")

        threads = [threading.Thread(target=client, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert failures == []
        stats = setup.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        assert pending(setup) == 0
        setup.scheduler.check_integrity()
    assert mask_threads() == []
