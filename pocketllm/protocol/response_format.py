"""The JSON Schema that the `response_format` of a chat stands for. Its outer form is checked by the table of fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.protocol.refusals import refusal
from pocketllm.text.json_schema import enforceable_schema
from pocketllm.text.schema_error import SchemaError


def answer_schema(value: Mapping[str, Any]) -> dict[str, Any] | None:
    """The schema of the answer as llguidance enforces it, or None where the text is free.

    Args:
        value: a response format that `check_fields` passed.

    Raises:
        ConfigurationError: its schema is no JSON Schema.
        UnsupportedFeatureError: its schema asks for what can't be enforced; the message names the keyword. Both have `param` "response_format".
    """
    if value["type"] == "text":
        return None
    try:
        return enforceable_schema({"type": "object"} if value["type"] == "json_object" else value["json_schema"]["schema"])
    except SchemaError as error:
        raise refusal("response_format", value, f"in its schema, {error.reason}", error.remedy, is_shape=error.is_invalid) from None
