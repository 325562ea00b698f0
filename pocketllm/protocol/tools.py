"""The tools of a chat: their form, who may call them, and their description for models that know no tools."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.protocol.conditions import Fault, is_list, unknown_key
from pocketllm.protocol.refusals import summary
from pocketllm.protocol.request import ToolUse

MAX_TOOLS = 128
TOOL_CHOICES = ("none", "auto", "required")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_FORM = 'Send it as {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}'


def are_tools(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
    """An array of function definitions with names of their own."""
    if not is_list(value):
        return False
    if len(value) > MAX_TOOLS:
        return Fault("", value, f"a request has at most {MAX_TOOLS} tools, and these are {len(value)}", "Send fewer tools")
    names: set[str] = set()
    for index, tool in enumerate(value):
        fault = _tool_fault(tool, f"[{index}]")
        if fault is not None:
            return fault
        name = tool["function"]["name"]
        if name in names:
            return Fault(f"[{index}].function.name", name, "an earlier tool has this name", "Send each name once")
        names.add(name)
    return True


def has_no_strict_tool(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
    """No tool asks for arguments that are held to its schema."""
    for index, tool in enumerate(value):
        if tool["function"].get("strict") is True:
            return Fault(f"[{index}].function.strict", True, "arguments are not held to the schema", 'Send "strict" as false, or leave it out')
    return True


def is_tool_choice(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
    """A policy, or the name of a function."""
    if isinstance(value, str):
        return value in TOOL_CHOICES
    if not isinstance(value, Mapping):
        return False
    if value.get("type") != "function":
        return Fault("", value, f"a choice of type {summary(value.get('type'))} is not acted on", 'Send "none", "auto", "required", or name one function')
    function = value.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return Fault("", value, "it names no function", 'Send it as {"type": "function", "function": {"name": "f"}}')
    if extra := unknown_key(value, ("type", "function")) or unknown_key(function, ("name",)):
        return Fault("", value, f"a choice has no {extra}", f"Leave {extra} out")
    return True


def can_be_chosen(value: Any, body: Mapping[str, Any]) -> bool | Fault:
    """What has to be called is one of the tools."""
    if value in ("auto", "none"):
        return True
    tools = body.get("tools")
    if not tools:
        return Fault("", value, "the request has no tools, so there is nothing to call", 'Send "tools", or leave "tool_choice" out')
    if value == "required":
        return True
    name = value["function"]["name"]
    if any(tool["function"]["name"] == name for tool in tools):
        return True
    return Fault("", value, f"no tool has the name {summary(name)}", 'Name one of the functions in "tools"')


def tool_use(body: Mapping[str, Any]) -> ToolUse | None:
    """The tools of a body that `check_fields` passed. No tools, null and an empty array are the same. Shares no object with `body`."""
    tools = body.get("tools")
    if not tools:
        return None
    choice = body.get("tool_choice") or "auto"
    name = None if isinstance(choice, str) else choice["function"]["name"]
    definitions = tuple(_definition(tool) for tool in tools)
    return ToolUse(definitions, choice if name is None else "function", name, body.get("parallel_tool_calls") is not False)


def template_tools(tools: ToolUse) -> list[dict[str, Any]]:
    """The definitions as a chat template is given them: `strict` is between the caller and this server, and no model was trained on it."""
    shown = ({key: value for key, value in tool["function"].items() if key != "strict"} for tool in tools.definitions)
    return [{"type": "function", "function": copy.deepcopy(function)} for function in shown]


def with_described_tools(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with `tools` described in the system turn, for templates that ignore tools.

    Args:
        messages: normalized; not changed.
        tools: the definitions that may be called, in OpenAI's form; at least one.
    """
    text = "\n\n".join(
        (
            "You can call these tools, each with the JSON schema of its arguments:",
            *(_description(tool["function"]) for tool in tools),
            "To call a tool, answer with JSON alone, with the values that the user gives, copied exactly:\n"
            '{"name": "tool name", "arguments": {"argument name": value}}',
        )
    )
    first = messages[0] if messages and messages[0]["role"] in ("system", "developer") else None
    rest = [dict(message) for message in (messages if first is None else messages[1:])]
    if first is None:
        return [{"role": "system", "content": text}, *rest]
    return [{**first, "content": f"{first['content']}\n\n{text}" if first["content"] else text}, *rest]


def _tool_fault(tool: object, where: str) -> Fault | None:
    if not isinstance(tool, Mapping):
        return Fault(where, tool, "a tool is an object that defines one function", _FORM)
    if tool.get("type") != "function":
        return Fault(f"{where}.type", tool.get("type"), 'the one type of tool is "function"', 'Send "type" as "function"')
    if extra := unknown_key(tool, ("type", "function")):
        return Fault(where, tool, f"a tool has no {extra}", f"Leave {extra} out")
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return Fault(f"{where}.function", function, "it defines no function", _FORM)
    name = function.get("name")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        return Fault(f"{where}.function.name", name, "a name has 1 to 64 letters, digits, dots, dashes or underscores", "Send such a name")
    if extra := unknown_key(function, ("name", "description", "parameters", "strict")):
        return Fault(f"{where}.function", function, f"a function has no {extra}", f"Leave {extra} out")
    forms = (("description", str, "a string"), ("parameters", Mapping, "an object, the JSON schema of the arguments"), ("strict", bool, "true or false"))
    for key, form, words in forms:
        if function.get(key) is not None and not isinstance(function[key], form):
            return Fault(f"{where}.function.{key}", function[key], f"it is {words}", f'Send "{key}" as {words}, or leave it out')
    return None


def _definition(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {key: copy.deepcopy(value) for key, value in tool["function"].items() if value is not None}}


def _description(function: Mapping[str, Any]) -> str:
    """Name, purpose and schema in lines of their own: a small model that is shown them as one JSON object copies it into its call."""
    head = f"{function['name']}: {function['description']}" if function.get("description") else function["name"]
    return "\n".join([head, *([json.dumps(function["parameters"], ensure_ascii=False)] if function.get("parameters") else [])])
