"""What one chat template does with tools, calls and efforts, found out by rendering small conversations; and messages put into a form that it keeps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2.nodes

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.conditions import REASONING_EFFORTS
from pocketllm.protocol.messages import call_arguments

Render = Callable[..., str]  # (messages, **variables); raises ConfigurationError

_USER = {"role": "user", "content": "probe question"}
_TOOL = {"type": "function", "function": {"name": "probe_tool", "description": "probe", "parameters": {"type": "object", "properties": {}}}}
_RESULT = {"role": "tool", "tool_call_id": "probe00id", "content": "probe result"}  # Mistral's templates ask for ids of nine characters
_SYNONYMS = {"max": "xhigh", "xhigh": "max", "minimal": "low"}


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """Facts of one template.

    Args:
        renders_tools: tool definitions show in the prompt.
        renders_tool_calls: so do the calls of an earlier assistant turn.
        renders_tool_results: so do messages of role "tool".
        renders_developer: the template has a place of its own for messages of role "developer".
        text_arguments: the template takes a call's arguments as a string alone.
        efforts: for each effort that a caller may name the word that the template knows it by; None leaves the variable out.
    """

    renders_tools: bool
    renders_tool_calls: bool
    renders_tool_results: bool
    renders_developer: bool
    text_arguments: bool
    efforts: Mapping[str, str | None]


def find_traits(render: Render, tree: jinja2.nodes.Template) -> TemplateTraits:
    """The traits of the template that `render` renders and `tree` is the syntax of."""
    plain, with_tools = _try(render, [_USER]), _try(render, [_USER], tools=[_TOOL])
    renders_calls, text_arguments = _calls_shown(render)
    earlier = _call({}) if renders_calls and not text_arguments else _call("{}") if renders_calls else {"role": "assistant", "content": "probe answer"}
    developer = [{"role": "developer", "content": "probe order"}, _USER]
    return TemplateTraits(
        renders_tools=with_tools is not None and with_tools != plain,
        renders_tool_calls=renders_calls,
        renders_tool_results=_shows(_try(render, [_USER, earlier, _RESULT]), "probe result"),
        renders_developer="developer" in _texts(tree) and _shows(_try(render, developer), "probe order"),
        text_arguments=text_arguments,
        efforts=_efforts(render, tree),
    )


def adapt(messages: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> list[dict[str, Any]]:
    """A copy of normalized `messages` that the template renders whole: what it would drop or refuse becomes text that it keeps.

    Calls that it would drop become lines of JSON in the assistant's turn, and results that it would drop a turn of the user.
    """
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    is_open = False  # whether the last turn holds results, so that the user's next words join it: some templates ask for turns that alternate
    for message in messages:
        role, calls = message.get("role"), message.get("tool_calls") or ()
        names |= {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
        if role == "tool" and not traits.renders_tool_results:
            message = {"role": "user", "content": _result_text(message, names)}
        elif role == "developer" and not traits.renders_developer:
            message = {**message, "role": "system"}
        elif calls:
            message = _with_calls(message, calls, traits)
        if is_open and message.get("role") == "user":
            found[-1]["content"] += f"\n\n{message['content']}"
        else:
            found.append(dict(message))
        is_open = message.get("role") == "user" and (role == "tool" or (is_open and role == "user"))
    return found


def _with_calls(message: Mapping[str, Any], calls: Sequence[Mapping[str, Any]], traits: TemplateTraits) -> dict[str, Any]:
    parsed = [(call, call["function"]["name"], call_arguments(call["function"].get("arguments")) or {}) for call in calls]
    if not traits.renders_tool_calls:
        lines = [json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for _, name, arguments in parsed]
        rest = {key: value for key, value in message.items() if key != "tool_calls"}
        return {**rest, "content": "\n".join([*([message["content"]] if message.get("content") else []), *lines])}
    shown = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False) if traits.text_arguments else arguments}}
        for call, _, arguments in parsed
    ]
    return {**message, "tool_calls": shown}


def _result_text(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    name = names.get(message.get("tool_call_id", ""))
    return f"The call of {name} returned:\n{message['content']}" if name else f"The call returned:\n{message['content']}"


def _call(arguments: object) -> dict[str, Any]:
    call = {"id": _RESULT["tool_call_id"], "type": "function", "function": {"name": "probe_call", "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def _calls_shown(render: Render) -> tuple[bool, bool]:
    """Whether calls show in the prompt, and whether only with arguments that are a text."""
    for arguments, is_text in (({"probe_argument": "probe value"}, False), ('{"probe_argument": "probe value"}', True)):
        for chat in ([_USER, _call(arguments), _RESULT], [_USER, _call(arguments)]):
            text = _try(render, chat)
            if _shows(text, "probe_call") and _shows(text, "probe value"):
                return True, is_text
    return False, False


def _efforts(render: Render, tree: jinja2.nodes.Template) -> dict[str, str | None]:
    known = _compared_efforts(tree)
    takes = {effort: _try(render, [_USER], reasoning_effort=effort, enable_thinking=True, thinking=True) is not None for effort in REASONING_EFFORTS}
    words = [effort for effort in REASONING_EFFORTS if effort in known and effort != "none" and takes[effort]]
    found = {effort: _nearest(effort, words, takes) for effort in REASONING_EFFORTS if effort != "none"}
    return {"none": "none" if "none" in known and takes["none"] else None, **found}


def _nearest(effort: str, words: Sequence[str], takes: Mapping[str, bool]) -> str:
    """The word for `effort`, given those that the template compares with, and what it renders without a refusal."""
    if effort in words:
        return effort
    if _SYNONYMS.get(effort) in words:
        return _SYNONYMS[effort]
    rank = REASONING_EFFORTS.index
    if words and rank(effort) > rank(words[-1]):
        return words[-1]
    if takes[effort]:  # a level between those that change the prompt, such as a default without words of its own
        return effort
    others = words or [other for other, is_taken in takes.items() if is_taken and other != "none"]
    return min(others, key=lambda other: (abs(rank(other) - rank(effort)), -rank(other)), default=effort)


def _compared_efforts(tree: jinja2.nodes.Template) -> set[str]:
    """Efforts that the template names where it looks at reasoning_effort, or at a variable made of it."""
    names = {"reasoning_effort"}
    for assignment in [*tree.find_all(jinja2.nodes.Assign)] * 2:  # twice, for a variable made of such a variable
        if isinstance(assignment.target, jinja2.nodes.Name) and _mentions(assignment.node, names):
            names.add(assignment.target.name)
    looks = tree.find_all((jinja2.nodes.Compare, jinja2.nodes.Filter, jinja2.nodes.Getitem))
    return {text for node in looks if _mentions(node, names) for text in _texts(node)} & set(REASONING_EFFORTS)


def _mentions(node: jinja2.nodes.Node, names: set[str]) -> bool:
    return (isinstance(node, jinja2.nodes.Name) and node.name in names) or any(name.name in names for name in node.find_all(jinja2.nodes.Name))


def _texts(node: jinja2.nodes.Node) -> Iterator[str]:
    return (constant.value for constant in node.find_all(jinja2.nodes.Const) if isinstance(constant.value, str))


def _try(render: Render, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str | None:
    """The prompt, or None where the template refuses."""
    try:
        return render(messages, **variables)
    except ConfigurationError:
        return None


def _shows(text: str | None, part: str) -> bool:
    return text is not None and part in text
