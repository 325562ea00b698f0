"""The server's test double behaves as a plane does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from pocketllm.backends.base import EngineRequest, StepOutput
from pocketllm.backends.fake import FakeBackend
from pocketllm.errors import ConfigurationError, PocketLLMError
from tests.id_constraint import IdConstraint
from tests.row_listener import WAIT, Listener, run


@contextmanager
def fake(**options: Any) -> Iterator[FakeBackend]:
    backend = FakeBackend(**options)
    backend.load(lambda progress: None)
    try:
        yield backend
    finally:
        backend.close()


def request(name: str = "a", max_tokens: int = 20, **options: Any) -> EngineRequest:
    return EngineRequest(name, (1, 2, 3), max_tokens, **options)


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 100])
def test_scripted_answers_come_in_order_of_submission(tokens_per_step: int) -> None:
    with fake(answers=[[5, 6, 7], [8], []], tokens_per_step=tokens_per_step) as backend:
        answers = run(backend, *(request(name) for name in "abcd"))
    assert [answer.token_ids for answer in answers] == [[5, 6, 7], [8], [], [5, 6, 7]]
    assert [(answer.end().finish_reason, answer.end().num_generated) for answer in answers] == [("stop", 4), ("stop", 2), ("stop", 1), ("stop", 4)]
    assert max(len(output.token_ids) for output in answers[0].outputs) == min(tokens_per_step, 3)


def test_answers_by_function_and_the_budget() -> None:
    def answer(one: EngineRequest) -> Sequence[int]:
        return [len(one.request_id)] * 5

    with fake(answers=answer, tokens_per_step=2) as backend:
        short, exact, cut = run(backend, request("a"), request("bb", 5), request("ccc", 3))
    assert (short.token_ids, short.end().finish_reason) == ([1] * 5, "stop")
    assert (exact.token_ids, exact.end().finish_reason) == ([2] * 5, "length")
    assert (cut.token_ids, cut.end().finish_reason) == ([3] * 3, "length")


def test_an_eos_id_in_a_script_ends_it() -> None:
    with fake(answers=[[5, 6, 9, 7]]) as backend:
        (answer,) = run(backend, request(eos_token_ids=frozenset([9])))
    assert answer.token_ids == [5, 6]
    assert answer.end() == StepOutput("a", (), 3, "stop")


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_steps_of_several_ids_give_the_same_answer(tokens_per_step: int) -> None:
    with fake(eos_after=9) as backend:
        (expected,) = run(backend, request(temperature=1.0, seed=4))
    with fake(eos_after=9, tokens_per_step=tokens_per_step) as backend:
        (answer,) = run(backend, request(temperature=1.0, seed=4))
    assert answer.token_ids == expected.token_ids
    assert answer.end().num_generated == expected.end().num_generated == 10
    assert [output.num_generated for output in answer.outputs] == ([4, 8, 10] if tokens_per_step == 4 else list(range(1, 11)))


@pytest.mark.parametrize("tokens_per_step", [1, 2, 3, 5])
def test_faults_come_after_as_many_tokens_as_asked(tokens_per_step: int) -> None:
    with fake(fail_after=4, tokens_per_step=tokens_per_step) as backend:
        (answer,) = run(backend, request())
        assert (answer.end().finish_reason, len(answer.token_ids), answer.end().num_generated) == ("error", 4, 4)
        assert backend.health().state == "ready"
    with fake(die_after=4, tokens_per_step=tokens_per_step) as backend:
        (answer,) = run(backend, request())
        assert (answer.end().finish_reason, len(answer.token_ids)) == ("error", 4)
        assert backend.health().state == "dead"


@pytest.mark.parametrize("count", [0, 1, 5, 20])
def test_log_probabilities_are_a_distribution_with_the_drawn_id_first(count: int) -> None:
    with fake(alphabet=(97, 98, 99), tokens_per_step=2) as backend:
        assert backend.capabilities.logprobs
        assert backend.capabilities.structured_outputs
        answer, plain = run(backend, request(logprobs=count), request("plain"))
    assert [len(output.logprobs) for output in answer.outputs] == [len(output.token_ids) for output in answer.outputs]
    assert not any(output.logprobs for output in plain.outputs)
    for token_id, entry in zip(answer.token_ids, (entry for output in answer.outputs for entry in output.logprobs), strict=True):
        assert len({other for other, _ in entry.top}) == len(entry.top) == count
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert all(math.isfinite(value) and value <= 0 for value in (entry.logprob, *values))
        assert sum(math.exp(value) for value in values) <= 1
        assert entry.top[:1] == ((token_id, entry.logprob),)[:count]


def test_constraints_are_honoured() -> None:
    with fake(alphabet=(97, 98), answers=[[98, 98, 98]]) as backend:
        allowed = [[98], [97, 50], [50, 40], [9, 50], [8, 7]]
        constraint = IdConstraint(lambda accepted: allowed[len(accepted)])
        (answer,) = run(backend, request(eos_token_ids=frozenset([9]), constraint=constraint))
        assert answer.token_ids == constraint.accepted == [98, 97, 40], "the script, the alphabet, the lowest, and an end where one may be"
        assert (answer.end().finish_reason, answer.end().num_generated) == ("stop", 4)
        complete = IdConstraint(range(90, 100), length=2)
        (answer,) = run(backend, request(constraint=complete))
        assert (answer.end().finish_reason, answer.end().num_generated, len(answer.token_ids)) == ("stop", 2, 2)
        assert answer.token_ids == complete.accepted


def test_an_answer_that_should_end_goes_on_where_the_constraint_allows_no_end() -> None:
    with fake(alphabet=(97, 98), eos_after=1) as backend:
        (answer,) = run(backend, request(eos_token_ids=frozenset([9]), constraint=IdConstraint(lambda accepted: [97, 9] if len(accepted) == 4 else [97])))
    assert (answer.token_ids, answer.end().finish_reason) == ([97] * 4, "stop")


def test_a_constraint_that_fails_ends_its_row() -> None:
    class Broken(IdConstraint):
        def fill(self, mask: Any) -> None:
            raise ConfigurationError("too much work")

    with fake() as backend:
        broken, empty, good = run(
            backend, request("a", constraint=Broken([])), request("b", constraint=IdConstraint([])), request("c", constraint=IdConstraint([4]))
        )
    assert (broken.end().finish_reason, str(broken.end().error)) == ("error", "too much work")
    assert isinstance(empty.end().error, PocketLLMError)
    assert good.token_ids == [4] * 20


@pytest.mark.parametrize("tokens_per_step", [1, 4])
def test_the_clock_is_steady(tokens_per_step: int) -> None:
    with fake(tokens_per_second=200, tokens_per_step=tokens_per_step, max_slots=8) as backend:
        began = time.monotonic()
        run(backend, *(request(str(place), 120) for place in range(8)))
        seconds = time.monotonic() - began
    assert seconds >= 115 / 200
    assert seconds < 120 / 200 + 0.3, "it makes up for what sleeps and steps took"


def test_cancels_of_running_and_waiting_rows() -> None:
    with fake(max_slots=1, tokens_per_second=100) as backend:
        listeners = [Listener() for _ in range(4)]
        for place, listener in enumerate(listeners):
            backend.submit(request(str(place), 900), listener)
        assert backend.cancel("2")
        assert listeners[2].end() == StepOutput("2", (), 0, "cancelled")
        assert not backend.cancel("2")
        assert backend.stats().running == 1
        assert backend.cancel("0")
        assert listeners[0].end().finish_reason == "cancelled"
        with pytest.raises(ConfigurationError, match="active already"):
            backend.submit(request("3"), Listener())
    assert [listener.end().finish_reason for listener in listeners] == ["cancelled"] * 4


def test_many_threads_submit_and_cancel() -> None:
    with fake(max_slots=3) as backend:
        failures: list[str] = []

        def client(number: int) -> None:
            for turn in range(60):
                listener = Listener()
                backend.submit(request(f"{number}/{turn}", 1 + turn), listener)
                cancels = turn % 3 == 0 and backend.cancel(f"{number}/{turn}")
                reason = listener.end().finish_reason
                if reason != "length" and not (cancels and reason == "cancelled"):
                    failures.append(f"{number}/{turn}: {reason}")

        threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert failures == []
        assert (backend.stats().running, backend.stats().waiting) == (0, 0)
