"""The embedded model behind `python -m pocketllm serve`, as its users' programs meet it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.chat_template import load_chat_template
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.conformance.llama_oracle import Oracle
from tests.server_process import gauge, serve, wait_until_ready

CONTEXT = 2048
FRANCE: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
STORY: list[Any] = [{"role": "user", "content": "Tell me a very long story about a sailor, a lighthouse and a storm. Do not stop early."}]
TOPICS = ("rivers", "bread", "the moon", "trains", "bees", "glass", "winter", "music")


@pytest.fixture(scope="module")
def url(default_model: Path) -> Iterator[str]:
    server = serve("--model", default_model, "--max-batch-size", 8, "--max-model-len", CONTEXT)
    try:
        yield wait_until_ready(server)
        assert not [line for line in server.lines if "Traceback" in line]
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def tokenizer(default_model: Path) -> Tokenizer:
    return load_tokenizer(open_checkpoint(default_model, "auto"))


def until(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.02)


def is_idle(url: str) -> bool:
    return gauge(url, "num_requests_running") == gauge(url, "num_requests_waiting") == gauge(url, "kv_cache_usage_ratio") == 0


def gap_at_first_difference(oracle: Oracle, tokenizer: Tokenizer, prompt: str, one: str, other: str) -> float:
    """Nats between the float32 oracle's two best tokens where two answers part; 0 where they do not."""
    if one == other:
        return 0.0
    prompt_ids = tokenizer.encode(prompt, add_special_tokens=True)
    first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (one, other))
    place = next((place for place, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    return oracle.best([*prompt_ids, *first[:place]], 1).gaps[0]


def test_chat_names_the_capital_of_france(client: openai.OpenAI) -> None:
    answers = [client.chat.completions.create(model="any", messages=FRANCE, temperature=0) for _ in range(2)]
    text = answers[0].choices[0].message.content
    assert text is not None
    assert "Paris" in text
    assert answers[0].choices[0].finish_reason == "stop"
    assert answers[1].choices[0].message.content == text


def test_chat_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="any", messages=FRANCE, temperature=0, max_tokens=24)
    stream = client.chat.completions.create(model="any", messages=FRANCE, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    parts = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert "".join(parts) == whole.choices[0].message.content
    assert len(parts) > 3
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.model_dump() == whole.usage.model_dump()


def test_completion_stream_is_the_whole_answer(client: openai.OpenAI) -> None:
    whole = client.completions.create(model="any", prompt="Monday, Tuesday, Wednesday,", temperature=0, max_tokens=12)
    stream = client.completions.create(model="any", prompt="Monday, Tuesday, Wednesday,", temperature=0, max_tokens=12, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == whole.choices[0].text
    assert "Thursday" in whole.choices[0].text


def test_usage_counts_the_template_and_the_answer(client: openai.OpenAI, tokenizer: Tokenizer, default_model: Path) -> None:
    template = load_chat_template(open_checkpoint(default_model, "auto"))
    assert template is not None
    prompt = tokenizer.encode(template.render(messages=STORY, add_generation_prompt=True), add_special_tokens=False)
    answer = client.chat.completions.create(model="any", messages=STORY, temperature=0, max_tokens=5)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (len(prompt), 5, len(prompt) + 5)
    assert answer.choices[0].finish_reason == "length"
    text = answer.choices[0].message.content
    assert text is not None
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 5


def test_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def sampled(seed: int) -> str | None:
        return client.chat.completions.create(model="any", messages=STORY, temperature=1.0, seed=seed, max_tokens=24).choices[0].message.content

    first = sampled(7)
    assert sampled(7) == first
    assert sampled(8) != first


def test_models(client: openai.OpenAI, url: str) -> None:
    (model,) = client.models.list()
    assert "SmolLM2-135M-Instruct" in model.id
    assert client.models.retrieve(model.id).id == model.id
    assert httpx.get(f"{url}/v1/models").json()["data"][0]["max_model_len"] == CONTEXT


def test_curl(url: str) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"messages": FRANCE, "temperature": 0, "max_tokens": 16})
    command = [curl, "-sS", "--fail-with-body", "-H", "Content-Type: application/json", "--data", body, f"{url}/v1/chat/completions"]
    whole = json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout)
    assert "Paris" in whole["choices"][0]["message"]["content"]
    command[command.index(body)] = json.dumps({"messages": FRANCE, "temperature": 0, "max_tokens": 16, "stream": True})
    events = subprocess.run([*command, "--no-buffer"], capture_output=True, text=True, timeout=60, check=True).stdout.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events[:-2]]
    assert "".join(delta.get("content") or "" for delta in deltas) == whole["choices"][0]["message"]["content"]


def test_delete_ends_a_stream(client: openai.OpenAI, url: str) -> None:
    stream = client.chat.completions.create(model="any", messages=STORY, stream=True, extra_body={"request_id": "story"})
    next(stream)
    next(stream)
    assert httpx.delete(f"{url}/v1/requests/story").status_code == 200
    with pytest.raises(openai.APIError, match="story was cancelled"):
        list(stream)
    assert httpx.delete(f"{url}/v1/requests/story").status_code == 404
    until(lambda: is_idle(url))


