"""The `response_format` of a chat: which forms are taken, and the JSON Schema that each stands for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.text.json_schema import enforceable_schema
from pocketllm.text.schema_error import SchemaError

_KEYS = {"text": {"type"}, "json_object": {"type"}, "json_schema": {"type", "json_schema"}}
_SCHEMA_KEYS = {"name", "description", "schema", "strict"}
_FORM = 'Send {"type": "json_schema", "json_schema": {"name": "answer", "schema": {…}}}'


def check_response_format(value: Any) -> None:
    """Pass a response format that is free text or that a grammar can hold an answer to.

    Raises:
        ConfigurationError: it has the wrong form, or its schema is no JSON Schema.
        UnsupportedFeatureError: its schema asks for what can't be enforced; the message names the keyword. Both have `param` "response_format".
    """
    if answer_schema(value) is None:
        return


def answer_schema(value: Any) -> dict[str, Any] | None:
    """The schema of the answer as llguidance enforces it, or None where the text is free. Raises as `check_response_format` does."""
    if not isinstance(value, Mapping):
        raise _refusal(value, "a response format is an object", 'Send {"type": "json_object"}, or leave it out')
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in _KEYS:
        raise _refusal(value, "its type is none of text, json_object and json_schema", 'Send {"type": "json_object"}, or leave it out')
    for key in value:
        if key not in _KEYS[kind] and value[key] is not None:
            raise _refusal(value, f"the type {kind} has no key {_summary(key)}", _FORM if kind == "json_schema" else f'Send {{"type": "{kind}"}} alone')
    if kind == "text":
        return None
    return {"type": "object"} if kind == "json_object" else _wrapped_schema(value)


def _wrapped_schema(value: Mapping[str, Any]) -> dict[str, Any]:
    wrapper = value.get("json_schema")
    if not isinstance(wrapper, Mapping):
        raise _refusal(value, 'its "json_schema" is no object that holds the name and the schema', _FORM)
    for key in wrapper:
        if key not in _SCHEMA_KEYS and wrapper[key] is not None:
            raise _refusal(value, f'"json_schema" has no key {_summary(key)}', _FORM)
    name, description, strict = wrapper.get("name"), wrapper.get("description"), wrapper.get("strict")
    if name is not None and not isinstance(name, str):
        raise _refusal(value, 'the "name" is no string', _FORM)
    if description is not None and not isinstance(description, str):
        raise _refusal(value, 'the "description" is no string', _FORM)
    if strict is not None and not isinstance(strict, bool):
        raise _refusal(value, '"strict" is neither true nor false, and the schema is enforced with either', _FORM)
    schema = wrapper.get("schema")
    if not isinstance(schema, Mapping):
        raise _refusal(value, '"json_schema" has no "schema" object, so there is nothing to hold the answer to', _FORM)
    try:
        return enforceable_schema(schema)
    except SchemaError as error:
        raise _refusal(value, f"in its schema, {error.reason}", error.remedy, is_shape=error.is_invalid) from None


def _refusal(value: Any, instead: str, remedy: str, *, is_shape: bool = True) -> ConfigurationError | UnsupportedFeatureError:
    from pocketllm.protocol.fields import refusal  # here, because the table of fields checks with this module

    return refusal("response_format", value, instead, remedy, is_shape=is_shape)


def _summary(value: object) -> str:
    from pocketllm.protocol.fields import summary

    return summary(value)
