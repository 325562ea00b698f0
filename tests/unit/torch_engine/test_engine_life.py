"""The engine from its build to its end: closing, faults that end it, forks."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import pytest
from engine_setup import WAIT, Answer, GatedModel, Setup, eventually, request, running

from pocketllm.backends.base import EngineStats, StepOutput
from pocketllm.errors import BackendUnavailableError, ConfigurationError
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.engine import Engine
from pocketllm.torch_engine.scheduler import Row, RowUpdate, ScheduledRow, Scheduler

pytestmark = pytest.mark.usefixtures("either_runner")


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
        assert setup.model.closed_after_failure is True
        assert setup.deaths == [health.detail]


def test_an_abandoned_engine_ends_its_rows_though_its_step_never_ends() -> None:
    setup = Setup(slots=1)
    setup.model.gate.clear()
    answers = [setup.submit(request(name, max_tokens=9)) for name in "ab"]
    assert setup.model.entered.wait(WAIT)
    setup.engine.abandon("rank 1 was lost")
    for answer in answers:
        assert str(answer.end().error) == "The engine failed: rank 1 was lost. Restart the server."
    assert setup.engine.health().detail == "rank 1 was lost"
    setup.engine.close()  # it does not wait
    with pytest.raises(BackendUnavailableError, match="The engine is dead: rank 1 was lost"):
        setup.submit(request("c"))
    setup.model.gate.set()  # and if it ends after all, nothing follows
    eventually(lambda: not setup.scheduler.running)
    assert [len(answer.outputs) for answer in answers] == [1, 1]
    assert setup.engine.health().detail == "rank 1 was lost"
    assert setup.model.closed_after_failure is None
    assert setup.deaths == []


def test_no_token_follows_the_error_of_an_abandoned_row() -> None:
    setup = Setup(slots=1)
    heard: list[str | None] = []
    inside, go_on = threading.Event(), threading.Event()

    def listen(output: StepOutput) -> None:
        if not inside.is_set():  # a token is told when the loss comes
            inside.set()
            assert go_on.wait(WAIT)
        heard.append(output.finish_reason)

    setup.engine.submit(request("a", max_tokens=9), listen)
    assert inside.wait(WAIT)
    losing = threading.Thread(target=setup.engine.abandon, args=("rank 1 was lost",))
    losing.start()
    losing.join(0.1)
    go_on.set()
    losing.join(WAIT)
    assert heard[-1] == "error"
    assert heard.count("error") == 1
    eventually(lambda: not setup.scheduler.running)
    assert heard[-1] == "error"


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


def test_a_scheduler_that_fails_leaves_no_row_hanging(either_runner: bool, caplog: pytest.LogCaptureFixture) -> None:
    class BrokenScheduler(Scheduler):
        def resolve(self, step: Sequence[ScheduledRow], sampled: Mapping[int, int]) -> list[RowUpdate]:
            raise RuntimeError("the scheduler is broken")

        def remove(self, row: Row) -> None:
            raise RuntimeError("and does not know its rows")

    model = GatedModel(8, 4, runs_ahead=either_runner)
    engine = Engine(lambda _check_open: (BrokenScheduler(BlockPool(8, 4), 2, 0), model))
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


def test_close_frees_the_model(either_runner: bool) -> None:
    model = GatedModel(8, 4, runs_ahead=either_runner)
    alive = weakref.ref(model)
    made = [(Scheduler(BlockPool(8, 4), 2, 0), model)]
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
