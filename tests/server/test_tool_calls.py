"""Tool calls over HTTP: read back whole and on a stream, forced, forbidden, and held to one, with a scripted model that writes Qwen's syntax."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import httpx
import jsonschema
import pytest

from pocketllm.backends.fake import FakeBackend
from pocketllm.checkpoint import GenerationDefaults
from pocketllm.generation import GenerationService
from pocketllm.protocol.chat import build_chat_request
from pocketllm.sampling_params import SamplingParams
from pocketllm.text.deepseek_v4 import DeepseekV4Prompt
from tests.fake_serving import byte_tokenizer, call, qwen_like

CHAT = "/v1/chat/completions"
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock"}}
CALL = "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
ARGUMENTS = '{"city": "Paris", "days": 3}'


def body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Weather?"}], "max_tokens": 300, "tools": [WEATHER, CLOCK], **fields}


def ask(answer: str, *, surface: str = "full", tokens_per_step: int = 1, **fields: Any) -> dict[str, Any]:
    """The one choice of an answer that is not streamed, and its usage."""
    response = call("POST", CHAT, qwen_like(answer, tokens_per_step=tokens_per_step), json=body(**fields), surface=surface)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()["choices"][0]
    return found


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def stream(answer: str, *, surface: str = "full", tokens_per_step: int = 1, **fields: Any) -> dict[str, Any]:
    """The same choice, put together from its deltas as a client does."""
    backend = qwen_like(answer, tokens_per_step=tokens_per_step)
    content, reasoning, reason = "", "", None
    calls: dict[int, dict[str, Any]] = defaultdict(dict)
    for chunk in chunks(call("POST", CHAT, backend, json=body(stream=True, **fields), surface=surface)):
        (choice,) = chunk["choices"]
        delta = choice["delta"]
        content += delta.get("content") or ""
        reasoning += delta.get("reasoning_content") or ""
        for part in delta.get("tool_calls", ()):
            found = calls[part["index"]]
            if not found:
                assert part["id"].startswith("call_")
                assert part["type"] == "function"
                assert part["function"]["arguments"] == ""
                found |= {"id": part["id"], "name": part["function"]["name"], "arguments": ""}
            else:
                assert set(part) == {"index", "function"}
                found["arguments"] += part["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {"content": content, "reasoning": reasoning, "calls": [calls[index] for index in sorted(calls)], "finish_reason": reason}


@pytest.mark.parametrize("tokens_per_step", [1, 3, 50])
@pytest.mark.parametrize(
    ("answer", "content", "names"),
    [
        (CALL, None, ["get_weather"]),
        (f"I will look.\n\n{CALL}", "I will look.", ["get_weather"]),
        (f"{CALL}\n{CALL}", None, ["get_weather", "get_weather"]),
        (f"{CALL}\nand more", f"{CALL}\nand more", []),
        (f"{CALL}\nthen\n{CALL}", f"{CALL}\nthen\n{CALL}", []),
        (CALL[:-4], CALL[:-4], []),
        ("No call, <tool", "No call, <tool", []),
    ],
)
def test_calls_are_read_alike_whole_and_streamed(answer: str, content: str | None, names: list[str], tokens_per_step: int) -> None:
    choice = ask(answer, tokens_per_step=tokens_per_step)
    message = choice["message"]
    assert message["content"] == content
    calls = message.get("tool_calls", [])
    assert [one["function"]["name"] for one in calls] == names
    assert all(one["function"]["arguments"] == ARGUMENTS and one["type"] == "function" for one in calls)
    assert len({one["id"] for one in calls}) == len(calls)
    assert choice["finish_reason"] == ("tool_calls" if names else "stop")
    streamed = stream(answer, tokens_per_step=tokens_per_step)
    assert streamed["content"] == (content or "")
    assert [(one["name"], one["arguments"]) for one in streamed["calls"]] == [(name, ARGUMENTS) for name in names]
    assert streamed["finish_reason"] == choice["finish_reason"]


@pytest.mark.parametrize("tools", [[WEATHER], None])
def test_no_tools_leave_every_argument_a_string(tools: Any) -> None:
    arguments = ask(CALL, tools=tools)["message"]["tool_calls"][0]["function"]["arguments"]
    assert arguments == (ARGUMENTS if tools else '{"city": "Paris", "days": "3"}')


def test_the_guides_surface_streams_calls_as_content() -> None:
    assert ask(CALL, surface="guide")["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert stream(CALL, surface="guide") == {"content": CALL, "reasoning": "", "calls": [], "finish_reason": "stop"}


def test_a_call_within_the_reasoning_ends_it() -> None:
    choice = ask(f"<think>\nI need the weather.\n{CALL}")
    assert choice["message"]["reasoning_content"] == "I need the weather."
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert stream(f"<think>\nI need the weather.\n{CALL}")["reasoning"] == "I need the weather."


@pytest.mark.parametrize("answer", ["just words", "<think>\nhm\n</think>\n\nwords", CALL])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_forced_choice_is_a_call_whatever_the_model_would_say(answer: str, choice: Any) -> None:
    found = ask(answer, tool_choice=choice)
    if found["finish_reason"] == "length":  # the double draws letters for ever where a string may go on
        assert "tool_calls" not in found["message"]
        return
    (called,) = found["message"]["tool_calls"]
    if choice != "required":
        assert called["function"]["name"] == "get_weather"
    if called["function"]["name"] == "get_weather":
        jsonschema.validate(json.loads(called["function"]["arguments"]), WEATHER["function"]["parameters"])


def test_a_forced_function_without_arguments_is_called_so() -> None:
    found = ask("words", tools=[CLOCK], tool_choice="required", parallel_tool_calls=False)
    assert [one["function"] for one in found["message"]["tool_calls"]] == [{"name": "clock", "arguments": "{}"}]
    assert found["finish_reason"] == "tool_calls"


def test_a_forbidden_call_is_not_made() -> None:
    message = ask(CALL, tool_choice="none", max_tokens=40)["message"]
    assert "tool_calls" not in message
    assert "<tool_call>" not in message["content"]


def test_an_answer_is_held_to_one_call() -> None:
    message = ask(f"{CALL}\n{CALL}", parallel_tool_calls=False)["message"]
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == [ARGUMENTS]


def test_strict_holds_the_arguments_to_the_schema() -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    loose = CALL.replace("\n3\n", "\nsome\n")
    assert ask(loose)["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris", "days": "some"}'
    found = ask(loose, tools=[strict], max_tokens=400)
    if found["finish_reason"] == "tool_calls":
        jsonschema.validate(json.loads(found["message"]["tool_calls"][0]["function"]["arguments"]), WEATHER["function"]["parameters"])
    assert "some" not in str(found["message"].get("tool_calls"))


def test_a_format_and_tools_together_allow_either() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}}}
    assert ask(CALL, response_format=form)["message"]["tool_calls"][0]["function"]["arguments"] == ARGUMENTS
    assert json.loads(ask('{"a": true}', response_format=form)["message"]["content"]) == {"a": True}


def test_deepseek_v4_is_prompted_in_its_own_encoding_and_read_in_its_own_syntax() -> None:
    marks = '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'  # noqa: RUF001
    answer = f'{marks}<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'  # noqa: RUF001
    backend = FakeBackend(context_length=8192, answers=[list(answer.encode())])
    backend.load(lambda _progress: None)
    service = GenerationService(backend, byte_tokenizer(), DeepseekV4Prompt(), GenerationDefaults(), model_name="v4", model_type="deepseek_v4")
    request = build_chat_request([{"role": "user", "content": "hi"}], SamplingParams(max_tokens=600), tools=[WEATHER])
    prompt = bytes(service.prepare([request]).rows[0].prompt_token_ids).decode()
    assert prompt.startswith("<｜begin▁of▁sentence｜>")  # noqa: RUF001
    assert '"name": "get_weather"' in prompt
    assert prompt.endswith("<｜User｜>hi<｜Assistant｜></think>")  # noqa: RUF001
    output = service.stream(request).result()
    assert [(one.name, one.arguments) for one in output.tool_calls] == [("get_weather", ARGUMENTS)]
    assert (output.text, output.finish_reason) == ("", "tool_calls")
    service.close()
