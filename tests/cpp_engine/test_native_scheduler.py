"""QwenBatchScheduler: submits, callbacks, polls, cancels and stops, and what Python may do to it."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.id_constraint import IdConstraint

LONG = {"max_new_tokens": 480, "stop_token_ids": []}
WAIT_MS = 30000


class Answer:
    """Callbacks that collect one request's answer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.steps: list[Any] = []
        self.result: Any = None
        self.started, self.done = threading.Event(), threading.Event()

    def callbacks(self) -> dict[str, Callable[..., None]]:
        return {"callback": self.complete, "on_token": self.token, "on_step": self.steps.append}

    def token(self, request_id: int, token: int) -> None:
        self.tokens.append(token)
        self.started.set()

    def complete(self, result: Any) -> None:
        assert not self.done.is_set()
        self.result = result
        self.done.set()

    def wait(self) -> Any:
        assert self.done.wait(30)
        return self.result


def test_batched_equals_alone(native: Any, engine: Any, prompt_tokens: list[int]) -> None:
    prompts = [prompt_tokens[: 6 + 2 * place] for place in range(7)]
    alone = []
    for prompt in prompts:
        engine.reset()
        alone.append(engine.generate(prompt, 20))
    scheduler = native.QwenBatchScheduler(engine, max_batch_size=4)
    sampling = native.QwenBatchSamplingParams(max_new_tokens=20, stop_token_ids=[])
    ids = [scheduler.submit_request(prompt, sampling) for prompt in prompts]
    assert [scheduler.poll_result(request_id, WAIT_MS).token_ids for request_id in ids] == alone
    stats = scheduler.stats()
    assert (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    assert stats.prompt_tokens == sum(map(len, prompts))
    assert stats.generated_tokens == 7 * 20
    scheduler.stop()
    assert engine.generate(prompts[0], 20) == alone[0]  # the session works again


def test_callbacks_tell_the_same_as_the_result(native: Any, scheduler: Any, prompt_tokens: list[int]) -> None:
    answer = Answer()
    request_id = scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(logprobs=3), **answer.callbacks())
    result = answer.wait()
    assert (result.request_id, result.finish_reason, result.error) == (request_id, "stop", None)
    assert result.token_ids == answer.tokens == [token for step in answer.steps for token in step.token_ids]
    assert result.usage.completion_tokens == len(answer.tokens) + 1 == answer.steps[-1].num_generated
    assert result.usage.prompt_tokens == len(prompt_tokens)
    assert [step.finish_reason for step in answer.steps] == [None] * (len(answer.steps) - 1) + ["stop"]
    assert len(result.logprobs) == len(answer.tokens)
    for token, entry in zip(answer.tokens, result.logprobs, strict=True):
        assert len(entry.top) == 3
        assert entry.top[0] == (token, entry.logprob)
    with pytest.raises(native.Error, match="was submitted with a callback"):
        scheduler.poll_result(request_id)


def test_polls(native: Any, scheduler: Any, prompt_tokens: list[int]) -> None:
    request_id = scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG))
    start = time.monotonic()
    assert scheduler.poll_result(request_id, timeout_ms=0) is None
    assert time.monotonic() - start < 5
    result = scheduler.poll_result(request_id, timeout_ms=-1)
    assert (len(result.token_ids), result.finish_reason) == (480, "length")
    for unknown in (request_id, 10**9):
        with pytest.raises(native.Error, match="has no result to poll") as caught:
            scheduler.poll_result(unknown, timeout_ms=1000)
        assert caught.value.field == "request_id"


def test_a_cached_prompt_is_counted(native: Any, scheduler: Any) -> None:
    prompt, sampling = [place % 300 for place in range(100)], native.QwenBatchSamplingParams(max_new_tokens=4, stop_token_ids=[])
    cold, warm = (scheduler.poll_result(scheduler.submit_request(prompt, sampling), WAIT_MS) for _ in range(2))
    assert cold.usage.cached_tokens == 0
    assert warm.usage.cached_tokens == 96  # whole blocks before the last token
    assert warm.token_ids == cold.token_ids


def test_cancel(native: Any, scheduler: Any, prompt_tokens: list[int]) -> None:
    answer = Answer()
    request_id = scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG), **answer.callbacks())
    assert answer.started.wait(30)
    assert scheduler.cancel(request_id)
    result = answer.wait()
    assert result.finish_reason == "cancelled"
    assert result.token_ids == answer.tokens
    assert len(answer.tokens) < 480
    assert not scheduler.cancel(request_id)
    assert not scheduler.cancel(10**9)


