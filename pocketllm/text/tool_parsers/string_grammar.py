"""Lark expressions of bare text that a string's schema allows."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pocketllm.protocol.refusals import summary

_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_DATE = (
    "[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"  # 29 February is left out
)
_TIME = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "uuid": "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}",
    "ipv4": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "hostname": rf"{_LABEL}(?:\.{_LABEL}){{0,10}}",
    "email": rf"[A-Za-z0-9_+-]{{1,32}}(?:\.[A-Za-z0-9_+-]{{1,32}}){{0,4}}@{_LABEL}(?:\.{_LABEL}){{1,5}}",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]{0,20}:\/\/[A-Za-z0-9._~:\/?#@!$&'()*+,;=%-]{1,2000}",
}
_MAX_LENGTH = 100_000
_MOST_CHARACTERS = 2_000  # a larger maxLength is taken for this: a character costs about ten of the 30,000 states that the limits of text/grammar.py allow
# JSON Schema's patterns are ECMAScript's, whose classes are ASCII; llguidance's are Unicode's.
_ASCII_CLASSES = {"d": "[0-9]", "w": "[A-Za-z0-9_]", "D": "[^0-9]", "W": "[^A-Za-z0-9_]"}
_TOKEN = re.compile(r"\\u([0-9a-fA-F]{4})|\\c([A-Za-z])|\\(.)|(.)", re.DOTALL)


class InvalidPattern(Exception):
    """A string's schema has a keyword that bare text can't be held to; the message names it."""


def string_expression(schema: Mapping[str, Any], without: str) -> str:
    """A Lark expression, for a terminal, of the strings that `schema` allows and that do not hold `without`.

    Raises:
        InvalidPattern: see there.
    """
    low, high = schema.get("minLength", 0), schema.get("maxLength")
    for key, length in (("minLength", low), ("maxLength", high)):
        if key in schema and (isinstance(length, bool) or not isinstance(length, int | float) or not 0 <= length <= _MAX_LENGTH or length != int(length)):
            raise InvalidPattern(f'"{key}" that is no whole number from 0 to {_MAX_LENGTH}')
    if high is not None and high < low:
        raise InvalidPattern('"maxLength" below "minLength"')
    parts = [text_without(without)]
    if low or high is not None:
        if low > _MOST_CHARACTERS:
            raise InvalidPattern(f'a "minLength" above {_MOST_CHARACTERS}')
        parts.append(f"/(?s:.{{{int(low)},{'' if high is None else min(int(high), _MOST_CHARACTERS)}}})/")
    if "pattern" in schema:
        parts.append(f"/{_anywhere(schema['pattern'])}/")
    if "format" in schema:
        if not isinstance(schema["format"], str) or schema["format"] not in _FORMATS:
            raise InvalidPattern(f'the "format" {summary(schema["format"])}')
        parts.append(f"/{_FORMATS[schema['format']]}/")
    return f"({' & '.join(parts)})"


def text_without(tag: str) -> str:
    """A Lark expression of any text that does not hold `tag`, which starts with "<" and has no other.

    It is spelled out, because with a complement llguidance gives up on expressions of long strings, and can't always tell that one has ended.
    """
    rest = tag[1:]
    assert tag[0] == "<" and "<" not in rest
    escaped = [{"/": r"\/", "|": r"\|"}.get(character, character) for character in rest]
    prefix = ""  # a beginning of the tag, without its "<", that is not all of it
    for character in reversed(escaped[:-1]):
        prefix = f"(?:{character}{prefix})?"
    broken_off = "|".join(f"{''.join(escaped[:length])}[^{escaped[length]}<]" for length in range(len(rest)))
    return f"/(?:[^<]|(?:<{prefix})*<(?:{broken_off}))*(?:<{prefix})*/"


def _anywhere(pattern: Any) -> str:
    """An expression of the texts within which a pattern of JSON Schema matches, which need not be at their start or end."""
    if not isinstance(pattern, str):
        raise InvalidPattern('a "pattern" that is no string')
    alternatives: list[list[str]] = [[]]
    depth, in_class = 0, False
    for token in _TOKEN.finditer(pattern):
        hexadecimal, control, escape, plain = token.groups()
        piece = token[0]
        if hexadecimal:
            piece = re.escape(chr(int(hexadecimal, 16))) if not 0xD800 <= int(hexadecimal, 16) < 0xE000 else piece
        elif control:
            piece = rf"\x{ord(control) % 32:02x}"
        elif escape:
            if (escape in ("b", "B") and not in_class) or (escape.isdigit() and escape != "0"):
                raise InvalidPattern(f'a "pattern" with \\{escape}')
            piece = _ASCII_CLASSES.get(escape, piece)
            piece = {"/": r"\/", "0": r"\x00", "b": r"\x08"}.get(escape, piece)
        elif in_class:
            in_class = plain != "]"
            piece = r"\[" if plain == "[" else (rf"\{plain}" if plain in "&~/" else piece)
        elif plain == "[":
            in_class = True
        elif pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), token.start()):
            raise InvalidPattern('a "pattern" that looks ahead or behind')
        elif plain in "()":
            depth += 1 if plain == "(" else -1
        elif plain == "|" and depth == 0:
            alternatives.append([])
            continue
        elif plain == "/":
            piece = r"\/"
        alternatives[-1].append({"\n": r"\n", "\r": r"\r"}.get(piece, piece))
    whole = []
    for pieces in alternatives:
        at_start, at_end = pieces[:1] == ["^"], pieces[-1:] == ["$"]
        inner = "".join(pieces[at_start : len(pieces) - at_end])
        whole.append(f"{'' if at_start else '(?s:.*)'}(?:{inner}){'' if at_end else '(?s:.*)'}")
    if any("^" in pieces[1:] or "$" in pieces[:-1] for pieces in map(_outside_classes, alternatives)):
        raise InvalidPattern('a "pattern" with ^ or $ within it')
    return f"(?:{'|'.join(whole)})"


def _outside_classes(pieces: list[str]) -> list[str]:
    outside, in_class = [], False
    for piece in pieces:
        if in_class:
            in_class = piece != "]"
            outside.append("")
        else:
            in_class = piece == "["
            outside.append(piece)
    return outside
