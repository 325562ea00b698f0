"""`pocketllm serve --backend cpp` on the trained checkpoint, through the openai client: answers that only a working engine gives."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.cpp_engine.conftest import TRAINED
from tests.server_process import gauge, serve, wait_until_ready

SUM: list[Any] = [{"role": "user", "content": "What is 17+25?"}]
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer", "description": "First number"}, "b": {"type": "integer", "description": "Second number"}},
            "required": ["a", "b"],
        },
    },
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def url(native: Any) -> Iterator[str]:
    server = serve("--model", TRAINED, "--backend", "cpp", "--dtype", "float32", "--max-batch-size", 4, "--max-model-len", 4096)
    try:
        yield wait_until_ready(server)
        assert not [line for line in server.lines if "Traceback" in line]
    finally:
        server.kill()


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: openai.OpenAI, messages: list[Any], **options: Any) -> Any:
    return client.chat.completions.create(**{"model": "m", "messages": messages, "max_tokens": 200, "temperature": 0, **options})


def test_a_sum(client: openai.OpenAI) -> None:
    answer = ask(client, SUM)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("42", "stop")
    assert answer.usage.completion_tokens > 1  # the end of the turn is counted
    streamed = ask(client, SUM, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed if chunk.choices) == "42"


def test_a_tool_call_and_its_result(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "What is 131+256?"}]
    turn = ask(client, messages, tools=[ADD]).choices[0]
    assert turn.finish_reason == "tool_calls"
    (call,) = turn.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 131, "b": 256})
    messages += [turn.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "387"}]
    answer = ask(client, messages, tools=[ADD]).choices[0]
    assert (answer.message.content, answer.finish_reason) == ("The sum is 387.", "stop")


def test_a_forced_call(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "add"}}
    (call,) = ask(client, [{"role": "user", "content": "Hello"}], tools=[ADD], tool_choice=choice).choices[0].message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "b"}
    assert all(isinstance(value, int) for value in arguments.values())


def test_reasoning_is_split_off(client: openai.OpenAI) -> None:
    message = ask(client, SUM, extra_body={"thinking_mode": "thinking"}).choices[0].message
    assert message.content.strip() == "42"
    assert message.reasoning_content.strip().endswith("17+25=42.")


def test_structured_output(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for temperature in (0, 1.5):
        answer = ask(client, [{"role": "user", "content": "Give name and age of Anna, 31, as JSON."}], response_format=form, temperature=temperature, seed=3)
        person = json.loads(answer.choices[0].message.content)
        assert set(person) == {"name", "age"}
        assert isinstance(person["age"], int)
        assert answer.choices[0].finish_reason == "stop"


def test_log_probabilities(client: openai.OpenAI) -> None:
    choice = ask(client, SUM, logprobs=True, top_logprobs=3).choices[0]
    content = choice.logprobs.content
    assert "".join(entry.token for entry in content) == "42"
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
        assert -0.1 < entry.logprob <= 0  # it is sure of its sum


def test_choices_and_seeds(client: openai.OpenAI) -> None:
    def draw(seed: int) -> list[str]:
        answer = ask(client, [{"role": "user", "content": "Hello"}], n=3, temperature=2.0, seed=seed, max_tokens=12)
        return [choice.message.content for choice in answer.choices]

    first = draw(1)
    assert len(set(first)) == 3
    assert draw(1) == first
    assert draw(2) != first
    greedy = ask(client, SUM, n=3)
    assert [choice.message.content for choice in greedy.choices] == ["42"] * 3
    assert [choice.index for choice in greedy.choices] == [0, 1, 2]


def test_a_stop_sequence(client: openai.OpenAI) -> None:
    choice = ask(client, [{"role": "user", "content": "Count from 1 to 20."}], stop=[", 7"]).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("1, 2, 3, 4, 5, 6", "stop")


def test_a_second_turn_finds_the_first_in_the_cache(client: openai.OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": "Count from 1 to 30."}]
    first = ask(client, messages)
    messages += [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "What is 2+2?"}]
    second = ask(client, messages)
    assert second.choices[0].message.content == "4"
    assert second.usage.prompt_tokens_details.cached_tokens > 0


def test_many_at_once(client: openai.OpenAI) -> None:
    answers: dict[int, str] = {}

    def one(number: int) -> None:
        answers[number] = ask(client, [{"role": "user", "content": f"What is {number}+{number}?"}]).choices[0].message.content

    threads = [threading.Thread(target=one, args=(number,)) for number in range(10, 26)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert answers == {number: str(2 * number) for number in range(10, 26)}


def test_cancellation(url: str, client: openai.OpenAI) -> None:
    body = {"prompt": "la la la la", "max_tokens": 4000, "temperature": 0, "stream": True}  # it sings on for ever
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        request_id = json.loads(next(lines).removeprefix("data: "))["id"]
        assert httpx.delete(f"{url}/v1/requests/{request_id}").status_code == 200
        rest = "\n".join(lines)
    assert "[DONE]" in rest
    assert httpx.delete(f"{url}/v1/requests/{request_id}").status_code == 404
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as stream:
        next(stream.iter_lines())  # and goes away
    deadline = time.monotonic() + 20
    while gauge(url, "num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert ask(client, SUM).choices[0].message.content == "42"


def test_what_it_says_of_itself(url: str) -> None:
    health = httpx.get(f"{url}/health").json()
    assert (health["status"], health["backend"], health["device"], health["max_model_len"]) == ("ready", "cpp", "cpu", 4096)
    assert gauge(url, "prompt_tokens_total") > 0
    (model,) = httpx.get(f"{url}/v1/models").json()["data"]
    assert model["id"] == TRAINED.name


def test_a_context_overflow(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, SUM, max_tokens=5000)
    assert caught.value.code == "context_length_exceeded"