def test_stop_ends_every_request(native: Any, engine: Any, prompt_tokens: list[int]) -> None:
    scheduler = native.QwenBatchScheduler(engine, 2)
    answers = [Answer() for _ in range(5)]
    for answer in answers:
        scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG), **answer.callbacks())
    polled = scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG))
    assert answers[0].started.wait(30)
    scheduler.stop()
    assert [answer.wait().finish_reason for answer in answers] == ["cancelled"] * 5
    assert scheduler.poll_result(polled, WAIT_MS).finish_reason == "cancelled"
    assert scheduler.is_stopped
    scheduler.stop()
    with pytest.raises(native.Error) as caught:
        scheduler.submit_request(prompt_tokens)
    assert caught.value.kind == "unavailable"


def test_exceptions_in_callbacks_go_to_stderr(native: Any, scheduler: Any, prompt_tokens: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    other = Answer()

    def fail(*_arguments: Any) -> None:
        raise SystemExit("a fault in a callback")

    scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(max_new_tokens=3, stop_token_ids=[]), callback=fail, on_token=fail, on_step=fail)
    scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(max_new_tokens=20, stop_token_ids=[]), **other.callbacks())
    assert other.wait().finish_reason == "length"
    said = capfd.readouterr().err
    assert said.count("SystemExit: a fault in a callback") == 7  # 3 tokens, 3 steps, the end
    assert "Exception ignored in on_token of request" in said
    assert "Traceback" in said


def test_a_callback_may_submit_cancel_and_look_but_not_stop(native: Any, scheduler: Any, prompt_tokens: list[int]) -> None:
    second, refused = Answer(), []

    def complete(result: Any) -> None:
        try:
            scheduler.stop()
        except native.Error as error:
            refused.append(str(error))
        assert scheduler.stats().generated_tokens > 0
        request_id = scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG), **second.callbacks())
        assert scheduler.cancel(request_id)

    scheduler.submit_request(prompt_tokens, callback=complete)
    assert second.wait().finish_reason == "cancelled"
    assert refused == ["stop was called from a callback, which runs on the thread that stop waits for: call it from another thread."]


def test_constraints(native: Any, scheduler: Any, prompt_tokens: list[int]) -> None:
    constraint = IdConstraint(lambda accepted: {40 + len(accepted), 140 + len(accepted)}, length=5)
    sampling = native.QwenBatchSamplingParams(constraint=constraint, temperature=1.0, seed=1)
    assert sampling.constraint is constraint
    result = scheduler.poll_result(scheduler.submit_request(prompt_tokens, sampling), WAIT_MS)
    assert (result.finish_reason, result.token_ids) == ("stop", constraint.accepted)
    assert [token % 100 for token in result.token_ids] == [40, 41, 42, 43, 44]


def test_a_constraint_that_fails_ends_its_own_request(native: Any, scheduler: Any, prompt_tokens: list[int]) -> None:
    class Fault(Exception):
        pass

    class Failing:
        is_complete = False

        def fill(self, mask: np.ndarray[Any, Any]) -> None:
            raise Fault("no more")

        def accept(self, token_id: int) -> None:
            raise AssertionError("nothing was drawn")

    failing = scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(constraint=Failing()))
    fine = scheduler.submit_request(prompt_tokens)
    result = scheduler.poll_result(failing, WAIT_MS)
    assert result.finish_reason == "error"
    assert isinstance(result.error, Fault)
    assert scheduler.poll_result(fine, WAIT_MS).finish_reason == "stop"
    assert scheduler.failure is None
    with pytest.raises(TypeError, match="has no fill"):
        native.QwenBatchSamplingParams(constraint=object())


def test_seeds(native: Any, scheduler: Any, prompt_tokens: list[int]) -> None:
    def draw(**more: Any) -> list[int]:
        sampling = native.QwenBatchSamplingParams(max_new_tokens=24, temperature=3.0, stop_token_ids=[], **more)
        return list(scheduler.poll_result(scheduler.submit_request(prompt_tokens, sampling), WAIT_MS).token_ids)

    assert draw(seed=1) == draw(seed=1) != draw(seed=2)
    assert draw() != draw()


