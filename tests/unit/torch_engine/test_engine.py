"""The engine thread with a real scheduler; the model alone is a fake."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, cast

import pytest
from fake_model import FakeModel, alone

from pocketllm.backends.base import EngineRequest, EngineStats, StepOutput
from pocketllm.errors import BackendUnavailableError, ConfigurationError
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.engine import Engine
from pocketllm.torch_engine.model_runner import ModelRunner
from pocketllm.torch_engine.scheduler import Row, RowUpdate, ScheduledRow, Scheduler

WAIT = 20.0


class GatedModel(FakeModel):
    """A fake model that computes a step only once `gate` is set, so that a test can act between steps."""

    def __init__(self, num_blocks: int, block_size: int, **options: int | None) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.gate.set()

    def execute(self, step: Sequence[ScheduledRow]) -> dict[int, int | None]:
        self.entered.set()
        assert self.gate.wait(WAIT)
        return super().execute(step)


class Answer:
    """Listens to one request."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, output: StepOutput) -> None:
        assert not self.ended.is_set(), "something follows a finish"
        self.outputs.append(output)
        self.started.set()
        if output.finish_reason is not None:
            self.ended.set()

    def end(self) -> StepOutput:
        assert self.ended.wait(WAIT), f"no end after {self.outputs}"
        return self.outputs[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]


class Setup:
    """An engine over a small pool."""

    def __init__(self, *, slots: int = 4, num_blocks: int = 64, chunk: int = 0, **model_options: int | None) -> None:
        self.model = GatedModel(num_blocks, 4, **model_options)
        self.scheduler = Scheduler(BlockPool(num_blocks, 4), slots, chunk)
        self.engine = Engine(lambda _check_open: (self.scheduler, cast(ModelRunner, self.model)))
        self.engine.wait_until_built()

    def submit(self, request: EngineRequest) -> Answer:
        answer = Answer()
        self.engine.submit(request, answer)
        return answer


@contextmanager
def running(**options: int | None) -> Iterator[Setup]:
    setup = Setup(**options)  # type: ignore[arg-type]
    try:
        yield setup
    finally:
        setup.model.gate.set()
        setup.engine.close()


def request(name: str, prompt: Sequence[int] = (1, 2, 3), max_tokens: int = 4, eos: frozenset[int] = frozenset()) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), max_tokens, eos_token_ids=eos)


def eventually(holds: object) -> None:
    """Wait until `holds()` is true."""
    deadline = time.monotonic() + WAIT
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)


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
        assert "not finite" in str(end.error)
        for name, prompt, answer in (("good", (1, 2), good), ("last", (3, 2), last)):
            assert answer.end().finish_reason == "length"
            assert answer.token_ids == alone(request(name, prompt, max_tokens=9))
        assert setup.engine.health().state == "ready"
        assert setup.engine.stats().kv_blocks_used == 0


def test_an_exception_in_a_step_ends_every_row_and_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    with running(slots=1, fail_at_step=3) as setup, caplog.at_level(logging.CRITICAL):
        setup.model.gate.clear()
        answers = [setup.submit(request(name, max_tokens=9)) for name in "abc"]
        setup.model.gate.set()
        for answer in answers:
            end = answer.end()
            assert end.finish_reason == "error"
            assert isinstance(end.error, BackendUnavailableError)
            assert "a fault was asked for" in str(end.error)
        assert [len(answer.token_ids) for answer in answers] == [2, 0, 0]
        assert answers[0].end().num_generated == 2
        health = setup.engine.health()
        assert health.state == "dead"
        assert health.detail == "a step failed with RuntimeError: a fault was asked for"
        stats = setup.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
        with pytest.raises(BackendUnavailableError, match="The engine is dead: a step failed with RuntimeError"):
            setup.submit(request("d"))
        assert not setup.engine.cancel("a")
        setup.engine.close()
        assert setup.engine.health().state == "dead", "it stays so"


class Unwinding(BaseException):
    """What no `except Exception` catches, as the panics of native modules are."""


def test_even_a_base_exception_does_not_leave_rows_hanging(caplog: pytest.LogCaptureFixture) -> None:
    with running() as setup, caplog.at_level(logging.CRITICAL):
        setup.model.gate.clear()

        def unwinding(output: StepOutput) -> None:
            if output.finish_reason is None:
                raise Unwinding

        setup.engine.submit(request("bad", max_tokens=9), unwinding)
        other = setup.submit(request("good", max_tokens=9))
        setup.model.gate.set()
        assert other.end().finish_reason == "error"
        assert setup.engine.health().state == "dead"


