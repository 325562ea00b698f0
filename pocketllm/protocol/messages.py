"""Chat messages: checked, and brought into the one form that chat templates read."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.refusals import checked_text, missing, refusal, summary

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")  # the first one sent wins
_FORM = 'Send "messages" as an array such as [{"role": "user", "content": "Hi"}]'
_CALL_FORM = 'Send it as {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}'
_INERT_PART_KEYS = ("type", "text", "cache_control", "annotations")


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as a chat template reads them: content is a string, reasoning is "reasoning_content", null keys are left out.

    The caller's objects are copied, never changed.

    Raises:
        ConfigurationError, UnsupportedFeatureError: naming the message and the key at fault; `param` is "messages" or a path such as "messages[2].content".
    """
    if messages is None:
        raise missing("messages", "a conversation has at least one message", _FORM)
    if not isinstance(messages, (list, tuple)):
        raise refusal("messages", messages, "a conversation is an array of messages", _FORM, is_shape=True)
    if not messages:
        raise refusal("messages", messages, "a conversation has at least one message", _FORM, is_shape=True)
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def render_role_content(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Normalized messages as `role: content` lines, for checkpoints without a chat template."""
    lines = [f"{'system' if message['role'] == 'developer' else message['role']}: {message['content']}" for message in messages]
    return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)


def call_arguments(arguments: object) -> dict[str, Any] | None:
    """The arguments of an earlier call as an object, or None if they are none. Null, "" and "null" are no arguments."""
    if isinstance(arguments, str):
        if not arguments.strip():
            return {}
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        return {}
    return dict(arguments) if isinstance(arguments, Mapping) else None


def _normalize(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise refusal(where, message, "a message is an object with a role and a content", 'Send it as {"role": "user", "content": "Hi"}', is_shape=True)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refusal(f"{where}.role", role, "no chat template knows such a role", f"Send one of {', '.join(ROLES)}", is_shape=True)
    found: dict[str, Any] = {"role": role, "content": _content(message.get("content"), role, f"{where}.content")}
    for key, value in message.items():
        if value is None or key in ("role", "content"):
            continue
        kept = _extra(key, value, role, f"{where}.{key}")
        if kept is not None and kept[0] not in found:
            found[kept[0]] = kept[1]
    if role == "tool" and "tool_call_id" not in found:
        raise refusal(f"{where}.tool_call_id", None, "a tool message answers one call", "Send the id of that call", is_shape=True)
    return found


def _extra(key: object, value: Any, role: str, where: str) -> tuple[str, Any] | None:
    """What is kept of one key beside role and content, or None where it changes nothing. Raises where something would have to act on it."""
    if key == "name":
        return "name", _text(value, where)
    if key == "tool_call_id" and role == "tool":
        if not isinstance(value, str) or not value:
            raise refusal(where, value, "it is the id of the call that this message answers", "Send it as a string", is_shape=True)
        return "tool_call_id", checked_text(value, where)
    if role == "assistant":
        if key == "tool_calls":
            calls = _calls(value, where)
            return ("tool_calls", calls) if calls else None
        if key in REASONING_KEYS:
            return "reasoning_content", _text(value, where)
        if key == "refusal":  # an answer's own; it is not part of what the model said
            _text(value, where)
            return None
    if key in ("annotations", "tool_calls") and value == []:
        return None
    if key in ("prefix", "partial") and value is False:
        return None
    if key in ("audio", "function_call"):
        raise refusal(where, value, "only text and tool calls reach the model", f"Leave {summary(key)} out", is_shape=False)
    raise refusal(where, value, f"nothing would act on it in a message of role {summary(role)}", f"Leave {summary(str(key))} out", is_shape=True)


def _text(value: object, where: str) -> str:
    if not isinstance(value, str):
        raise refusal(where, value, "it is a text", "Send it as a string, or leave it out", is_shape=True)
    return checked_text(value, where)


def _calls(value: object, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, (list, tuple)):
        raise refusal(where, value, "tool calls are an array", "Send an array, or leave it out", is_shape=True)
    return [_call(call, f"{where}[{index}]") for index, call in enumerate(value)]


def _call(call: object, where: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise refusal(where, call, "a tool call is an object", _CALL_FORM, is_shape=True)
    if call.get("type", "function") != "function":
        raise refusal(f"{where}.type", call["type"], 'the one type of call is "function"', _CALL_FORM, is_shape=True)
    function = call.get("function")
    if not isinstance(function, Mapping):
        raise refusal(f"{where}.function", function, "a call names a function", _CALL_FORM, is_shape=True)
    _refuse_others(call, ("id", "type", "function", "index"), where)  # a client that joined a stream's deltas sends their index
    _refuse_others(function, ("name", "arguments"), f"{where}.function")
    call_id, name = call.get("id"), function.get("name")
    if not isinstance(call_id, str) or not call_id:
        raise refusal(f"{where}.id", call_id, "a call has an id", "Send the id that the answer gave it", is_shape=True)
    if not isinstance(name, str) or not name:
        raise refusal(f"{where}.function.name", name, "a call names a function", _CALL_FORM, is_shape=True)
    arguments = function.get("arguments")
    if call_arguments(arguments) is None:
        raise refusal(
            f"{where}.function.arguments",
            arguments,
            "arguments are a JSON object",
            'Send one, as an object or as the string that spells it, such as "{}"',
            is_shape=True,
        )
    if isinstance(arguments, str):
        checked_text(arguments, f"{where}.function.arguments")
    kept = "{}" if arguments is None or (isinstance(arguments, str) and arguments.strip() in ("", "null")) else copy.deepcopy(arguments)
    return {
        "id": checked_text(call_id, f"{where}.id"),
        "type": "function",
        "function": {"name": checked_text(name, f"{where}.function.name"), "arguments": kept},
    }


def _refuse_others(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key, item in value.items():
        if key not in known and item is not None:
            raise refusal(f"{where}.{key}", item, "nothing would act on it", f"Leave {summary(str(key))} out", is_shape=True)


def _content(content: object, role: str, where: str) -> str:
    if content is None:
        if role == "assistant":
            return ""
        raise refusal(where, None, f"a message of role {summary(role)} has a content", "Send the content as a string", is_shape=True)
    if isinstance(content, str):
        return checked_text(content, where)
    if not isinstance(content, (list, tuple)):
        raise refusal(where, content, "a content is a string, or an array of text parts", "Send the content as a string", is_shape=True)
    return "\n".join(_part(part, role, f"{where}[{index}]") for index, part in enumerate(content))


def _part(part: object, role: str, where: str) -> str:
    if not isinstance(part, Mapping):
        raise _not_text(where, part, "a part is an object with a type")
    kind = part.get("type")
    if kind == "refusal" and role == "assistant":
        _refuse_others(part, ("type", "refusal"), where)
        return _text(part.get("refusal"), f"{where}.refusal")
    if kind != "text":
        raise _not_text(where, part, f"a part of type {summary(kind)} is not acted on, since only text reaches the model")
    if not isinstance(part.get("text"), str):
        raise refusal(f"{where}.text", part.get("text"), "a text part holds a string", 'Send "text" as a string', is_shape=True)
    _refuse_others(part, _INERT_PART_KEYS, where)
    return checked_text(part["text"], f"{where}.text")


def _not_text(where: str, part: object, why: str) -> ConfigurationError | UnsupportedFeatureError:
    return refusal(where, part, why, 'Send parts of the form {"type": "text", "text": "Hi"}', is_shape=False)