def test_a_batch_size_is_clamped_to_the_slots(native: Any, engine: Any) -> None:
    scheduler = native.QwenBatchScheduler(engine, max_batch_size=100)
    assert scheduler.max_batch_size() == scheduler.engine_caps().max_slots == 4
    scheduler.stop()
    with pytest.raises(native.Error) as caught:
        native.QwenBatchScheduler(engine, 0)
    assert caught.value.field == "max_batch_size"


def test_a_scheduler_has_the_engine_to_itself(native: Any, engine: Any, scheduler: Any) -> None:
    for call in (lambda: engine.prefill([1]), lambda: engine.decode_step(1), lambda: engine.generate([1], 1), engine.warmup, engine.reset):
        with pytest.raises(native.Error, match="can't be called while a QwenBatchScheduler runs on this engine"):
            call()
    with pytest.raises(native.Error, match="A QwenBatchScheduler runs on this engine already"):
        native.QwenBatchScheduler(engine)


@pytest.mark.parametrize(
    ("prompt", "change", "field"),
    [
        ([], {}, "prompt_token_ids"),
        ([99999], {}, "prompt_token_ids"),
        ([1], {"max_new_tokens": 0}, "max_tokens"),
        ([1] * 500, {"max_new_tokens": 100}, "max_tokens"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_k": -1}, "top_k"),
        ([1], {"logprobs": 21}, "logprobs"),
    ],
)
def test_requests_that_break_the_terms_are_refused(native: Any, scheduler: Any, prompt: list[int], change: dict[str, Any], field: str) -> None:
    with pytest.raises(native.Error) as caught:
        scheduler.submit_request(prompt, native.QwenBatchSamplingParams(**change))
    assert (caught.value.kind, caught.value.field) == ("configuration", field)
    assert "\n" not in str(caught.value)


def test_names_that_are_none_are_refused(native: Any, scheduler: Any) -> None:
    with pytest.raises(TypeError, match="on_token"):
        scheduler.submit_request([1], on_tokens=print)
    with pytest.raises(TypeError, match='"on_token" = 5 can\'t be called'):
        scheduler.submit_request([1], on_token=5)
    with pytest.raises(TypeError, match="QwenBatchSamplingParams has no field"):
        native.QwenBatchSamplingParams(max_tokens=3)


def test_it_may_be_dropped_while_it_runs(native: Any, checkpoint: str, prompt_tokens: list[int]) -> None:
    """In any order, the last reference of its own callback included."""
    from tests.cpp_engine.conftest import options

    answer = Answer()
    engine = native.QwenEngine(checkpoint, options(native))
    scheduler = native.QwenBatchScheduler(engine)
    del engine
    gc.collect()
    scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG), **answer.callbacks())
    assert answer.started.wait(30)
    del scheduler
    gc.collect()
    assert answer.wait().finish_reason == "cancelled"

    held = [native.QwenBatchScheduler(native.QwenEngine(checkpoint, options(native)))]
    dropped = threading.Event()

    def drop(request_id: int, token: int) -> None:
        held.clear()
        dropped.set()

    last = Answer()
    held[0].submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG), callback=last.complete, on_token=drop)
    assert dropped.wait(30)
    assert last.wait().finish_reason == "cancelled"


def test_what_a_callback_owned_may_be_the_last_to_hold_it(native: Any, checkpoint: str, prompt_tokens: list[int]) -> None:
    """The engine's thread frees the callback of a request that has ended, and with it the scheduler, while another request runs."""
    from tests.cpp_engine.conftest import options

    class Client:
        def __init__(self, engine: Any) -> None:
            self.scheduler = native.QwenBatchScheduler(engine)
            self.scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(**LONG))
            self.scheduler.submit_request(prompt_tokens, native.QwenBatchSamplingParams(max_new_tokens=3, stop_token_ids=[]), callback=self.complete)

        def complete(self, _result: Any) -> None:
            pass

    engine = native.QwenEngine(checkpoint, options(native))
    for _ in range(5):
        Client(engine)
        deadline = time.monotonic() + 30
        while True:  # until the scheduler is gone, and the engine has its session again
            try:
                engine.reset()
                break
            except native.Error:
                assert time.monotonic() < deadline
                time.sleep(0.01)
    assert len(engine.generate(prompt_tokens, 3)) == 3


