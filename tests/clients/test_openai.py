"""openai-python, with its defaults."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.clients.questions import ASK_ANIMAL, ASK_WEATHER, HELLO, REPORT, WEATHER_TOOL, Animal

HELLO_MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": HELLO}]
WEATHER_MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": ASK_WEATHER}]
ANIMAL_MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": ASK_ANIMAL}]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES)
    (choice,) = answer.choices
    assert choice.finish_reason in ("stop", "length")
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.message.refusal is None
    assert choice.message.tool_calls is None
    assert choice.logprobs is None
    assert answer.model == model_name
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_raw_answer_has_the_keys_of_the_schema(client: openai.OpenAI, model_name: str) -> None:
    raw = client.chat.completions.with_raw_response.create(model=model_name, messages=HELLO_MESSAGES, max_tokens=2)
    choice = json.loads(raw.text)["choices"][0]
    assert choice["logprobs"] is None
    assert choice["message"]["refusal"] is None
    assert raw.request_id


def test_stream(client: openai.OpenAI, model_name: str) -> None:
    chunks = list(client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, temperature=0, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")
    assert len({chunk.id for chunk in chunks}) == 1
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, temperature=0).choices[0].message.content


def test_stream_with_usage(client: openai.OpenAI, model_name: str) -> None:
    stream = client.chat.completions.create(
        model=model_name, messages=HELLO_MESSAGES, max_completion_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    *chunks, last = stream
    assert all(chunk.usage is None for chunk in chunks)
    assert last.choices == []
    assert last.usage is not None
    assert 0 < last.usage.completion_tokens <= 5
    assert last.usage.prompt_tokens > 0


def test_stream_helper(client: openai.OpenAI, model_name: str) -> None:
    with client.chat.completions.stream(model=model_name, messages=HELLO_MESSAGES) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        answer = stream.get_final_completion()
    assert text
    assert answer.choices[0].message.content == text


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=["required", "named"])
def test_tool_round_trip(client: openai.OpenAI, model_name: str, choice: object) -> None:
    first = client.chat.completions.create(model=model_name, messages=WEATHER_MESSAGES, tools=[WEATHER_TOOL], tool_choice=choice).choices[0]  # type: ignore[call-overload]
    assert first.message.content is None
    (call,) = first.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome", "Oslo")
    assert first.finish_reason == "tool_calls"
    messages = [*WEATHER_MESSAGES, first.message, {"role": "tool", "tool_call_id": call.id, "content": REPORT}]
    second = client.chat.completions.create(model=model_name, messages=messages, tools=[WEATHER_TOOL]).choices[0]
    assert second.message.content
    assert second.message.tool_calls is None


def test_streamed_tool_call(client: openai.OpenAI, model_name: str) -> None:
    with client.chat.completions.stream(model=model_name, messages=WEATHER_MESSAGES, tools=[WEATHER_TOOL], tool_choice="required") as stream:
        done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        message = stream.get_final_completion().choices[0].message
    assert [event.name for event in done] == ["get_weather"]
    assert message.tool_calls is not None
    assert json.loads(message.tool_calls[0].function.arguments) == json.loads(done[0].arguments)
    assert message.tool_calls[0].id


def test_tool_choice_none(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.create(model=model_name, messages=WEATHER_MESSAGES, tools=[WEATHER_TOOL], tool_choice="none").choices[0]
    assert answer.message.tool_calls is None
    assert answer.message.content


def test_parse_an_answer(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.parse(model=model_name, messages=ANIMAL_MESSAGES, response_format=Animal)
    assert isinstance(answer.choices[0].message.parsed, Animal)


def test_json_object(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.create(model=model_name, messages=ANIMAL_MESSAGES, response_format={"type": "json_object"}, n=6, temperature=0.7, seed=1)
    whole = [choice.message.content or "" for choice in answer.choices if choice.finish_reason == "stop"]
    assert whole
    assert all(isinstance(json.loads(text), dict) for text in whole)


def test_parse_a_stream(client: openai.OpenAI, model_name: str) -> None:
    with client.chat.completions.stream(model=model_name, messages=ANIMAL_MESSAGES, response_format=Animal) as stream:
        assert any(event.type == "content.delta" and event.parsed is not None for event in stream)
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Animal)


def test_parse_a_strict_tool(client: openai.OpenAI, model_name: str) -> None:
    answer = client.chat.completions.parse(
        model=model_name, messages=ANIMAL_MESSAGES, tools=[openai.pydantic_function_tool(Animal)], tool_choice="required", parallel_tool_calls=False
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None
    assert isinstance(calls[0].function.parsed_arguments, Animal)


def test_models(client: openai.OpenAI, model_name: str) -> None:
    assert [model.id for model in client.models.list()] == [model_name]
    assert client.models.retrieve(model_name).id == model_name
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("no-such-model")


def test_legacy_completion(client: openai.OpenAI, model_name: str) -> None:
    answer = client.completions.create(model=model_name, prompt="The capital of France is", logprobs=2, temperature=0, max_tokens=6)
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert "".join(choice.logprobs.tokens) == choice.text
    count = len(choice.logprobs.tokens)
    assert count > 0
    for values in (choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, choice.logprobs.text_offset):
        assert values is not None
        assert len(values) == count
    assert all(value <= 0 for value in choice.logprobs.token_logprobs or [])
    streamed = client.completions.create(model=model_name, prompt="The capital of France is", temperature=0, max_tokens=6, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == choice.text


def test_chat_log_probabilities(client: openai.OpenAI, model_name: str) -> None:
    choice = client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, logprobs=True, top_logprobs=3, temperature=0, max_tokens=6).choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content
    pieces = [bytes(entry.bytes or ()) for entry in choice.logprobs.content]
    assert b"".join(pieces).decode(errors="replace") == choice.message.content
    assert all(len(entry.top_logprobs) == 3 and entry.logprob <= 0 for entry in choice.logprobs.content)


def test_stop(client: openai.OpenAI, model_name: str) -> None:
    whole = client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, temperature=0).choices[0].message.content or ""
    word = whole.split()[2]
    cut = client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, temperature=0, stop=word).choices[0]
    assert cut.finish_reason == "stop"
    assert cut.message.content == whole[: whole.index(word)]


def test_choices_and_seed(client: openai.OpenAI, model_name: str) -> None:
    texts = [
        [choice.message.content for choice in client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, n=2, seed=7, max_tokens=24).choices]
        for _ in range(2)
    ]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_refused_field(client: openai.OpenAI, model_name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, temperature=99)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"


def test_too_long_a_prompt(client: openai.OpenAI, model_name: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=model_name, messages=[{"role": "user", "content": "word " * 10_000}])
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.anyio
async def test_async(base_url: str, model_name: str) -> None:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        answer = await client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES)
        assert answer.choices[0].message.content
        stream = await client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, stream=True)
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        parsed = await client.chat.completions.parse(model=model_name, messages=ANIMAL_MESSAGES, response_format=Animal)
        assert isinstance(parsed.choices[0].message.parsed, Animal)


def test_echo_with_log_probabilities(client: openai.OpenAI, model_name: str) -> None:
    answer = client.completions.create(model=model_name, prompt="The capital of France is", echo=True, logprobs=1, max_tokens=0)
    (choice,) = answer.choices
    assert choice.text == "The capital of France is"
    ranks = choice.logprobs
    assert ranks is not None
    assert ranks.token_logprobs is not None
    assert ranks.tokens is not None
    assert "".join(ranks.tokens) == choice.text
    assert ranks.token_logprobs[0] is None
    assert all(value < 0 for value in ranks.token_logprobs[1:])


def test_streamed_log_probabilities(client: openai.OpenAI, model_name: str) -> None:
    asked = {"model": model_name, "messages": HELLO_MESSAGES, "temperature": 0, "max_tokens": 8, "logprobs": True}
    chunks = list(client.chat.completions.create(**asked, stream=True))  # type: ignore[call-overload]
    streamed = [entry for chunk in chunks for choice in chunk.choices if choice.logprobs is not None for entry in choice.logprobs.content]
    whole = client.chat.completions.create(**asked).choices[0].logprobs  # type: ignore[call-overload]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole.content]


def test_structured_outputs_of_vllm(client: openai.OpenAI, model_name: str) -> None:
    form = {"structured_outputs": {"choice": ["positive", "negative"]}}
    answer = client.chat.completions.create(model=model_name, messages=HELLO_MESSAGES, extra_body=form)
    assert answer.choices[0].message.content in ("positive", "negative")
    completion = client.completions.create(model=model_name, prompt="x", best_of=2, extra_body={"structured_outputs": {"regex": "[0-9]{3}"}})
    assert len(completion.choices) == 1
    assert completion.choices[0].text.isdecimal()
