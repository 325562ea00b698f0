"""GenerationService over the fake backend: streams, cancelling, limits, seeds, failures."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psutil
import pytest

from pocketllm.active_request import Prepared
from pocketllm.answer_reader import AnswerReader
from pocketllm.backends.base import EngineRequest, StepOutput
from pocketllm.config import EngineArgs
from pocketllm.errors import (
    BackendUnavailableError,
    ConfigurationError,
    ContextLengthExceededError,
    PocketLLMError,
    RequestCancelledError,
)
from pocketllm.generation import GenerationService, as_prompts
from pocketllm.llm import build_requests
from pocketllm.protocol.chat import build_chat_request
from pocketllm.protocol.request import GenerationRequest
from pocketllm.sampling_params import SamplingParams
from pocketllm.text.answer import Reading
from pocketllm.token_stream import INLINE_CHARACTERS
from tests.fake_serving import byte_tokenizer, fake, make_service

Open = Callable[..., GenerationService]
LONG = "x" * (INLINE_CHARACTERS + 1)  # prepared on a thread


@pytest.fixture
def open_service() -> Iterator[Open]:
    opened: list[GenerationService] = []

    def open_(*, seed: int | None = None, **options: Any) -> GenerationService:
        opened.append(make_service(fake(**options), seed=seed))
        return opened[-1]

    yield open_
    for service in opened:
        service.close()


def request(prompt: str | tuple[int, ...] = "Hello", request_id: str = "a", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(**{"max_tokens": 8, "temperature": 0, **sampling}), request_id)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_events_join_to_the_output(open_service: Open) -> None:
    service = open_service(eos_after=5)
    events = list(service.stream(request()))
    output = service.stream(request()).result()
    assert "".join(event.text for event in events) == output.text
    assert [token for event in events for token in event.token_ids] == list(output.token_ids)
    assert [event.finish_reason for event in events] == [None] * (len(events) - 1) + ["stop"]
    assert all(event.usage is None for event in events[:-1])
    assert output.usage.as_dict() == {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert (len(output.token_ids), output.finish_reason) == (5, "stop")


def test_async_stream_equals_the_blocking_one(open_service: Open) -> None:
    service = open_service()

    async def run() -> list[str]:
        stream = service.stream_async(request())
        texts = [event.text async for event in stream]
        assert [event async for event in stream] == []
        return texts

    assert "".join(asyncio.run(run())) == service.stream(request()).result().text


def test_incomplete_character_is_held_back_and_then_replaced(open_service: Open) -> None:
    service = open_service(alphabet=[0xF0])
    events = list(service.stream(request(max_tokens=1)))
    assert "".join(event.text for event in events) == "\ufffd"


@pytest.mark.parametrize("close", [False, True])
def test_cancel_while_the_prompt_is_still_being_read(open_service: Open, monkeypatch: pytest.MonkeyPatch, close: bool) -> None:
    service = open_service(context_length=2 * INLINE_CHARACTERS)
    prepare, started, go_on = service.prepare, threading.Event(), threading.Event()

    def slow(asked: Sequence[GenerationRequest]) -> Prepared:
        started.set()
        assert go_on.wait(10)
        return prepare(asked)

    monkeypatch.setattr(service, "prepare", slow)

    async def run() -> None:
        stream = service.stream_async(request(LONG))
        reader = asyncio.ensure_future(stream.result())
        await asyncio.to_thread(started.wait, 10)
        if close:
            await stream.aclose()
        else:
            assert service.cancel("a")
            assert not service.cancel("b")
        go_on.set()
        with pytest.raises(RequestCancelledError):
            await reader
        assert not service.cancel("a")

    asyncio.run(run())
    assert service.stats().generated_tokens == 0


def test_leaving_an_async_loop_cancels(open_service: Open) -> None:
    service = open_service(tokens_per_second=100)

    async def run() -> None:
        async for _ in service.stream_async(request(max_tokens=900)):
            break
        gc.collect()
        await asyncio.to_thread(until, lambda: service.stats().running == 0)

    asyncio.run(run())


@pytest.mark.parametrize(("error", "line"), [(RuntimeError("bad shape\nframe #0: f() + 0x1"), "bad shape"), (RuntimeError(), "RuntimeError")])
def test_a_failure_in_the_engine_is_one_line(error: Exception, line: str) -> None:
    reader = AnswerReader(Prepared("a", (EngineRequest("a", (1,), 1),), 1, Reading(byte_tokenizer())), lambda _index: None)
    reader.read([(0, StepOutput("a", (), 0, "error", error=error))])
    assert str(reader.failure) == f"Request a failed in the engine: {line}"


def test_a_default_budget_refuses_nobody(open_service: Open) -> None:
    service = open_service(context_length=20)
    for default, budget in ((None, 15), (6, 6), (600, 15)):
        assert service.prepare([GenerationRequest("Hello", SamplingParams(), "a", default)]).rows[0].max_tokens == budget
    assert service.prepare([GenerationRequest("Hello", SamplingParams(max_tokens=9), "a", 3)]).rows[0].max_tokens == 9


def test_cancel_from_outside(open_service: Open) -> None:
    service = open_service(tokens_per_second=100)
    stream = service.stream(request(max_tokens=500))
    next(stream)
    assert service.cancel("a")
    with pytest.raises(RequestCancelledError, match="a was cancelled"):
        stream.result()
    assert not service.cancel("a")
    assert list(stream) == []


@pytest.mark.parametrize("how", ["close", "with", "forget"])
def test_early_end_cancels(open_service: Open, how: str) -> None:
    service = open_service(tokens_per_second=100)
    stream = service.stream(request(max_tokens=500))
    next(stream)
    if how == "close":
        stream.close()
    elif how == "with":
        with stream:
            pass
    else:
        del stream
        gc.collect()
    until(lambda: service.stats().running == 0)
    assert service.stats().generated_tokens < 400


@pytest.mark.parametrize("how", ["aclose", "forget", "end of the loop", "task"])
def test_early_end_cancels_async(open_service: Open, how: str) -> None:
    service = open_service(tokens_per_second=100)
    kept: list[Any] = []

    async def run() -> None:
        stream = service.stream_async(request(max_tokens=500))
        if how == "aclose":
            await anext(stream)
            await stream.aclose()
        elif how == "forget":
            await anext(stream)
        elif how == "end of the loop":
            await anext(stream)
            kept.append(stream)
        else:
            task = asyncio.ensure_future(stream.result())
            await asyncio.sleep(0.1)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(run())
    until(lambda: service.stats().running == 0)
    assert service.stats().generated_tokens < 400


def test_closing_a_stream_that_has_ended_spares_the_next_request_of_its_id(open_service: Open) -> None:
    service = open_service(tokens_per_second=200)

    async def run() -> None:
        first, second = service.stream(request()), service.stream_async(request(request_id="b"))
        await second.start()
        until(lambda: service.stats().generated_tokens == 16 and service.stats().running == 0)
        await asyncio.sleep(0.05)  # the last outputs are handed over after the count
        again, async_again = service.stream(request()), service.stream_async(request(request_id="b"))
        await async_again.start()
        first.close()
        await second.aclose()
        assert again.result().finish_reason == "length"
        assert (await async_again.result()).finish_reason == "length"

    asyncio.run(run())


def test_closing_while_the_prompt_is_prepared_submits_nothing(open_service: Open) -> None:
    service = open_service(tokens_per_second=100, context_length=2 * INLINE_CHARACTERS)

    async def run() -> None:
        stream = service.stream_async(request(LONG, max_tokens=500))
        starting = asyncio.ensure_future(stream.start())
        await asyncio.sleep(0)
        await stream.aclose()
        await starting
        assert [event async for event in stream] == []
        with pytest.raises(RequestCancelledError, match="Request a was closed"):
            await stream.result()

    asyncio.run(run())
    assert service.stats().prompt_tokens == service.stats().waiting == 0


def test_result_of_a_closed_stream_is_a_cancelled_request(open_service: Open) -> None:
    stream = open_service(tokens_per_second=100).stream(request(max_tokens=500))
    next(stream)
    stream.close()
    with pytest.raises(RequestCancelledError, match="Request a was closed"):
        stream.result()


def test_refused_duplicate_leaves_the_first_alone(open_service: Open) -> None:
    service = open_service(tokens_per_second=200)
    first = service.stream(request())
    with pytest.raises(ConfigurationError, match='"request_id" = "a" is active already'):
        service.stream(request())
    gc.collect()

    async def refused() -> None:
        stream = service.stream_async(request())
        with pytest.raises(ConfigurationError, match="is active already"):
            await stream.start()
        await stream.aclose()

    asyncio.run(refused())
    assert first.result().usage.completion_tokens == 8
    assert service.stream(request()).result().usage.completion_tokens == 8


def test_failing_row_is_the_only_one_that_fails(open_service: Open) -> None:
    service = open_service(fail_after=4)
    short = service.stream(request(request_id="short", max_tokens=3))
    with pytest.raises(PocketLLMError, match="a failed in the engine: a fault was asked for"):
        service.stream(request()).result()
    assert short.result().finish_reason == "length"
    assert service.health().state == "ready"


def test_dead_engine_fails_all_and_refuses_more(open_service: Open) -> None:
    service = open_service(die_after=4, max_slots=1, tokens_per_second=20)
    streams = [service.stream(request(request_id=str(index))) for index in range(3)]
    for stream in streams:
        with pytest.raises(BackendUnavailableError):
            stream.result()
    assert service.health().state == "dead"
    with pytest.raises(BackendUnavailableError):
        service.stream(request())


def test_close_cancels(open_service: Open) -> None:
    service = open_service(tokens_per_second=50)
    stream = service.stream(request(max_tokens=500))
    service.close()
    with pytest.raises(RequestCancelledError):
        stream.result()
    with pytest.raises(BackendUnavailableError):
        service.stream(request())
    service.close()


def test_more_requests_than_slots_all_finish(open_service: Open) -> None:
    service = open_service(max_slots=2)
    streams = [service.stream(request(prompt=f"number {index}", request_id=str(index))) for index in range(12)]
    solo = [service.stream(request(prompt=f"number {index}")).result().text for index in range(12)]
    assert [stream.result().text for stream in streams] == solo


@pytest.mark.parametrize("prompt", ["", (), (256,), (-1,), (True,)])
def test_prompts_that_are_none(open_service: Open, prompt: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        open_service().prepare([request(prompt)])
    assert caught.value.param == "prompt"


def test_budget_and_context(open_service: Open) -> None:
    service = open_service(context_length=10)
    assert service.prepare([request(max_tokens=5)]).rows[0].max_tokens == 5
    assert service.prepare([request(max_tokens=None)]).rows[0].max_tokens == 5
    with pytest.raises(ContextLengthExceededError, match=r"maximum context length is 10 tokens, and you asked for 11 \(5 in the prompt, 6 for the answer\)"):
        service.prepare([request(max_tokens=6)])
    with pytest.raises(ContextLengthExceededError, match=r"leaves no room .* with a larger max_model_len or kv_cache_memory\."):
        service.prepare([request("0123456789", max_tokens=None)])


def test_defaults_are_resolved(open_service: Open) -> None:
    prepared = open_service().prepare([request(temperature=None, top_k=-1)]).rows[0]
    assert (prepared.temperature, prepared.top_p, prepared.top_k) == (1.0, 1.0, 0)


def test_seeds(open_service: Open) -> None:
    def texts(service: GenerationService, **sampling: Any) -> list[str]:
        return [service.stream(request(temperature=1, max_tokens=20, **sampling)).result().text for _ in range(2)]

    same = texts(open_service(), seed=7)
    assert same[0] == same[1]
    drawn = texts(open_service())
    assert drawn[0] != drawn[1]
    repeatable = texts(open_service(seed=1))
    assert repeatable[0] != repeatable[1]
    assert texts(open_service(seed=1)) == repeatable
    assert texts(open_service(seed=2)) != repeatable


def test_chat_goes_through_the_template_and_falls_back_to_role_content(open_service: Open) -> None:
    service = open_service()
    chat = build_chat_request([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1))
    assert bytes(service.prepare([chat]).rows[0].prompt_token_ids) == b"<user>Hi\n<assistant>"
    service.chat_template = None
    assert bytes(service.prepare([chat]).rows[0].prompt_token_ids) == b"user: Hi\nassistant:"


@pytest.mark.parametrize(
    ("prompts", "found"),
    [
        ("Hi", ["Hi"]),
        ([1, 2], [(1, 2)]),
        (["Hi", "Ho"], ["Hi", "Ho"]),
        ([[1, 2], (3,)], [(1, 2), (3,)]),
        (["Hi", [1]], ["Hi", (1,)]),
        ([], []),
    ],
)
def test_prompt_shapes(prompts: Any, found: list[Any]) -> None:
    assert as_prompts(prompts) == found


@pytest.mark.parametrize("prompts", [[None], None, 5, b"ab", [b"ab"], {"a": 1}])
def test_other_prompt_shapes_are_refused(prompts: Any) -> None:
    with pytest.raises(ConfigurationError, match='"prompt" holds ') as caught:
        as_prompts(prompts)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("params", [{"max_tokens": 5}, [{"max_tokens": 5}], 5, "ab"])
def test_sampling_params_of_another_kind_are_refused(params: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'"sampling_params" = .* is not valid: send a SamplingParams') as caught:
        build_requests("Hi", params, None, frozenset())
    assert caught.value.param == "sampling_params"


def test_no_ranks_are_started_for_a_model_that_is_not_there() -> None:
    with pytest.raises(ConfigurationError, match=r"no/such/model\.gguf"):
        GenerationService.open(EngineArgs(model="./no/such/model.gguf", tensor_parallel_size=2))
    assert psutil.Process().children() == []


def test_a_template_without_a_place_for_tools_is_said_once(open_service: Open, caplog: pytest.LogCaptureFixture) -> None:
    service = open_service()
    tools = [{"type": "function", "function": {"name": "f"}}]
    for _ in range(2):
        service.prepare([build_chat_request([{"role": "user", "content": "Hi"}], SamplingParams(max_tokens=1), tools=tools)])
    assert caplog.text.count("has no place for tools") == 1