def in_a_process(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


PREPARE = """
import sys, threading, time
import pocketllm_cpp
engine = pocketllm_cpp.QwenEngine({checkpoint!r}, pocketllm_cpp.QwenEngineOptions(dtype="float32", num_threads=1, max_model_len=512))
sampling = pocketllm_cpp.QwenBatchSamplingParams(max_new_tokens=480, stop_token_ids=[])
started = threading.Event()
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "sys.exit(3)",
        "raise KeyError('at the end')",
        "import atexit; atexit.register(scheduler.stop)",
        "sys.modules[__name__].__dict__['cycle'] = [scheduler]; cycle.append(cycle)",
    ],
)
def test_the_interpreter_ends_while_it_runs(native: Any, checkpoint: str, end: str) -> None:
    run = """
scheduler = pocketllm_cpp.QwenBatchScheduler(engine)
for _ in range(6):
    scheduler.submit_request([1, 2, 3], sampling, callback=lambda result: None, on_token=lambda request_id, token: started.set())
started.wait()
print("running", flush=True)
"""
    done = in_a_process(PREPARE.format(checkpoint=checkpoint) + run + end)
    assert done.stdout == "running\n"
    assert done.returncode == {"sys.exit(3)": 3, "raise KeyError('at the end')": 1}.get(end, 0), done.stderr
    assert ("Traceback" in done.stderr) == end.startswith("raise")


def test_a_callback_drops_the_scheduler_and_its_engine_while_the_interpreter_ends(native: Any, checkpoint: str) -> None:
    run = """
held = [pocketllm_cpp.QwenBatchScheduler(engine)]
del engine
for _ in range(6):
    held[0].submit_request([1, 2, 3], sampling, callback=lambda result: held.clear(), on_token=lambda request_id, token: started.set())
started.wait()
print("running", flush=True)
"""
    done = in_a_process(PREPARE.format(checkpoint=checkpoint) + run)
    assert (done.returncode, done.stdout, done.stderr) == (0, "running\n", "")


def test_the_interpreter_ends_while_a_daemon_thread_generates(native: Any, checkpoint: str) -> None:
    run = """
def forever():
    started.set()
    engine.generate([1, 2, 3], 4000)
threading.Thread(target=forever, daemon=True).start()
started.wait()
time.sleep(0.2)
print("running", flush=True)
left = time.monotonic()
"""
    # Registered before the module's own hook, and so called after it.
    hook = "import atexit, time\natexit.register(lambda: print('waited' if time.monotonic() - left > 4 else 'ended', flush=True))\n"
    done = in_a_process(hook + PREPARE.format(checkpoint=checkpoint).replace("max_model_len=512", "max_model_len=4096") + run)
    assert (done.returncode, done.stdout) == (0, "running\nended\n"), done.stderr


def test_a_fork_refuses_and_ends(native: Any, checkpoint: str) -> None:
    run = """
import os
scheduler = pocketllm_cpp.QwenBatchScheduler(engine)
scheduler.submit_request([1, 2, 3], sampling, on_token=lambda request_id, token: started.set())
started.wait()
child = os.fork()
if child == 0:
    for call in (lambda: scheduler.submit_request([1], sampling), lambda: pocketllm_cpp.QwenBatchScheduler(engine), lambda: engine.prefill([1])):
        try:
            call()
        except pocketllm_cpp.Error as error:
            print(error.kind, flush=True)
    scheduler.stop()
    del scheduler, engine
    sys.exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
scheduler.stop()
"""
    done = in_a_process(PREPARE.format(checkpoint=checkpoint) + run)
    assert (done.returncode, done.stdout) == (0, "unavailable\n" * 3), done.stderr


def test_ctrl_c_ends_a_wait(native: Any, checkpoint: str) -> None:
    run = """
import os, signal
scheduler = pocketllm_cpp.QwenBatchScheduler(engine)
request_id = scheduler.submit_request([1, 2, 3], sampling)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    while True:
        scheduler.poll_result(scheduler.submit_request([1, 2, 3], sampling), -1)
except KeyboardInterrupt:
    print("interrupted")
"""
    done = in_a_process(PREPARE.format(checkpoint=checkpoint) + run)
    assert (done.returncode, done.stdout) == (0, "interrupted\n"), done.stderr
