"""The prompt format of DeepSeek-V4, against prompts of its own encoder."""

# ruff: noqa: RUF001 (the bars of the control tokens are full-width ones)

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pocketllm.errors import ConfigurationError
from pocketllm.text.deepseek_v4 import EFFORTS, EFFORTS_PREVIEW, render_deepseek_v4

FIXTURES = Path(__file__).parent / "deepseek_v4"
BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def user(content: str, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def assistant(content: str | None, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def called(name: str, arguments: Any, id_: str = "1") -> dict[str, Any]:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(id_: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


@pytest.mark.parametrize("number", [1, 2, 3])
def test_the_checkpoint_s_own_examples(number: int) -> None:
    given = json.loads((FIXTURES / f"input_{number}.json").read_text(encoding="utf-8"))
    messages, tools = (given["messages"], given["tools"]) if isinstance(given, dict) else (given, None)
    expected = (FIXTURES / f"output_{number}.txt").read_text(encoding="utf-8")
    assert render_deepseek_v4(messages, tools=tools, thinking=True) == expected


def test_thinking_and_its_dropping() -> None:
    assert render_deepseek_v4([user("hi")], thinking=False) == f"{BOS}{USER}hi{ASSISTANT}</think>"
    assert render_deepseek_v4([user("hi")], thinking=True) == f"{BOS}{USER}hi{ASSISTANT}<think>"
    assert render_deepseek_v4([user("hi")], thinking=True, add_generation_prompt=False) == f"{BOS}{USER}hi"
    turns = [user("a"), assistant("b", reasoning_content="r"), user("c")]
    assert render_deepseek_v4(turns, thinking=True) == f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}<think>"
    assert render_deepseek_v4(turns, thinking=True, drop_thinking=False) == f"{BOS}{USER}a{ASSISTANT}<think>r</think>b{EOS}{USER}c{ASSISTANT}<think>"
    assert render_deepseek_v4(turns, thinking=False) == f"{BOS}{USER}a{ASSISTANT}</think>b{EOS}{USER}c{ASSISTANT}</think>"
    assert "<think>r</think>b" in render_deepseek_v4(turns, tools=[TOOL], thinking=True)


def test_an_earlier_developer_s_turn_is_dropped_with_the_reasoning() -> None:
    turns = [{"role": "developer", "content": "d"}, assistant("b"), user("c")]
    assert render_deepseek_v4(turns, thinking=True) == f"{BOS}b{EOS}{USER}c{ASSISTANT}<think>"
    assert render_deepseek_v4(turns, thinking=False).startswith(f"{BOS}{USER}d{ASSISTANT}</think>b")


def test_tools_without_a_system_turn_and_the_response_format() -> None:
    assert render_deepseek_v4([user("q")], tools=[TOOL], thinking=False).startswith(f"{BOS}\n\n## Tools\n\n")
    prompt = render_deepseek_v4([{"role": "system", "content": "s"}, user("q")], response_format={"type": "object"}, thinking=False)
    assert prompt == (
        f'{BOS}s\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n{{"type": "object"}}{USER}q{ASSISTANT}</think>'
    )


def test_results_are_in_the_order_of_their_calls_and_one_turn() -> None:
    turns = [user("q"), assistant(None, tool_calls=[called("f", "{}", "1"), called("f", {"a": None}, "2")]), result("2", "B"), result("1", "A"), user("go on")]
    prompt = render_deepseek_v4(turns, thinking=False)
    assert f"{EOS}{USER}<tool_result>A</tool_result>\n\n<tool_result>B</tool_result>\n\ngo on{ASSISTANT}" in prompt
    assert (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n\n</｜DSML｜invoke>\n<｜DSML｜invoke name="f">\n'
        '<｜DSML｜parameter name="a" string="false">null</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>' + EOS
    ) in prompt


def test_tasks_reminders_and_unfinished_turns() -> None:
    assert render_deepseek_v4([user("q", task="query")], thinking=False) == f"{BOS}{USER}q<｜query｜>"
    assert render_deepseek_v4([user("q", task="action")], thinking=True) == f"{BOS}{USER}q{ASSISTANT}<think><｜action｜>"
    assert render_deepseek_v4([user("q", task="title"), assistant("t"), user("n")], thinking=False).startswith(f"{BOS}{USER}q<｜title｜>t{EOS}{USER}n")
    assert render_deepseek_v4([user("q", task="title"), user("n")], thinking=False) == f"{BOS}{USER}q{USER}n{ASSISTANT}</think>"
    reminder = {"role": "latest_reminder", "content": "now"}
    assert render_deepseek_v4([reminder, user("q")], thinking=False) == f"{BOS}<｜latest_reminder｜>now{USER}q{ASSISTANT}</think>"
    assert render_deepseek_v4([user("q"), assistant("a", wo_eos=True)], thinking=False) == f"{BOS}{USER}q{ASSISTANT}</think>a"


def test_efforts() -> None:
    plain = render_deepseek_v4([user("q")], thinking=True)
    for effort, efforts, start in [
        ("high", EFFORTS_PREVIEW, f"{BOS}{USER}"),
        ("max", EFFORTS_PREVIEW, f"{BOS}Reasoning Effort: Absolute maximum"),
        ("low", EFFORTS, f"{BOS}{USER}"),
        ("high", EFFORTS, f"{BOS}Reasoning Effort: Absolute maximum"),
        ("max", EFFORTS, f"{BOS}Reasoning Effort: Beyond maximum — "),
    ]:
        prompt = render_deepseek_v4([user("q")], thinking=True, reasoning_effort=effort, efforts=efforts)
        assert prompt.startswith(start)
        assert prompt.endswith(plain.removeprefix(BOS))
        assert render_deepseek_v4([user("q")], thinking=False, reasoning_effort=effort, efforts=efforts) == f"{BOS}{USER}q{ASSISTANT}</think>"
    with pytest.raises(ConfigurationError, match="use high, max") as caught:
        render_deepseek_v4([user("q")], thinking=True, reasoning_effort="low")
    assert caught.value.param == "reasoning_effort"


@pytest.mark.parametrize(
    ("message", "place", "what"),
    [
        ({"role": "critic", "content": "x"}, "messages[1]", "critic"),
        ({"content": "x"}, "messages[1]", "null"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1]", "content"),
        ({"role": "developer", "content": ""}, "messages[1]", "content"),
        ({"role": "user", "content": "x", "task": "dance"}, "messages[1]", "dance"),
        ({"role": "assistant", "reasoning_content": 5}, "messages[1]", "reasoning_content"),
        ({"role": "assistant", "tool_calls": [called("f", "{}"), called("f", "{")]}, "messages[1].tool_calls[1]", "no JSON"),
        ({"role": "assistant", "tool_calls": [called("f", "null")]}, "messages[1].tool_calls[0]", "no JSON object"),
        ({"role": "assistant", "tool_calls": [called("f", None)]}, "messages[1].tool_calls[0]", "no JSON object"),
        ({"role": "assistant", "tool_calls": ["f"]}, "messages[1].tool_calls[0]", "function"),
    ],
)
def test_a_message_that_can_not_be_rendered_is_named(message: dict[str, Any], place: str, what: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        render_deepseek_v4([user("q"), message], thinking=False)
    assert caught.value.param == place
    assert f'"{place}"' in caught.value.message
    assert what in caught.value.message
