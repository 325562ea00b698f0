"""Messages to GenerationRequest, as the library and the server share it."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.chat import build_chat_request, chat_request, prompts_of
from pocketllm.protocol.messages import normalize_messages, render_role_content
from pocketllm.protocol.request import ToolUse
from pocketllm.protocol.tools import with_described_tools
from pocketllm.sampling_params import SamplingParams

HI = [{"role": "user", "content": "Hi"}]
CALL: dict[str, Any] = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


def test_text_parts_become_one_string() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert normalize_messages(messages) == [{"role": "user", "content": "one\ntwo"}]


def test_developer_is_kept_for_the_template_and_nulls_are_left_out() -> None:
    messages = [{"role": "developer", "content": "Be short.", "name": "ops"}, {"role": "assistant", "content": None, "refusal": None, "unheard_of": None}]
    assert normalize_messages(messages) == [{"role": "developer", "content": "Be short.", "name": "ops"}, {"role": "assistant", "content": ""}]
    assert render_role_content(normalize_messages(messages)) == "system: Be short.\nassistant: \nassistant:"


def test_other_keys_are_passed_on_as_copies() -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "tool_call_id": "a"},
    ]
    before = copy.deepcopy(messages)
    normalized = normalize_messages(messages)
    assert normalized[0]["tool_calls"] == [call]
    assert normalized[1]["tool_call_id"] == "a"
    normalized[0]["tool_calls"][0]["function"]["name"] = "changed"
    normalized[1]["content"] = "changed"
    assert messages == before


def test_mappings_that_are_no_dicts_are_taken() -> None:
    assert normalize_messages((MappingProxyType({"role": "user", "content": "Hi"}),)) == HI


def test_role_content_rendering() -> None:
    messages = [{"role": "system", "content": "Be short."}, *HI]
    assert render_role_content(messages) == "system: Be short.\nuser: Hi\nassistant:"
    assert render_role_content(messages, add_generation_prompt=False) == "system: Be short.\nuser: Hi"


def test_request_carries_messages_and_template_options() -> None:
    sampling = SamplingParams(max_tokens=5)
    request = build_chat_request(HI, sampling, request_id="a", reasoning_effort="low", drop_thinking=False)
    assert request.request_id == "a"
    assert request.sampling is sampling
    assert request.prompt == "user: Hi\nassistant:"
    assert request.metadata == {
        "messages": HI,
        "add_generation_prompt": True,
        "enable_thinking": True,
        "thinking": True,
        "thinking_mode": "thinking",
        "reasoning_effort": "low",
        "drop_thinking": False,
    }
    plain = build_chat_request(HI, sampling)
    assert plain.metadata == {"messages": HI, "add_generation_prompt": True}
    assert plain.request_id.startswith("chatcmpl-")
    assert plain.response_format is None
    assert plain.tools is None


def test_thinking_mode_wins_over_effort() -> None:
    metadata = build_chat_request(HI, SamplingParams(), thinking_mode="chat", reasoning_effort="high").metadata
    assert metadata["enable_thinking"] is False
    assert metadata["thinking_mode"] == "chat"
    assert build_chat_request(HI, SamplingParams(), reasoning={"effort": "none"}).metadata["thinking_mode"] == "chat"


# Cases 31 and 35 of the bug reports: forms that mean the same make the same prompt.
def test_no_tools_in_any_spelling_is_the_same_request() -> None:
    requests = [
        chat_request({"messages": HI, "request_id": "a", **tools}) for tools in ({}, {"tools": None}, {"tools": []}, {"tools": [], "tool_choice": "auto"})
    ]
    assert all(request == requests[0] for request in requests)
    assert "tools" not in requests[0].metadata


@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
def test_an_assistant_that_only_called_has_no_content_in_any_spelling(content: dict[str, Any]) -> None:
    messages = [*HI, {"role": "assistant", "tool_calls": [CALL], **content}, {"role": "tool", "tool_call_id": "a", "content": "5"}]
    assert normalize_messages(messages)[1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_tools_of_a_request() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": None, "parameters": {"type": "object"}, "strict": True}}
    before = copy.deepcopy(tool)
    kept = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}
    request = build_chat_request(HI, SamplingParams(), tools=[tool])
    assert request.tools == ToolUse((kept,))
    assert request.metadata["tools"] == [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    request.metadata["tools"][0]["function"]["parameters"]["type"] = "changed"
    assert request.tools == ToolUse((kept,))
    assert tool == before
    named = {"type": "function", "function": {"name": "f"}}
    for choice, expected in (
        ("none", ToolUse((kept,), "none")),
        ("required", ToolUse((kept,), "required")),
        (named, ToolUse((kept,), "function", "f")),
        (None, ToolUse((kept,))),
    ):
        assert build_chat_request(HI, SamplingParams(), tools=[tool], tool_choice=choice).tools == expected
    single = build_chat_request(HI, SamplingParams(), tools=[tool], parallel_tool_calls=False).tools
    assert single is not None
    assert not single.parallel


def test_response_format_of_a_request() -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}}
    assert build_chat_request(HI, SamplingParams(), response_format=schema).response_format == schema
    assert build_chat_request(HI, SamplingParams(), response_format={"type": "text"}).response_format is None


def test_a_body_and_the_library_ask_for_the_same() -> None:
    body = {"messages": HI, "n": 2, "stop": "a", "logprobs": True, "top_logprobs": 2, "request_id": "a", "thinking_mode": "chat"}
    asked = build_chat_request(HI, SamplingParams(n=2, stop="a", logprobs=2), request_id="a", default_max_tokens=9, thinking_mode="chat")
    assert replace(chat_request(body, 9), is_streamed=True) == asked  # the library hears every event, a server's body says whether it is to


def test_prompts() -> None:
    assert prompts_of({"prompt": "a"}) == ["a"]
    assert prompts_of({"prompt": ["a", "b"]}) == ["a", "b"]
    assert prompts_of({"prompt": [1, 2.0]}) == [(1, 2)]
    assert prompts_of({"prompt": [[1], [2.0, 3]]}) == [(1,), (2, 3)]
    for body in ({}, {"prompt": None}):
        with pytest.raises(ConfigurationError, match='"prompt" is missing: '):
            prompts_of(body)
    with pytest.raises(ConfigurationError, match="surrogate"):
        prompts_of({"prompt": ["a", "\ud800"]})


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"stop": 5}, ConfigurationError, "stop"),
        ({"stop": ["a"]}, ConfigurationError, "stop"),
        ({"n": 2}, ConfigurationError, "n"),
        ({"tools": [{"type": "function"}]}, ConfigurationError, "tools[0].function"),
        ({"frequency_penalty": 1}, ConfigurationError, "frequency_penalty"),
        ({"response_format": {"type": "json_object"}}, UnsupportedFeatureError, "response_format"),
        ({"unknown": 1}, ConfigurationError, "unknown"),
        ({"prompt": "Hi"}, ConfigurationError, "prompt"),
        ({"request_id": "a b"}, ConfigurationError, "request_id"),
        ({"temperature": 0.5}, ConfigurationError, "temperature"),
        ({"max_tokens": 5}, ConfigurationError, "max_tokens"),
        ({"stream": True}, ConfigurationError, "stream"),
    ],
)
def test_options_are_refused_as_over_http(options: dict[str, Any], kind: type[Exception], param: str) -> None:
    with pytest.raises(kind) as caught:
        build_chat_request(HI, SamplingParams(), features=frozenset({"per_request_sampling"}), **options)
    assert getattr(caught.value, "param", None) == param


def test_sampling_params_are_refused_as_over_http() -> None:
    with pytest.raises(UnsupportedFeatureError) as caught:
        build_chat_request(HI, SamplingParams(logprobs=3), features=frozenset())
    assert str(caught.value).startswith('"logprobs" = true is not supported by this server: this engine returns no log probabilities.')


@pytest.mark.parametrize("options", [{"stop": None}, {"tools": []}, {"tool_choice": "auto"}, {"user": "me"}, {"stream": False}, {"logprobs": None}])
def test_harmless_options_pass(options: dict[str, Any]) -> None:
    assert build_chat_request(HI, SamplingParams(), features=frozenset(), **options).metadata["messages"] == HI


def assistant(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": "a", **keys}


def call_of(**keys: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{**CALL, **keys}]}


def calling(**keys: Any) -> dict[str, Any]:
    return call_of(function={**CALL["function"], **keys})


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(key: str) -> None:
    assert normalize_messages([assistant(**{key: "r"})]) == [assistant(reasoning_content="r")]


@pytest.mark.parametrize(
    ("message", "kept"),
    [
        (assistant(refusal="no", annotations=[], audio=None, function_call=None, tool_calls=[]), assistant()),
        (assistant(prefix=False, tool_calls=None), assistant()),
        (assistant(content=[{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]), assistant(content="a\nno")),
        (assistant(content=[{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}, "annotations": []}]), assistant()),
        (assistant(reasoning="one", reasoning_content="one"), assistant(reasoning_content="one")),
        (call_of(index=0), {"role": "assistant", "content": "", "tool_calls": [CALL]}),
        ({"role": "tool", "content": "5", "tool_call_id": "a", "name": "f"}, {"role": "tool", "content": "5", "tool_call_id": "a", "name": "f"}),
    ],
)
def test_what_clients_replay_is_taken(message: dict[str, Any], kept: dict[str, Any]) -> None:
    assert normalize_messages([message]) == [kept]


# Case 32 of the bug reports.
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        ({"arguments": '{"a": 1}'}, '{"a": 1}'),
        ({"arguments": {"a": 1}}, {"a": 1}),
        ({"arguments": None}, "{}"),
        ({"arguments": ""}, "{}"),
        ({"arguments": "null"}, "{}"),
        ({}, "{}"),
    ],
)
def test_arguments_of_earlier_calls(arguments: dict[str, Any], kept: object) -> None:
    function = {"name": "f", **arguments}
    (message,) = normalize_messages([call_of(function=function)])
    assert message["tool_calls"][0]["function"]["arguments"] == kept


@pytest.mark.parametrize(
    ("message", "param"),
    [
        (5, "messages[0]"),
        ({"content": "Hi"}, "messages[0].role"),
        ({"role": "function", "content": "Hi"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [5]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "refusal", "refusal": "no"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "weight": 2}]}, "messages[0].content[0].weight"),
        ({"role": "user", "content": "Hi", "foo": 1}, "messages[0].foo"),
        ({"role": "user", "content": "Hi", "name": 5}, "messages[0].name"),
        ({"role": "user", "content": "Hi", "tool_calls": [CALL]}, "messages[0].tool_calls"),
        ({"role": "user", "content": "Hi", "tool_call_id": "a"}, "messages[0].tool_call_id"),
        ({"role": "user", "content": "\ud800"}, "messages[0].content"),
        ({"role": "tool", "content": "5"}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "5", "tool_call_id": ""}, "messages[0].tool_call_id"),
        ({"role": "tool", "content": "5", "tool_call_id": 5}, "messages[0].tool_call_id"),
        (assistant(prefix=True), "messages[0].prefix"),
        (assistant(partial=True), "messages[0].partial"),
        (assistant(audio={"id": "a"}), "messages[0].audio"),
        (assistant(function_call={"name": "f"}), "messages[0].function_call"),
        (assistant(annotations=[{}]), "messages[0].annotations"),
        (assistant(refusal=5), "messages[0].refusal"),
        (assistant(reasoning=5), "messages[0].reasoning"),
        (assistant(tool_calls=5), "messages[0].tool_calls"),
        (assistant(tool_calls=[5]), "messages[0].tool_calls[0]"),
        (call_of(type="custom"), "messages[0].tool_calls[0].type"),
        (call_of(id=None), "messages[0].tool_calls[0].id"),
        (call_of(function=None), "messages[0].tool_calls[0].function"),
        (call_of(extra=1), "messages[0].tool_calls[0].extra"),
        (calling(name=""), "messages[0].tool_calls[0].function.name"),
        (calling(extra=1), "messages[0].tool_calls[0].function.extra"),
        (calling(arguments="{"), "messages[0].tool_calls[0].function.arguments"),
        (calling(arguments="[1]"), "messages[0].tool_calls[0].function.arguments"),
        (calling(arguments=5), "messages[0].tool_calls[0].function.arguments"),
        (calling(arguments="[" * 100000), "messages[0].tool_calls[0].function.arguments"),
    ],
)
def test_messages_at_fault_are_named(message: Any, param: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedFeatureError)) as caught:
        normalize_messages([message])
    assert caught.value.param == param
    assert str(caught.value).startswith(f'"{param}" ')
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("messages", "words"), [(None, "is missing: "), ([], "= [] is"), ("Hi", '= "Hi" is'), ({}, "= {} is"), (5, "= 5 is")])
def test_what_is_no_conversation_is_said_precisely(messages: Any, words: str) -> None:
    with pytest.raises(ConfigurationError, match=re.escape(f'"messages" {words}')) as caught:
        normalize_messages(messages)
    assert caught.value.param == "messages"


def test_tools_are_described_in_the_system_turn() -> None:
    tool = {"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}, "strict": True}}
    for messages in (HI, [{"role": "system", "content": "Be short."}, *HI], [{"role": "developer", "content": ""}, *HI]):
        before = copy.deepcopy(messages)
        described = with_described_tools(messages, [tool])
        assert messages == before
        assert described[1:] == HI
        assert described[0]["role"] in ("system", "developer")
        assert '\n\nf: é\n{"type": "object"}\n\n' in described[0]["content"]
        assert described[0]["content"].startswith("Be short.\n\n" if before[0]["content"] == "Be short." else "You can call these tools, ")


@pytest.mark.parametrize("sampling", [{"max_tokens": 3}, 5, None])
def test_sampling_of_another_kind_is_refused(sampling: Any) -> None:
    with pytest.raises(ConfigurationError, match=r'"sampling_params" = .* is not valid: send a SamplingParams') as caught:
        build_chat_request([{"role": "user", "content": "Hi"}], sampling)
    assert caught.value.param == "sampling_params"