def test_disconnect_frees_the_slot_and_the_kv_blocks(client: openai.OpenAI, url: str) -> None:
    before = gauge(url, 'requests_total{outcome="cancelled"}')
    stream = client.chat.completions.create(model="any", messages=STORY, stream=True)
    next(stream)
    assert gauge(url, "num_requests_running") == 1
    assert gauge(url, "kv_cache_usage_ratio") > 0
    stream.close()
    until(lambda: is_idle(url))
    assert gauge(url, 'requests_total{outcome="cancelled"}') == before + 1


def test_long_prompt_streams(client: openai.OpenAI) -> None:
    text = " ".join(f"Line {number} of the log says that ship {number * 7} has left the port." for number in range(90))
    messages: list[Any] = [{"role": "user", "content": f"{text}\nWhat is this text about?"}]
    chunks = list(
        client.chat.completions.create(model="any", messages=messages, temperature=0, max_tokens=16, stream=True, stream_options={"include_usage": True})
    )
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in chunks) > 3
    usage = chunks[-1].usage
    assert usage is not None
    assert 1500 < usage.prompt_tokens < CONTEXT
    assert 0 < usage.completion_tokens <= 16


@pytest.mark.parametrize(("words", "max_tokens", "stream"), [(CONTEXT + 10, 1, False), (CONTEXT + 10, 1, True), (10, CONTEXT, False)])
def test_context_overflow_is_refused_by_its_code(client: openai.OpenAI, url: str, words: int, max_tokens: int, stream: bool) -> None:
    messages: list[Any] = [{"role": "user", "content": "the " * words}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=messages, max_tokens=max_tokens, stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert str(CONTEXT) in caught.value.message
    assert is_idle(url)


def test_32_streams_at_once_equal_their_solo_answers(client: openai.OpenAI, url: str, oracle: Oracle, tokenizer: Tokenizer) -> None:
    prompts = [f"{number + 2} facts about {TOPICS[number % len(TOPICS)]}, for a child of {number // len(TOPICS) + 6} years:" for number in range(32)]
    deepest_queue = 0

    async def streamed(async_client: openai.AsyncOpenAI, prompt: str) -> tuple[str, str | None, int]:
        stream = await async_client.completions.create(
            model="any", prompt=prompt, temperature=0, max_tokens=24, stream=True, stream_options={"include_usage": True}
        )
        text, reason, tokens = "", None, 0
        async for chunk in stream:
            for choice in chunk.choices:
                text, reason = text + choice.text, choice.finish_reason or reason
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, reason, tokens

    async def all_at_once() -> list[tuple[str, str | None, int]]:
        nonlocal deepest_queue
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as async_client, httpx.AsyncClient() as watcher:
            answers = asyncio.gather(*(streamed(async_client, prompt) for prompt in prompts))
            while not answers.done():
                waiting = (await watcher.get(f"{url}/health")).json()["waiting"]
                deepest_queue = max(deepest_queue, waiting)
                await asyncio.sleep(0.05)
            return await answers

    answers = asyncio.run(all_at_once())
    assert deepest_queue >= 16
    assert len(answers) == 32
    gaps = []
    for prompt, (text, reason, tokens) in zip(prompts, answers, strict=True):
        assert (reason, tokens) == ("length", 24) or (reason == "stop" and tokens <= 24)
        solo = client.completions.create(model="any", prompt=prompt, temperature=0, max_tokens=24)
        gaps.append(gap_at_first_difference(oracle, tokenizer, prompt, solo.choices[0].text, text))
    print(f"{sum(gap > 0 for gap in gaps)} of 32 differ from their solo answers, at gaps of {sorted(gap for gap in gaps if gap > 0)} nats")
    assert max(gaps) <= 0.1
    until(lambda: is_idle(url))


def test_async_client(url: str) -> None:
    async def run() -> str | None:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as async_client:
            answer = await async_client.chat.completions.create(model="any", messages=FRANCE, temperature=0, max_tokens=16)
            return answer.choices[0].message.content

    assert "Paris" in (asyncio.run(run()) or "")


@pytest.mark.parametrize("finishes", [True, False])
def test_sigterm_in_a_stream(default_model: Path, finishes: bool) -> None:
    server = serve("--model", default_model, "--shutdown-timeout", 60 if finishes else 0.2)
    try:
        address = wait_until_ready(server)
        received: list[str] = []
        first = threading.Event()

        def read() -> None:
            body = {"messages": STORY, "stream": True, "temperature": 0, "max_tokens": 40 if finishes else 4000}
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=60) as response:
                for line in response.iter_lines():
                    received.append(line)
                    first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(30)
        os.kill(server.process.pid, signal.SIGTERM)
        reader.join(60)
        assert server.end(60) == 0
    finally:
        server.kill()
    assert not [line for line in server.lines if "Traceback" in line]
    events = [line.removeprefix("data: ") for line in received if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    if finishes:
        assert last["choices"][0]["finish_reason"] == "length"
        assert len(events) > 20
    else:
        assert last["error"]["type"] == "request_cancelled"
