"""Lark expressions of bare text that a string's schema allows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.text.schema_format import FORMATS
from pocketllm.text.schema_keywords import is_annotation
from pocketllm.text.schema_pattern import read_pattern

_MOST_CHARACTERS = 2_000  # a larger maxLength is taken for this: a character costs about ten of the 30,000 states that the limits of text/grammar.py allow

_STRING_KEYWORDS = ("type", "minLength", "maxLength", "pattern", "format", "allOf")


def string_expression(schema: Mapping[str, Any], without: str) -> str:
    """A Lark expression, for a terminal, of the strings that `schema` allows and that do not hold `without`.

    Args:
        schema: of a string; one that `enforceable_schema` passed.
        without: a tag.
    """
    parts = [text_without(without)]
    low, high = int(schema.get("minLength", 0)), schema.get("maxLength")
    if low or high is not None:
        parts.append(f"/(?s:.{{{low},{'' if high is None else min(int(high), _MOST_CHARACTERS)}}})/")
    if "pattern" in schema:
        parts.append(_terminal(read_pattern(schema["pattern"]).regex))
    if schema.get("format") in FORMATS:  # those of numbers say nothing of text
        parts.append(_terminal(FORMATS[schema["format"]]))
    parts += [string_expression(part, without) for part in schema.get("allOf", ()) if isinstance(part, Mapping)]
    return f"({' & '.join(parts)})"


def is_plain_string(schema: Any) -> bool:
    """Whether `string_expression` says all that `schema` does of a string."""
    return schema is True or (isinstance(schema, Mapping) and all(keyword in _STRING_KEYWORDS or is_annotation(keyword) for keyword in schema))


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


def _terminal(regex: str) -> str:
    escaped = regex.replace("/", r"\/")
    return f"/{escaped}/"
