"""Several choices of one request, and stop sequences: seeds, ends, usage, failures, cancelling."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pocketllm.backends.base import EngineRequest, StepCallback, StepOutput
from pocketllm.backends.fake import FakeBackend
from pocketllm.checkpoint import GenerationDefaults
from pocketllm.errors import BackendUnavailableError, ConfigurationError, PocketLLMError, RequestCancelledError
from pocketllm.generation import GenerationService, choice_seed
from pocketllm.llm import build_requests
from pocketllm.outputs import TokenEvent
from pocketllm.protocol.chat import build_chat_request
from pocketllm.protocol.request import GenerationRequest
from pocketllm.sampling_params import MAX_SEED, SamplingParams
from tests.fake_serving import byte_tokenizer, fake, make_service

Open = Callable[..., GenerationService]


@pytest.fixture
def open_service() -> Iterator[Open]:
    opened: list[GenerationService] = []

    def open_(backend: FakeBackend | None = None, **options: Any) -> GenerationService:
        opened.append(make_service(backend or fake(**options)))
        return opened[-1]

    yield open_
    for service in opened:
        service.close()


def request(prompt: str = "Hello", request_id: str = "a", **sampling: Any) -> GenerationRequest:
    return GenerationRequest(prompt, SamplingParams(**{"max_tokens": 8, "temperature": 1, "seed": 3, **sampling}), request_id)


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_each_choice_is_the_request_of_its_seed_alone(open_service: Open) -> None:
    service = open_service(max_slots=3)
    output = service.stream(request(n=8)).result()
    alone = [service.stream(request(seed=choice_seed(3, index))).result().text for index in range(8)]
    assert [choice.text for choice in output.choices] == alone
    assert len(set(alone)) == 8
    assert output.text == alone[0]
    assert output.usage.as_dict() == {"prompt_tokens": 5, "completion_tokens": 64, "total_tokens": 69}


def test_greedy_choices_are_copies(open_service: Open) -> None:
    output = open_service().stream(request(n=3, temperature=0)).result()
    assert len({choice.text for choice in output.choices}) == 1


def test_choices_without_a_seed_differ(open_service: Open) -> None:
    service = open_service()
    texts = [choice.text for _ in range(3) for choice in service.stream(request(n=3, seed=None, max_tokens=20)).result().choices]
    assert len(set(texts)) == 9


def test_seeds_of_choices_are_in_range_and_apart() -> None:
    for seed in (0, 1, MAX_SEED):
        found = {choice_seed(seed, choice) for choice in range(128)}
        assert len(found) == 128
        assert min(found) >= 0
        assert max(found) <= MAX_SEED
    assert choice_seed(5, 0) == 5
    assert choice_seed(0, 1) == 0xE220A8397B1DCDAF & MAX_SEED  # the first output of SplitMix64 from seed 0, as published


def test_choices_advance_together_on_a_stream(open_service: Open) -> None:
    service = open_service(tokens_per_second=200)

    async def run() -> None:
        texts: dict[int, str] = defaultdict(str)
        ends: dict[int, int] = {}
        usages = []
        order = []
        async for event in service.stream_async(request(n=4)):
            order.append(event.index)
            texts[event.index] += event.text
            if event.finish_reason is not None:
                assert event.index not in ends
                ends[event.index] = len(order)
            usages.append(event.usage)
        assert sorted(ends) == [0, 1, 2, 3]
        assert set(order[:4]) == {0, 1, 2, 3}
        assert usages[-1] is not None
        assert not any(usages[:-1])
        whole = service.stream(request(n=4)).result()
        assert [texts[index] for index in range(4)] == [choice.text for choice in whole.choices]
        assert whole.usage == usages[-1]

    asyncio.run(run())


def test_several_prompts_are_numbered_prompt_by_prompt(open_service: Open) -> None:
    service = open_service()
    output = service.stream(request("Hello", n=2), request("World!", n=2)).result()
    expected = [service.stream(request(prompt, seed=choice_seed(3, choice))).result().text for prompt in ("Hello", "World!") for choice in range(2)]
    assert [choice.text for choice in output.choices] == expected
    assert [choice.index for choice in output.choices] == [0, 1, 2, 3]
    assert output.usage.prompt_tokens == 11


@pytest.mark.parametrize("tokens_per_second", [None, 300])
def test_a_stop_sequence_ends_the_engines_work(open_service: Open, tokens_per_second: float | None) -> None:
    service = open_service(tokens_per_second=tokens_per_second)
    whole = service.stream(request(max_tokens=60)).result().text
    stop = whole[10:13]
    cut = whole.index(stop)
    stream = service.stream(request(max_tokens=60, stop=["never", stop]))
    texts = [event.text for event in stream]
    output = stream.result()
    assert "".join(texts) == output.text == whole[:cut]
    assert output.finish_reason == "stop"
    assert len(output.token_ids) <= output.usage.completion_tokens == service.stats().generated_tokens - 60
    if tokens_per_second:
        assert output.usage.completion_tokens < 30


def test_a_stop_sequence_of_one_choice_leaves_the_others_alone(open_service: Open) -> None:
    service = open_service(tokens_per_second=500)
    free = service.stream(request(n=3, max_tokens=30)).result()
    stop = free.choices[1].text[5:10]
    output = service.stream(request(n=3, max_tokens=30, stop=stop)).result()
    assert [choice.finish_reason for choice in output.choices] == ["length", "stop", "length"]
    assert output.choices[1].text == free.choices[1].text[:5]
    assert [output.choices[k].text for k in (0, 2)] == [free.choices[k].text for k in (0, 2)]


def test_cancelling_cancels_every_choice_and_gives_the_id_free(open_service: Open) -> None:
    service = open_service(tokens_per_second=100, max_slots=2)
    stream = service.stream(request(n=5, max_tokens=500))
    next(stream)
    assert service.cancel("a")
    assert not service.cancel("a")
    with pytest.raises(RequestCancelledError):
        stream.result()
    until(lambda: service.stats().running + service.stats().waiting == 0)
    assert service.stream(request()).result().finish_reason == "length"


def test_one_id_is_one_active_request_whatever_its_choices(open_service: Open) -> None:
    service = open_service(tokens_per_second=100)
    with service.stream(request(n=2, max_tokens=500)), pytest.raises(ConfigurationError, match="is active already"):
        service.stream(request(n=3))


class Moody(FakeBackend):
    """Fails the rows, or refuses to take them, whose ids end so."""

    def __init__(self, failing: tuple[str, ...] = (), refused: tuple[str, ...] = (), **options: Any) -> None:
        super().__init__(alphabet=(97, 98), **options)
        self._failing, self._refused = failing, refused

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        if request.request_id.endswith(self._refused):
            raise BackendUnavailableError("The engine is closing.")
        if request.request_id.endswith(self._failing):
            on_step(StepOutput(request.request_id, (), 0, "error", error=RuntimeError("a fault was asked for")))
        else:
            super().submit(request, on_step)


def collect(stream: Iterator[TokenEvent], events: list[TokenEvent]) -> None:
    for event in stream:
        events.append(event)


def test_a_failing_choice_leaves_the_others_as_the_answer(open_service: Open) -> None:
    service = open_service(Moody(failing=("/1",)))
    output = service.stream(request(n=3)).result()
    assert [choice.index for choice in output.choices] == [0, 2]
    stream = service.stream(request(n=3))
    events: list[TokenEvent] = []
    with pytest.raises(PocketLLMError, match="a fault was asked for"):
        collect(stream, events)
    assert sorted(event.index for event in events if event.finish_reason is not None) == [0, 2]
    assert not any(event.usage for event in events)

    async def run() -> None:
        assert [choice.index for choice in (await service.stream_async(request(n=3)).result()).choices] == [0, 2]

    asyncio.run(run())
    with pytest.raises(PocketLLMError, match="a fault was asked for"):
        open_service(Moody(failing=("/0", "/1"))).stream(request(n=2)).result()


def test_a_choice_that_is_not_taken_cancels_the_others(open_service: Open) -> None:
    service = open_service(Moody(refused=("/2",), tokens_per_second=100))
    with pytest.raises(BackendUnavailableError):
        service.stream(request(n=4, max_tokens=500))
    until(lambda: service.stats().running + service.stats().waiting == 0)
    assert service.stream(request()).result().finish_reason == "length"


def test_what_has_finished_when_time_runs_out(open_service: Open) -> None:
    service = open_service(tokens_per_second=200, max_slots=2)

    async def run() -> None:
        stream = service.stream_async(request(n=5, max_tokens=10))
        await stream.start()
        assert await stream.finished() is None
        seen = 0
        while seen < 2:
            seen += sum(event.finish_reason is not None for event in await stream.next_events())
        found = await stream.finished()
        assert found is not None
        assert [choice.index for choice in found.choices] == [0, 1]
        assert found.usage.completion_tokens >= 20
        await stream.aclose()

    asyncio.run(run())


class Racing(FakeBackend):
    """Calls `meanwhile` just before it takes a row."""

    meanwhile: Callable[[], object]

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        self.meanwhile()
        super().submit(request, on_step)


@pytest.mark.parametrize("n", [1, 3])
def test_a_cancel_that_comes_while_the_rows_are_queued_is_not_lost(open_service: Open, n: int) -> None:
    backend = Racing(tokens_per_second=100)
    service = open_service(backend)
    backend.meanwhile = lambda: service.cancel("a")
    with pytest.raises(RequestCancelledError):
        service.stream(request(n=n, max_tokens=900))
    until(lambda: service.stats().running + service.stats().waiting == 0)
    assert service.stats().generated_tokens < 500
    assert not service.cancel("a")


def test_a_stream_that_is_collected_while_its_request_is_cancelled(open_service: Open) -> None:
    """The garbage collector may run anywhere, so also where the request's own lock is held."""
    service = open_service(tokens_per_second=100)
    stream = service.stream(request(max_tokens=900))
    active = stream._active
    assert active is not None

    class Collecting(dict[int, str]):
        def __iter__(self) -> Iterator[int]:
            gc.collect()
            return super().__iter__()

    active._rows = Collecting(active._rows)
    stream.itself = stream  # type: ignore[attr-defined]  # a cycle, which only the collector frees
    freed = weakref.ref(stream)
    del stream
    thread = threading.Thread(target=active.cancel, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert freed() is None


def test_streams_of_a_closed_loop_are_cancelled_and_the_loop_is_let_go(open_service: Open) -> None:
    service = open_service(tokens_per_second=100)
    loop = asyncio.new_event_loop()
    streams = [service.stream_async(request(request_id=name, max_tokens=900)) for name in "abc"]

    async def begin() -> None:
        for stream in streams:
            await stream.start()

    loop.run_until_complete(begin())
    loop.close()
    until(lambda: service.stats().running + service.stats().waiting == 0)
    freed = weakref.ref(loop)
    del loop, streams[:]

    async def another() -> None:
        assert (await service.stream_async(request(max_tokens=2)).result()).finish_reason == "length"

    asyncio.run(another())
    gc.collect()
    assert freed() is None


def test_an_answer_that_a_stop_sequence_has_ended_outlives_its_row(open_service: Open) -> None:
    output = open_service(fail_after=3, alphabet=(97,)).stream(request(stop="aa")).result()
    assert (output.text, output.finish_reason) == ("", "stop")


def test_tools_that_must_be_called_are_described_without_a_template_too() -> None:
    backend = fake(vocab_size=256)
    backend.load(lambda _progress: None)
    service = GenerationService(backend, byte_tokenizer(), None, GenerationDefaults(), model_name="plain")
    tools = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}]

    def prompt(**options: Any) -> str:
        built = build_chat_request([{"role": "user", "content": "Hi"}], SamplingParams(), tools=tools, **options)
        return bytes(service.prepare([built]).rows[0].prompt_token_ids).decode()

    assert "look_up" in prompt(tool_choice="required")
    assert prompt(tool_choice="required").endswith("user: Hi\nassistant:")
    assert prompt() == "user: Hi\nassistant:"
    service.close()


@pytest.mark.parametrize("request_id", ["a/0", "", 5, "a b"])
def test_an_id_that_generate_is_given_is_checked_as_that_of_a_chat(request_id: Any) -> None:
    """With a slash it could be that of another request's choice."""
    with pytest.raises(ConfigurationError) as caught:
        build_requests("Hi", None, request_id, frozenset())
    with pytest.raises(ConfigurationError) as of_a_chat:
        build_chat_request([{"role": "user", "content": "Hi"}], SamplingParams(), request_id=request_id)
    assert str(caught.value) == str(of_a_chat.value)
    assert caught.value.param == "request_id"