def test_close_cancels_what_is_active() -> None:
    setup = Setup(slots=1)
    setup.model.gate.clear()
    first = setup.submit(request("a", max_tokens=200))
    assert setup.model.entered.wait(WAIT)
    second = setup.submit(request("b"))
    closing = threading.Thread(target=setup.engine.close)
    closing.start()
    eventually(lambda: refuses(setup))
    assert setup.engine.health().state == "ready", "the step is still under way"
    setup.model.gate.set()
    closing.join(WAIT)
    assert not closing.is_alive()
    assert first.end().finish_reason == "cancelled"
    assert second.end() == StepOutput("b", (), 0, "cancelled")
    assert setup.engine.health().state == "closed"
    stats = setup.engine.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    with pytest.raises(BackendUnavailableError, match="The engine is closed"):
        setup.submit(request("c"))
    setup.engine.close()


def refuses(setup: Setup) -> bool:
    """Whether submit refuses, as it does from the moment that close was called."""
    try:
        setup.submit(request("probe"))
    except BackendUnavailableError as error:
        return str(error) == "The engine is closing: it takes no more requests."
    except ConfigurationError:  # the probe before is active
        pass
    return False


def test_close_from_a_listener_does_not_wait_for_itself() -> None:
    setup = Setup()
    answer = Answer()

    def closing(output: StepOutput) -> None:
        setup.engine.close()
        answer(output)

    setup.engine.submit(request("a", max_tokens=200), closing)
    assert answer.end().finish_reason == "cancelled"
    setup.engine.close()
    assert setup.engine.health().state == "closed"


def test_a_scheduler_that_fails_leaves_no_row_hanging(caplog: pytest.LogCaptureFixture) -> None:
    class BrokenScheduler(Scheduler):
        def update(self, step: Sequence[ScheduledRow], sampled: Sequence[int]) -> list[RowUpdate]:
            raise RuntimeError("the scheduler is broken")

        def remove(self, row: Row) -> None:
            raise RuntimeError("and does not know its rows")

    model = GatedModel(8, 4)
    engine = Engine(lambda _check_open: (BrokenScheduler(BlockPool(8, 4), 2, 0), cast(ModelRunner, model)))
    engine.wait_until_built()
    answer = Answer()
    with caplog.at_level(logging.CRITICAL):
        engine.submit(request("a"), answer)
        assert answer.end().finish_reason == "error"
    assert engine.health().state == "dead"
    engine.close()


def test_what_build_raises_is_raised_and_the_engine_is_dead() -> None:
    def build(_check_open: Callable[[], None]) -> NoReturn:
        raise ConfigurationError("the file is broken")

    engine = Engine(build)
    with pytest.raises(ConfigurationError, match="the file is broken"):
        engine.wait_until_built()
    assert engine.health().state == "dead"
    assert engine.stats() == EngineStats()
    with pytest.raises(BackendUnavailableError, match="The engine is dead: the model could not be loaded: the file is broken"):
        engine.submit(request("a"), Answer())
    engine.close()


def test_close_ends_a_build_at_its_next_check() -> None:
    entered = threading.Event()

    def build(check_open: Callable[[], None]) -> NoReturn:
        entered.set()
        deadline = time.monotonic() + WAIT
        while time.monotonic() < deadline:
            check_open()
            time.sleep(0.001)
        raise AssertionError("nobody closed the engine")

    engine = Engine(build)
    assert entered.wait(WAIT)
    assert engine.health().state == "loading"
    assert engine.stats() == EngineStats()
    with pytest.raises(BackendUnavailableError, match="The engine is loading"):
        engine.submit(request("a"), Answer())
    engine.close()
    with pytest.raises(BackendUnavailableError, match="closed while the model loaded"):
        engine.wait_until_built()
    assert engine.health().state == "closed"


def test_close_frees_the_model() -> None:
    model = GatedModel(8, 4)
    alive = weakref.ref(model)
    made = [(Scheduler(BlockPool(8, 4), 2, 0), cast(ModelRunner, model))]
    engine = Engine(lambda _check_open: made.pop())
    engine.wait_until_built()
    del model
    answer = Answer()
    engine.submit(request("a"), answer)
    assert answer.end().finish_reason == "length"
    assert alive() is not None
    engine.close()
    gc.collect()
    assert alive() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_fork_is_told_that_it_has_no_engine() -> None:
    with running() as setup:
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                setup.submit(request("a"))
            except BackendUnavailableError as error:
                setup.engine.close()
                os.write(write, f"{error} {setup.engine.cancel('a')}".encode())
            os._exit(0)
        os.close(write)
        with open(read, "rb") as pipe:
            assert pipe.read() == b"The engine did not come along into this process, a fork of the one that loaded the model: load it here. False"
        os.waitpid(child, 0)
        assert setup.submit(request("a")).end().finish_reason == "length"


def test_an_idle_engine_closes() -> None:
    setup = Setup()
    setup.engine.close()
    assert setup.engine.health().state == "closed"


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
