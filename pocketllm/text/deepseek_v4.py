"""The prompt format of DeepSeek-V4, whose checkpoints have no chat template."""

# ruff: noqa: RUF001 (the bars of the control tokens are full-width ones)

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from pocketllm.errors import ConfigurationError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
_USER = "<｜User｜>"
_ASSISTANT = "<｜Assistant｜>"
_THINK = "<think>"
_THINK_END = "</think>"
_REMINDER = "<｜latest_reminder｜>"
_TASKS = {name: f"<｜{name}｜>" for name in ("action", "query", "authority", "domain", "title", "read_url")}
_DSML = "｜DSML｜"

# What follows is the checkpoint's: it was trained on these words.
_TOOLS = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<{_DSML}tool_calls>" block like the following:

<{_DSML}tool_calls>
<{_DSML}invoke name="$TOOL_NAME">
<{_DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_DSML}parameter>
...
</{_DSML}invoke>
<{_DSML}invoke name="$TOOL_NAME2">
...
</{_DSML}invoke>
</{_DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {_THINK}), you MUST output your complete reasoning inside {_THINK}...{_THINK_END} BEFORE any tool calls or final response.

Otherwise, output directly after {_THINK_END} with tool calls or final response.

### Available Tool Schemas

"""  # noqa: E501
_TOOLS_END = "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
_RESPONSE_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_ABSOLUTE_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic "
    "against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, and rejected hypothesis to ensure "
    "absolutely no assumption is left unchecked.\n\n"
)
_BEYOND_EFFORT = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental "
    "components, trace every causal chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain that no assumption remains unchecked and "
    "no error remains undiscovered.\n\n"
)
DEEPSEEK_V4_TYPES = ("deepseek_v4", "deepseek4")  # config.json's model_type, and the architecture of a GGUF

EFFORTS_PREVIEW: Mapping[str, str] = {"high": "", "max": _ABSOLUTE_EFFORT}  # the weights of April 2026
EFFORTS: Mapping[str, str] = {"low": "", "high": _ABSOLUTE_EFFORT, "max": _BEYOND_EFFORT}  # those of July 2026 and later


@dataclass(slots=True)
class _Turn:
    """One message of the prompt; consecutive user and tool messages are one."""

    role: str
    content: str
    place: str  # the first of its messages, for errors
    reasoning: str = ""
    calls: Sequence[Mapping[str, Any]] = ()
    tools: Sequence[Mapping[str, Any]] = ()
    response_format: Any = None
    task: str | None = None
    unfinished: bool = False
    blocks: list[tuple[str | None, str]] = field(default_factory=list)  # of a user turn: the call that a result answers, and its text

    @property
    def asks(self) -> bool:
        return self.role in ("user", "developer")


def render_deepseek_v4(
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    thinking: bool,
    drop_thinking: bool = True,
    reasoning_effort: str | None = None,
    add_generation_prompt: bool = True,
    response_format: Any = None,
    efforts: Mapping[str, str] = EFFORTS_PREVIEW,
) -> str:
    """The prompt of a conversation, as text with its control tokens spelled out.

    Args:
        messages: OpenAI's, with string contents; besides its roles there is `latest_reminder`. An assistant's may have `reasoning_content`, a
            user's or developer's `task`, and a system's or developer's its own `tools` and `response_format`.
        tools: in OpenAI's form; described in the first system turn, which is made where there is none.
        thinking: let the model reason before it answers, and show it the reasoning of earlier turns that is not dropped.
        drop_thinking: leave out the reasoning before the last question. Reasoning is kept all the same where there are tools.
        reasoning_effort: a name of `efforts`, or None for the weights' default; acts with `thinking` alone.
        add_generation_prompt: end with what begins the answer, when the last message is a question.
        response_format: schema that is shown in the first system turn.
        efforts: the names of efforts that the weights know, each with what it puts before the conversation.

    Raises:
        ConfigurationError: a message, which the error names, can't be rendered, or the effort is unknown.
    """
    if reasoning_effort is not None and reasoning_effort not in efforts:
        raise ConfigurationError(
            f'"reasoning_effort" is {json.dumps(reasoning_effort, ensure_ascii=False)}, which these weights do not know: use {", ".join(efforts)}.',
            param="reasoning_effort",
        )
    turns = _turns(messages)
    if tools or response_format is not None:
        system = next((turn for turn in turns if turn.role == "system"), None)
        if system is None:
            system = _Turn("system", "", "messages")
            turns.insert(0, system)
        system.tools = tools or system.tools
        system.response_format = response_format if response_format is not None else system.response_format
    dropping = thinking and drop_thinking and not any(turn.tools for turn in turns)
    last_question = max((index for index, turn in enumerate(turns) if turn.asks), default=-1)
    if dropping:  # an earlier developer's turn goes with the reasoning that it led to
        turns = [turn for index, turn in enumerate(turns) if turn.role != "developer" or index >= last_question]
        last_question = max((index for index, turn in enumerate(turns) if turn.asks), default=-1)
    prompt = [BOS, efforts[reasoning_effort] if thinking and reasoning_effort is not None else ""]
    for index, turn in enumerate(turns):
        shows_reasoning = thinking and (not dropping or index >= last_question)
        following = turns[index + 1].role if index + 1 < len(turns) else None
        before = turns[index - 1] if index else None
        if turn.role == "assistant":
            if shows_reasoning and not (before is not None and before.task):
                prompt += [turn.reasoning, _THINK_END]
            prompt += [turn.content, _calls(turn), "" if turn.unfinished else EOS]
            continue
        opening = {"user": _USER, "developer": _USER, "latest_reminder": _REMINDER, "system": ""}[turn.role]
        prompt += [opening, turn.content, _notes(turn)]
        if turn.asks and (following in ("assistant", "latest_reminder") or (following is None and add_generation_prompt)):
            prompt.append(_answer_start(turn, _THINK if shows_reasoning else _THINK_END))
    return "".join(prompt)


def _answer_start(turn: _Turn, thought: str) -> str:
    if turn.task is None:
        return _ASSISTANT + thought
    token = _TASKS[turn.task]
    return _ASSISTANT + thought + token if turn.task == "action" else token


def _turns(messages: Sequence[Mapping[str, Any]]) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        place = f"messages[{index}]"
        role = message.get("role")
        if role in ("user", "tool"):
            turn = turns[-1] if turns and turns[-1].role == "user" and turns[-1].task is None else None
            if turn is None:
                turn = _Turn("user", "", place)
                turns.append(turn)
            content = _content(message, place)
            if role == "tool":
                identifier = message.get("tool_call_id")
                turn.blocks.append((identifier if isinstance(identifier, str) else "", f"<tool_result>{content}</tool_result>"))
            else:
                turn.blocks.append((None, content))
                turn.task = _task(message, place)
        elif role in ("system", "developer", "latest_reminder"):
            turn = _Turn(role, _content(message, place), place, tools=message.get("tools") or (), response_format=message.get("response_format"))
            if role == "developer":
                turn.task = _task(message, place)
                if not turn.content:
                    _fail(place, 'has no "content", which a developer\'s needs')
            turns.append(turn)
        elif role == "assistant":
            reasoning = message.get("reasoning_content") or ""
            if not isinstance(reasoning, str):
                _fail(place, 'has a "reasoning_content" that is no string')
            calls = message.get("tool_calls") or ()
            turns.append(_Turn(role, _content(message, place), place, reasoning, calls, unfinished=bool(message.get("wo_eos"))))
        else:
            _fail(place, f"has the role {json.dumps(role, ensure_ascii=False, default=str)}, which DeepSeek-V4 does not know")
    _join_blocks(turns)
    return turns


def _join_blocks(turns: Sequence[_Turn]) -> None:
    """Write the user turns out, with the results in the order of the calls that they answer."""
    order: dict[str, int] = {}
    for turn in turns:
        if turn.role == "assistant" and turn.calls:
            order = {str(call.get("id")): index for index, call in enumerate(turn.calls) if isinstance(call, Mapping)}
        elif turn.role == "user":
            results = iter(sorted((block for block in turn.blocks if block[0] is not None), key=lambda block: order.get(block[0] or "", 0)))
            turn.content = "\n\n".join(text if identifier is None else next(results)[1] for identifier, text in turn.blocks)


def _content(message: Mapping[str, Any], place: str) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if not isinstance(content, str):
        _fail(place, 'has a "content" that is no text')
    return content


def _task(message: Mapping[str, Any], place: str) -> str | None:
    task = message.get("task")
    if task is not None and task not in _TASKS:
        _fail(place, f'has the "task" {json.dumps(task, default=str)}, which is none of {", ".join(_TASKS)}')
    return task


def _notes(turn: _Turn) -> str:
    """The tools and the response format of a system or developer turn."""
    text = ""
    if turn.tools:
        lines = [json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in turn.tools]
        text += "\n\n" + _TOOLS + "".join(f"{line}\n" for line in lines) + _TOOLS_END
    if turn.response_format is not None:
        text += "\n\n" + _RESPONSE_FORMAT + json.dumps(turn.response_format, ensure_ascii=False)
    return text


def _calls(turn: _Turn) -> str:
    if not turn.calls:
        return ""
    lines = []
    for index, call in enumerate(turn.calls):
        place = f"{turn.place}.tool_calls[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            _fail(place, 'has no "function" with a "name"')
        lines.append(f'<{_DSML}invoke name="{function["name"]}">')
        parameters = [_parameter(name, value) for name, value in _arguments(function.get("arguments"), place).items()]
        lines += [*(parameters or [""]), f"</{_DSML}invoke>"]
    return "\n".join(["\n", f"<{_DSML}tool_calls>", *lines, f"</{_DSML}tool_calls>"])


def _parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    text = value if is_text else json.dumps(value, ensure_ascii=False)
    return f'<{_DSML}parameter name="{name}" string="{"true" if is_text else "false"}">{text}</{_DSML}parameter>'


def _arguments(arguments: Any, place: str) -> Mapping[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            _fail(place, 'has "arguments" that are no JSON')
    if not isinstance(arguments, Mapping):
        _fail(place, 'has "arguments" that are no JSON object')
    return arguments


def _fail(place: str, what: str) -> NoReturn:
    raise ConfigurationError(f'"{place}" {what}: correct the message.', param=place)


class DeepseekV4Prompt:
    """`render_deepseek_v4` in the place of a chat template, for these checkpoints come without one."""

    source = ""
    renders_tools = True

    def render(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """The prompt for `messages`, ready to be tokenized without added special tokens.

        Args:
            messages: normalized.
            add_generation_prompt: end with the opening of the assistant's turn.
            tools: tool definitions in OpenAI's form.
            options: `thinking` lets the model reason first, `drop_thinking` leaves out the reasoning of earlier turns. The efforts xhigh and max ask
                for the most that the weights know; the others are their default.

        Raises:
            ConfigurationError: a message, which the error names, can't be rendered.
        """
        return render_deepseek_v4(
            messages,
            tools=tools,
            thinking=options.get("thinking") is True,
            drop_thinking=options.get("drop_thinking") is not False,
            reasoning_effort="max" if options.get("reasoning_effort") in ("xhigh", "max") else None,
            add_generation_prompt=add_generation_prompt,
        )
