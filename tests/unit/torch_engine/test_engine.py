"""The engine thread with a real scheduler; the model alone is a fake."""

from __future__ import annotations

import logging
import threading

import pytest
from engine_setup import WAIT, Answer, eventually, request, running
from fake_model import alone

from pocketllm.backends.base import EngineRequest, StepOutput
from pocketllm.errors import ConfigurationError, PocketLLMError

pytestmark = pytest.mark.usefixtures("either_runner")


def test_an_answer_arrives_in_order_and_ends_once() -> None:
    with running() as setup:
        answer = setup.submit(request("a", max_tokens=5))
        assert answer.end().finish_reason == "length"
        assert answer.token_ids == alone(request("a", max_tokens=5))
        assert [output.num_generated for output in answer.outputs] == [1, 2, 3, 4, 5]
        assert [output.finish_reason for output in answer.outputs[:-1]] == [None] * 4


def test_eos_is_counted_and_left_out() -> None:
    ids = alone(request("a", max_tokens=9))
    with running() as setup:
        answer = setup.submit(request("a", max_tokens=9, eos=frozenset(ids[:1])))
        assert answer.end() == StepOutput("a", (), 1, "stop")


def test_a_request_id_may_be_used_again_after_its_end() -> None:
    with running() as setup:
        setup.submit(request("a")).end()
        assert setup.submit(request("a")).end().finish_reason == "length"


def test_a_duplicate_of_an_active_id_is_refused_in_one_line() -> None:
    with running() as setup:
        setup.model.gate.clear()
        first = setup.submit(request("a"))
        with pytest.raises(ConfigurationError, match="\"request_id\" = 'a' belongs to a request that is still active") as caught:
            setup.submit(request("a"))
        assert caught.value.param == "request_id"
        assert "\n" not in str(caught.value)
        setup.model.gate.set()
        assert first.end().finish_reason == "length", "the first request is not touched"


@pytest.mark.parametrize(
    ("wrong", "param"),
    [
        (request("a", prompt=()), "prompt"),
        (request("a", max_tokens=0), "max_tokens"),
        (request("a", max_tokens=-3), "max_tokens"),
        (request("a", max_tokens=64 * 4 - 2), "max_tokens"),
        (request("a", prompt=range(64 * 4)), "max_tokens"),
    ],
)
def test_a_request_that_could_not_run_is_refused(wrong: EngineRequest, param: str) -> None:
    with running() as setup:
        with pytest.raises(ConfigurationError) as caught:
            setup.submit(wrong)
        assert caught.value.param == param
        assert "\n" not in str(caught.value)
        assert setup.submit(request("a")).end().finish_reason == "length"


def test_a_request_may_fill_the_whole_cache() -> None:
    with running(num_blocks=3) as setup:
        answer = setup.submit(request("a", prompt=range(5), max_tokens=7))
        assert answer.end().finish_reason == "length"
        assert answer.token_ids == alone(request("a", prompt=range(5), max_tokens=7))


def test_cancel_a_running_row() -> None:
    with running() as setup:
        answer = Answer()

        def cancel_at_three(output: StepOutput) -> None:
            answer(output)
            if output.num_generated == 3:
                assert setup.engine.cancel("a") == (output.finish_reason is None)

        setup.engine.submit(request("a", max_tokens=200), cancel_at_three)
        other = setup.submit(request("b", (4, 5), max_tokens=50))
        assert answer.end() == StepOutput("a", (), 3, "cancelled")
        assert answer.token_ids == alone(request("a", max_tokens=3))
        assert other.end().finish_reason == "length"
        assert other.token_ids == alone(request("b", (4, 5), max_tokens=50))
        assert setup.engine.stats().kv_blocks_used == 0


def test_cancel_a_waiting_row() -> None:
    with running(slots=1) as setup:
        setup.model.gate.clear()
        first = setup.submit(request("a"))
        assert setup.model.entered.wait(WAIT)
        waiting = setup.submit(request("b"))
        assert setup.engine.cancel("b")
        setup.model.gate.set()
        assert waiting.end() == StepOutput("b", (), 0, "cancelled")
        assert first.end().finish_reason == "length"


def test_cancel_twice_ends_once_and_spares_the_next_of_that_id() -> None:
    with running() as setup:
        setup.model.gate.clear()
        answer = setup.submit(request("a", max_tokens=1))
        assert setup.model.entered.wait(WAIT)
        assert setup.engine.cancel("a")
        assert setup.engine.cancel("a")
        setup.model.gate.set()
        assert answer.end().finish_reason == "length", "it finished in the step under way"
        assert setup.submit(request("a", max_tokens=3)).end().finish_reason == "length"


