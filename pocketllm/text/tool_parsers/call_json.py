"""JSON as calls hold it: strict to read, and always text that a client can decode."""

from __future__ import annotations

import json
import math
import re
import uuid
from collections.abc import Mapping
from typing import Any, NoReturn

from pocketllm.outputs import ToolCall

_PYTHON_TOKENS = re.compile(r"""'(?P<single>(?:[^'\\\n]|\\.)*)'|"(?P<double>(?:[^"\\\n]|\\.)*)"|(?P<word>\b(?:True|False|None)\b)""", re.DOTALL)
_PYTHON_ESCAPES = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "v": "\v", "a": "\a", "0": "\0", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null"}


def read_json(text: str) -> Any:
    """The value that `text` is.

    Raises:
        ValueError: it is no JSON, or holds NaN, Infinity or a number that no double and no integer of 4,300 digits can be.
    """
    try:
        return json.loads(text, parse_float=_finite, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_python(text: str) -> Any:
    """The value of a Python literal of lists, dictionaries, strings, numbers, True, False and None, as str() writes it.

    Raises:
        ValueError: it is none.
    """
    return read_json(_PYTHON_TOKENS.sub(_json_token, text))


def write_json(value: Any) -> str:
    """`value` as JSON with ", " and ": " between its parts, keys in their order and characters as they are.

    A lone surrogate, which no UTF-8 text can hold, makes it all ASCII.
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False)
    return text


def new_call(name: str, arguments: Mapping[str, Any]) -> ToolCall:
    """A call with an id of its own."""
    return ToolCall(id=f"call_{uuid.uuid4().hex[:24]}", name=name, arguments=write_json(arguments))


def _finite(literal: str) -> float:
    value = float(literal)
    if not math.isfinite(value):
        raise ValueError(f"{literal} is too large")
    return value


def _refuse(literal: str) -> NoReturn:
    raise ValueError(f"{literal} is no JSON")


def _json_token(token: re.Match[str]) -> str:
    if token["word"]:
        return _WORDS[token["word"]]
    quoted = token["single"] if token["single"] is not None else token["double"]
    return json.dumps(_PYTHON_ESCAPES.sub(_escaped, quoted))


def _escaped(escape: re.Match[str]) -> str:
    digits = escape[1] or escape[2] or escape[3]
    if digits:
        return chr(int(digits, 16)) if int(digits, 16) < 0x110000 else escape[0]
    return _ESCAPED.get(escape[4], escape[0])
