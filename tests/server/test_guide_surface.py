"""`--surface guide`: the API guide to the letter, on an engine that can do more."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import httpx
import pytest

from pocketllm.backends.base import Capabilities
from pocketllm.backends.fake import FakeBackend
from pocketllm.protocol.field import PATHS, Endpoint
from tests.fake_serving import call, chat_body, fake, in_process, qwen_like

FLAGS = [option.name for option in dataclasses.fields(Capabilities) if option.type == "bool"]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
NAMED = {"type": "function", "function": {"name": "f"}}
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
STREAM = {"stream": True}

# The guide's table of refusals: endpoints, fields, the one that is named, and the values beside it that pass.
REFUSED: list[tuple[tuple[Endpoint, ...], dict[str, Any], str, list[dict[str, Any]]]] = [
    (BOTH, {"stop": 5}, "stop", [{"stop": []}, {"stop": [""]}, {"stop": "x"}, {"stop": ["x", "y"]}]),
    (BOTH, {"stop": [5]}, "stop", []),
    (CHAT, {"logprobs": 3}, "logprobs", [{"logprobs": False}, {"logprobs": True}]),
    (COMPLETIONS, {"logprobs": True}, "logprobs", [{"logprobs": 0}, {"logprobs": 20}]),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", [{"logprobs": None}]),
    (COMPLETIONS, {"logprobs": 1.5}, "logprobs", []),
    (COMPLETIONS, {"top_logprobs": 0}, "top_logprobs", [{"top_logprobs": None}]),
    (CHAT, {"top_logprobs": 21, "logprobs": True}, "top_logprobs", [{"top_logprobs": 20, "logprobs": True}]),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", [{"top_logprobs": 0}]),
    (CHAT, {"top_logprobs": 2, "logprobs": False}, "top_logprobs", [{"top_logprobs": 0, "logprobs": False}]),
    (CHAT, {"logprobs": True, **STREAM}, "logprobs", [{"logprobs": False, **STREAM}]),
    (COMPLETIONS, {"logprobs": 0, **STREAM}, "logprobs", []),
    (BOTH, {"frequency_penalty": 0.5}, "frequency_penalty", [{"frequency_penalty": 0}]),
    (BOTH, {"presence_penalty": -1}, "presence_penalty", [{"presence_penalty": 0.0}]),
    (BOTH, {"logit_bias": {"5": 1}}, "logit_bias", [{"logit_bias": {}}]),
    (COMPLETIONS, {"best_of": 2}, "best_of", [{"best_of": 1}]),
    (COMPLETIONS, {"suffix": "x"}, "suffix", [{"suffix": ""}]),
    (COMPLETIONS, {"echo": True}, "echo", [{"echo": False}]),
    (CHAT, {"tool_choice": "required", "tools": [TOOL]}, "tool_choice", [{"tool_choice": "auto", "tools": [TOOL]}, {"tool_choice": "auto"}]),
    (CHAT, {"tool_choice": "none", "tools": [TOOL]}, "tool_choice", []),
    (CHAT, {"tool_choice": "none"}, "tool_choice", []),
    (CHAT, {"tool_choice": NAMED, "tools": [TOOL]}, "tool_choice", []),
    (CHAT, {"parallel_tool_calls": False, "tools": [TOOL]}, "parallel_tool_calls", [{"parallel_tool_calls": True}]),
    (
        BOTH,
        {"stream_options": {"include_usage": True}, **STREAM},
        "stream_options.include_usage",
        [{"stream_options": {"include_usage": True}}, {"stream_options": {"include_usage": False}, **STREAM}],
    ),
    # of the texts beside the tables
    (BOTH, {"n": 129}, "n", [{"n": 1}, {"n": 2}]),
    (BOTH, {"n": 0}, "n", []),
    (BOTH, {"n": 1.5}, "n", []),
    (BOTH, {"n": "2"}, "n", []),
    (COMPLETIONS, {"prompt": [5]}, "prompt", [{"prompt": ["a"]}]),
    (CHAT, {"tools": [{**TOOL, "function": {**TOOL["function"], "strict": True}}]}, "tools[0].function.strict", [{"tools": []}]),
    # what decisions give to engines, masked here
    (BOTH, {"min_p": 0.1}, "min_p", [{"min_p": 0}]),
    (BOTH, {"repetition_penalty": 1.1}, "repetition_penalty", [{"repetition_penalty": 1}]),
    (BOTH, {"stop_token_ids": [5]}, "stop_token_ids", [{"stop_token_ids": []}]),
    (BOTH, {"ignore_eos": True}, "ignore_eos", [{"ignore_eos": False}]),
    (BOTH, {"min_tokens": 1}, "min_tokens", [{"min_tokens": 0}]),
    (BOTH, {"prompt_logprobs": 0}, "prompt_logprobs", [{"prompt_logprobs": None}]),
    (BOTH, {"structured_outputs": {"regex": "a"}}, "structured_outputs", [{"structured_outputs": None}]),
    (CHAT, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", [{"chat_template_kwargs": {}}]),
    (CHAT, {"continue_final_message": True}, "continue_final_message", [{"continue_final_message": False}]),
    (CHAT, {"thinking_token_budget": 5}, "thinking_token_budget", [{"thinking_token_budget": None}]),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", []),
    (BOTH, {"allowed_token_ids": [5]}, "allowed_token_ids", [{"allowed_token_ids": None}]),
    (BOTH, {"bad_words": ["x"]}, "bad_words", [{"bad_words": []}]),
    (BOTH, {"priority": 1}, "priority", [{"priority": 0}]),
    # no such field
    (BOTH, {"grammar": "x"}, "grammar", []),
    (COMPLETIONS, {"request_id": "a"}, "request_id", []),
    (COMPLETIONS, {"response_format": {"type": "text"}}, "response_format", []),
]
IMPLEMENTED: list[tuple[tuple[Endpoint, ...], dict[str, Any]]] = [
    (BOTH, {"max_tokens": 2}),
    (BOTH, {"max_completion_tokens": 1, "max_tokens": 2}),
    (BOTH, {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "seed": 1}),
    (BOTH, STREAM),
    (CHAT, {"response_format": {"type": "text"}}),
    (CHAT, {"response_format": {"type": "json_object"}}),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "boolean"}}}}),
    (CHAT, {"tools": [TOOL]}),
    (CHAT, {"thinking_mode": "chat", "reasoning_effort": "low", "add_generation_prompt": True, "drop_thinking": False, "request_id": "a"}),
    *((BOTH, {name: "x"}) for name in ("user", "store", "metadata", "service_tier", "model")),
]
HIDDEN = {"refusal", "logprobs"}  # present as null on the full surface


def engine() -> FakeBackend:
    return fake(tokens_per_second=200, capabilities=Capabilities("fake", "none", 4, 1024, 256, **dict.fromkeys(FLAGS, True)))


def body_of(endpoint: Endpoint, fields: dict[str, Any]) -> dict[str, Any]:
    base: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]} if endpoint == "chat" else {"prompt": "Hi"}
    return {**base, "max_tokens": 3, **fields}


def exchange(*requests: tuple[str, str, dict[str, Any] | None], headers: dict[str, str] | None = None) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with in_process(engine(), surface="guide") as client:
            return [await client.request(method, path, json=body, headers=headers) for method, path, body in requests]

    return asyncio.run(run())


def post(endpoint: Endpoint, *bodies: dict[str, Any]) -> list[httpx.Response]:
    return exchange(*(("POST", PATHS[endpoint], body_of(endpoint, fields)) for fields in bodies))


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    payloads = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert payloads.pop() == "[DONE]"
    return [json.loads(payload) for payload in payloads]


@pytest.mark.parametrize(("endpoints", "refused", "param", "passing"), REFUSED, ids=[f"{row[2]}-{index}" for index, row in enumerate(REFUSED)])
def test_refusals(endpoints: tuple[Endpoint, ...], refused: dict[str, Any], param: str, passing: list[dict[str, Any]]) -> None:
    for endpoint in endpoints:
        no, *yes = post(endpoint, refused, *passing)
        assert no.status_code == 400
        error = no.json()["error"]
        assert (error["param"], error["type"], error["code"]) == (param, "invalid_request_error", None)
        assert error["message"].startswith(f'"{param}" = ')
        assert " is not supported by this server: " in error["message"]
        assert [response.status_code for response in yes] == [200] * len(passing), [response.text for response in yes]


@pytest.mark.parametrize(("endpoints", "fields"), IMPLEMENTED, ids=lambda value: "-".join(value) if isinstance(value, dict) else "")
def test_what_the_guide_implements(endpoints: tuple[Endpoint, ...], fields: dict[str, Any]) -> None:
    for endpoint in endpoints:
        (response,) = post(endpoint, fields)
        assert response.status_code == 200, response.text


def test_paths() -> None:
    responses = exchange(
        ("GET", "/health", None),
        ("GET", "/alive", None),
        ("GET", "/ready", None),
        ("GET", "/metrics", None),
        ("GET", "/v1/models", None),
        ("GET", "/v1/models/fake-1", None),
        ("DELETE", "/v1/requests/a", None),
        ("POST", "/v1/embeddings", {}),
        ("GET", "/", None),
    )
    assert [response.status_code for response in responses] == [200, 200, 200, 200, 200, 404, 404, 404, 404]
    assert responses[5].json()["error"]["message"] == 'There is no "/v1/models/fake-1" on this server.'


@pytest.mark.parametrize("endpoint", BOTH)
def test_no_answer_has_a_request_id_header(endpoint: Endpoint) -> None:
    for body in (body_of(endpoint, {}), body_of(endpoint, STREAM), body_of(endpoint, {"n": 0})):
        (response,) = exchange(("POST", PATHS[endpoint], body), headers={"X-Request-Id": "mine"})
        assert "x-request-id" not in response.headers


@pytest.mark.parametrize("endpoint", BOTH)
def test_empty_keys_and_details_are_left_out(endpoint: Endpoint) -> None:
    (response,) = post(endpoint, {})
    body = response.json()
    (choice,) = body["choices"]
    assert set(body) == {"id", "object", "created", "model", "choices", "usage"}
    assert set(choice) == {"index", "message" if endpoint == "chat" else "text", "finish_reason"}
    if endpoint == "chat":
        assert set(choice["message"]) == {"role", "content"}
    assert set(body["usage"]) == {"prompt_tokens", "completion_tokens", "total_tokens"}


@pytest.mark.parametrize("endpoint", BOTH)
def test_a_stream_is_deltas_and_done(endpoint: Endpoint) -> None:
    (response,) = post(endpoint, STREAM)
    found = chunks(response)
    assert len(found) >= 2  # text that waits for a busy server comes as one
    for chunk in found:
        assert set(chunk) == {"id", "object", "created", "model", "choices"}
        (choice,) = chunk["choices"]
        assert not set(choice) & HIDDEN
        assert not set(choice.get("delta", {})) & HIDDEN


def test_logprobs_are_there_when_asked_for() -> None:
    (chat,) = post("chat", {"logprobs": True, "top_logprobs": 2})
    (completion,) = post("completions", {"logprobs": 2})
    for response in (chat, completion):
        (choice,) = response.json()["choices"]
        assert len(choice["logprobs"]["content"]) == 3
        for entry in choice["logprobs"]["content"]:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            assert len(entry["top_logprobs"]) == 2


def test_a_call_within_reasoning_is_content_of_a_stream() -> None:
    call_text = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}]
    body = chat_body(stream=True, max_tokens=500, tools=tools)
    response = call("POST", PATHS["chat"], qwen_like(f"<think>a\n{call_text}"), json=body, surface="guide")
    deltas = [json.loads(line[6:])["choices"][0]["delta"] for line in response.text.split("\n\n") if line.startswith("data: {")]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "a"
    assert "".join(delta.get("content", "") for delta in deltas) == call_text