def test_cancel_of_an_unknown_or_finished_id_is_false() -> None:
    with running() as setup:
        assert not setup.engine.cancel("nobody")
        setup.submit(request("a")).end()
        assert not setup.engine.cancel("a")


def test_a_failing_listener_ends_only_its_row(caplog: pytest.LogCaptureFixture) -> None:
    with running() as setup, caplog.at_level(logging.ERROR):
        calls: list[StepOutput] = []

        def broken(output: StepOutput) -> None:
            calls.append(output)
            raise ValueError("the listener is broken")

        setup.engine.submit(request("bad", max_tokens=200), broken)
        good = setup.submit(request("good", max_tokens=60))
        assert good.end().finish_reason == "length"
        assert good.token_ids == alone(request("good", max_tokens=60))
        eventually(lambda: calls[-1].finish_reason == "cancelled")
        assert len(calls) < 200
        assert setup.engine.health().state == "ready"
        assert "The listener of request bad failed" in caplog.text


def test_a_row_that_is_not_finite_fails_alone() -> None:
    with running(nan_token=99) as setup:
        setup.model.gate.clear()
        good = setup.submit(request("good", (1, 2), max_tokens=9))
        bad = setup.submit(request("bad", (1, 99), max_tokens=9))
        last = setup.submit(request("last", (3, 2), max_tokens=9))
        setup.model.gate.set()
        end = bad.end()
        assert (end.finish_reason, end.token_ids, end.num_generated) == ("error", (), 0)
        assert isinstance(end.error, PocketLLMError)
        for name, prompt, answer in (("good", (1, 2), good), ("last", (3, 2), last)):
            assert answer.end().finish_reason == "length"
            assert answer.token_ids == alone(request(name, prompt, max_tokens=9))
        assert setup.engine.health().state == "ready"
        assert setup.engine.stats().kv_blocks_used == 0


def test_stats_count_prompts_tokens_and_cache_hits() -> None:
    with running() as setup:
        setup.submit(request("a", range(9), max_tokens=3)).end()
        hit = setup.submit(request("b", range(9), max_tokens=2))
        hit.end()
        assert [output.cached_tokens for output in hit.outputs] == [8, 8]
        stats = setup.engine.stats()
        assert (stats.prompt_tokens, stats.generated_tokens, stats.cached_tokens) == (18, 5, 8)
        assert (stats.running, stats.waiting, stats.kv_blocks_used, stats.kv_blocks_total) == (0, 0, 0, 64)
        assert stats.preemptions == 0


def test_stats_show_running_and_waiting_rows() -> None:
    with running(slots=2) as setup:
        setup.model.gate.clear()
        answers = [setup.submit(request(name)) for name in "abc"]
        assert setup.model.entered.wait(WAIT)
        eventually(lambda: setup.engine.stats().running > 0)
        stats = setup.engine.stats()
        assert stats.running + stats.waiting == 3
        assert stats.kv_blocks_used >= 1
        setup.model.gate.set()
        for answer in answers:
            answer.end()


def test_preemptions_are_counted_and_change_no_answer() -> None:
    with running(num_blocks=6) as setup:
        setup.model.gate.clear()
        requests = [request(str(place), (place, 2, 3), max_tokens=12) for place in range(5)]
        answers = [setup.submit(one) for one in requests]
        setup.model.gate.set()
        for one, answer in zip(requests, answers, strict=True):
            answer.end()
            assert answer.token_ids == alone(one)
        assert setup.engine.stats().preemptions > 0


def test_many_threads_submit_and_cancel() -> None:
    with running(slots=5, num_blocks=40, chunk=6) as setup:
        failures: list[str] = []

        def client(number: int) -> None:
            for turn in range(8):
                one = request(f"{number}/{turn}", (number, turn, 1, 2, 3, 4, 5)[: 2 + turn % 6], max_tokens=1 + (number + turn) % 9)
                answer = setup.submit(one)
                cancels = (number + turn) % 4 == 0 and setup.engine.cancel(one.request_id)
                reason = answer.end().finish_reason
                whole = alone(one)
                if reason != "length" and not (cancels and reason == "cancelled"):
                    failures.append(f"{one.request_id} ended with {reason}")
                if answer.token_ids != whole[: len(answer.token_ids)] or (reason == "length" and len(answer.token_ids) < len(whole)):
                    failures.append(f"{one.request_id} gave {answer.token_ids}, not {whole}")

        threads = [threading.Thread(target=client, args=(number,)) for number in range(12)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        assert failures == []
        stats = setup.engine.stats()
        assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
        setup.scheduler.check_integrity()
