"""However an answer is cut into pieces, it is read the same; and what is written is what is read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.tool_parsers.answers import SYNTAXES, read, tool, write_dsml, write_qwen

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,12}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=("Cs",)), max_size=20) | st.sampled_from(
    ["", "\n", "01234", "null", "True", "</parameter>", "<tool_call>", "🦀 é 中文", "</function>\n</tool_call>", '"', "\\"]
)
NUMBERS = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
ARGUMENTS = st.dictionaries(NAMES, JSON, max_size=4)
CALLS = st.lists(st.tuples(NAMES, ARGUMENTS), min_size=1, max_size=3)
PROSE = st.text(st.sampled_from('ab <>\n｜é🦀{}[]"')) | st.sampled_from(["<tool_", "<tool_call>", "<｜DSML", "text\n\n", "\n"])  # noqa: RUF001


def types_of(value: Any) -> str:
    names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names[type(value)]


def written(syntax: str, calls: list[tuple[str, dict[str, Any]]], gap: str = "\n") -> str:
    if syntax == "qwen":
        return gap.join(write_qwen(name, arguments) for name, arguments in calls)
    if syntax == "dsml":
        return write_dsml(*calls)
    return json.dumps([{"name": name, "arguments": arguments} for name, arguments in calls], ensure_ascii=False)


@st.composite
def answers(draw: st.DrawFn, syntax: str) -> str:
    text = draw(PROSE) + written(syntax, draw(CALLS), draw(st.sampled_from(["", "\n", " \n"])))
    damage = draw(st.sampled_from(["none", "none", "cut", "tail", "hole"]))
    at = draw(st.integers(0, len(text)))
    if damage == "cut":
        return text[:at]
    if damage == "tail":
        return text + draw(PROSE)
    return text[:at] + text[at + 1 :] if damage == "hole" else text


@st.composite
def pieces(draw: st.DrawFn, text: str) -> list[str]:
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=30)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@pytest.mark.parametrize("syntax", SYNTAXES)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_cutting_reads_the_same(syntax: str, data: st.DataObject) -> None:
    text = data.draw(answers(syntax))
    tools = [tool("f", x={"type": "array"})]
    whole = read(SYNTAXES[syntax], text, tools)
    assert read(SYNTAXES[syntax], data.draw(pieces(text)), tools) == whole
    assert read(SYNTAXES[syntax], list(text), tools) == whole
    if not whole[1]:
        assert whole[0] == text
    assert text.startswith(whole[0])


def clear(syntax: str, value: Any) -> bool:
    """Whether no text of the value looks like the end of one."""
    return not isinstance(value, str) or {"qwen": "</parameter>", "dsml": "</｜DSML｜parameter>", "json": "\0none"}[syntax] not in value  # noqa: RUF001


@pytest.mark.parametrize("syntax", SYNTAXES)
@settings(max_examples=150, deadline=None)
@given(calls=CALLS)
def test_what_is_written_is_read(syntax: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    calls = [(f"{name}{index}", {key: value for key, value in arguments.items() if clear(syntax, value)}) for index, (name, arguments) in enumerate(calls)]
    tools = [tool(name, **{key: {"type": types_of(value)} for key, value in arguments.items()}) for name, arguments in calls]
    content, found = read(SYNTAXES[syntax], written(syntax, calls), tools)
    assert (content, found) == ("", calls)
    assert json.dumps(found) == json.dumps(calls)  # the order of keys, and 1 is not true
