"""Calls as one JSON object."""

from __future__ import annotations

import pytest

from pocketllm.text.tool_parsers import JSON_CALLS
from tests.unit.tool_parsers.answers import read


def test_one_object_or_a_list() -> None:
    assert read(JSON_CALLS, ' {"name": "f", "arguments": {"a": [1, "ü"]}}\n') == ("", [("f", {"a": [1, "ü"]})])
    assert read(JSON_CALLS, list('[{"name": "f", "arguments": {}}, {"arguments": {}, "name": "g"}]')) == ("", [("f", {}), ("g", {})])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  \n",
        "Hello {",
        "[]",
        "{",
        '{"name": "f"}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": "{}"}',
        '{"name": "f", "arguments": {}, "more": 1}',
        '{"name": "f", "arguments": {"a": Infinity}}',
        '{"name": "f", "arguments": {}} done',
        '[{"name": "f", "arguments": {}}, 5]',
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text: str) -> None:
    assert read(JSON_CALLS, text) == (text, [])
    assert read(JSON_CALLS, list(text)) == (text, [])


def test_prose_flows() -> None:
    parser = JSON_CALLS.parser([])
    assert parser.feed(" ") == ""
    assert parser.feed("So") == " So"
    assert parser.feed(" {") == " {"
    assert JSON_CALLS.grammar_without_calls() is None
