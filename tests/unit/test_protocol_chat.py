"""Messages to GenerationRequest, as the library and the server share it."""

from __future__ import annotations

import copy
from types import MappingProxyType
from typing import Any

import pytest

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.chat import build_chat_request, normalize_messages, render_role_content
from pocketllm.sampling_params import SamplingParams

HI = [{"role": "user", "content": "Hi"}]


def test_text_parts_become_one_string() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]
    assert normalize_messages(messages) == [{"role": "user", "content": "one\ntwo"}]


def test_developer_is_system_and_nulls_are_left_out() -> None:
    messages = [{"role": "developer", "content": "Be short.", "name": "ops"}, {"role": "assistant", "content": None, "refusal": None}]
    assert normalize_messages(messages) == [{"role": "system", "content": "Be short.", "name": "ops"}, {"role": "assistant", "content": ""}]


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
        "reasoning_effort": "low",
        "drop_thinking": False,
    }
    assert build_chat_request(HI, sampling).metadata == {"messages": HI, "add_generation_prompt": True}
    assert build_chat_request(HI, sampling).request_id.startswith("chatcmpl-")


def test_thinking_mode_wins_over_effort() -> None:
    metadata = build_chat_request(HI, SamplingParams(), thinking_mode="chat", reasoning_effort="high").metadata
    assert metadata["enable_thinking"] is False


@pytest.mark.parametrize(
    ("options", "kind", "param"),
    [
        ({"stop": 5}, ConfigurationError, "stop"),
        ({"stop": ["a"]}, UnsupportedFeatureError, "stop"),
        ({"tools": [{"type": "function"}]}, UnsupportedFeatureError, "tools"),
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
        build_chat_request(HI, SamplingParams(), **options)
    assert getattr(caught.value, "param", None) == param


@pytest.mark.parametrize("options", [{"stop": []}, {"tools": []}, {"tool_choice": "auto"}, {"n": 1}, {"user": "me"}, {"stream": False}, {"logprobs": None}])
def test_harmless_options_pass(options: dict[str, Any]) -> None:
    assert build_chat_request(HI, SamplingParams(), **options).metadata["messages"] == HI
