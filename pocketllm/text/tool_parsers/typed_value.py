"""What an argument that is written as bare text means, by its schema."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from pocketllm.text.tool_parsers.call_json import read_json, read_python
from pocketllm.text.tool_parsers.cursor import SPACE
from pocketllm.text.tool_parsers.tool_schema import ToolSchema, json_type, literals

_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]{1,4})?")
_BOOLEANS = {"true": True, "True": True, "false": False, "False": False}
_NULLS = ("null", "None")
_UNREADABLE = object()


def reading_order(types: tuple[str, ...]) -> tuple[str, ...]:
    """The types that a text is tried as, in this order; what follows "string" is never reached.

    null comes first, since any text is a string as well, and then object and array, which no text is by accident. The others keep the schema's
    order: `["integer", "string"]` reads 5 as a number, and `["string", "integer"]` as text.
    """
    first = [name for name in ("null", "object", "array") if name in types]
    return (*first, *(name for name in types if name not in first))


def typed_value(text: str, schema: Any, tool: ToolSchema) -> Any:
    """The value of `text` under a parameter's schema: the text itself where the schema declares no type, or the text is of none of its types."""
    schema = tool.resolve(schema)
    if isinstance(schema, Mapping) and (members := literals(schema)) is not None:
        if text in (member for member in members if isinstance(member, str)):
            return text
        for name in dict.fromkeys(json_type(member) for member in members if not isinstance(member, str)):
            value = _read(text, name)
            if any(_same(value, member) for member in members):
                return value
    for name in reading_order(tool.types(schema)):
        if name == "string":
            return text
        value = _read(text, name)
        if value is not _UNREADABLE:
            return value
    return text


def _read(text: str, name: str) -> Any:
    bare = text.strip(SPACE)
    if name == "null":
        return None if bare in _NULLS else _UNREADABLE
    if name == "boolean":
        return _BOOLEANS.get(bare, _UNREADABLE)
    if name in ("integer", "number"):
        return _read_number(bare, whole=name == "integer")
    kind = dict if name == "object" else list
    for read in (read_json, read_python):
        try:
            value = read(bare)
        except ValueError:
            continue
        if isinstance(value, kind):
            return value
    return _UNREADABLE


def _read_number(text: str, *, whole: bool) -> Any:
    match = _NUMBER.fullmatch(text)
    if match is None or len(text) > 4000:  # Python's own limit is 4,300 digits
        return _UNREADABLE
    if match[1] is None and match[2] is None:
        return int(text)
    if whole:
        exact = Decimal(text)
        if exact.adjusted() > 400 or exact != exact.to_integral_value():
            return _UNREADABLE
        return int(exact)
    value = float(text)
    return value if math.isfinite(value) else _UNREADABLE


def _same(value: Any, member: Any) -> bool:
    """Equality of JSON, where 1 is 1.0 but not true."""
    return isinstance(value, bool) == isinstance(member, bool) and bool(value == member)
