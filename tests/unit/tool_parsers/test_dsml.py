"""DeepSeek-V4's calls."""

# ruff: noqa: RUF001 (the bars of the control tokens are full-width ones)

from __future__ import annotations

import pytest

from tests.unit.tool_parsers.answers import DSML, read, write_dsml

CALL = write_dsml(("f", {"s": "a\nb", "n": 3, "o": {"x": [True, None]}}))


def test_calls_with_text_and_json_arguments() -> None:
    text = write_dsml(("f", {"s": " 1", "n": 1.5, "l": ["ü"]}), ("g", {}))
    assert text.startswith("\n\n<｜DSML｜tool_calls>\n")
    assert read(DSML, "Sure." + text) == ("Sure.", [("f", {"s": " 1", "n": 1.5, "l": ["ü"]}), ("g", {})])
    assert read(DSML, text.lstrip() + "\n")[1] == read(DSML, "\n\n\n" + text)[1] != []


@pytest.mark.parametrize(
    "text",
    [
        CALL + " done",
        CALL + CALL,
        CALL.replace('string="true"', 'string="yes"'),
        CALL.replace('string="true"', ""),
        CALL.replace('string="true"', 'string="false"'),
        CALL.replace("3<", "NaN<"),
        CALL.replace("3<", "1e400<"),
        CALL.replace("3<", "<"),
        CALL.replace('"n"', '"s"'),
        CALL.replace('"f"', '""'),
        "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>",
        '<｜DSML｜invoke name="f">\n</｜DSML｜invoke>',
        "<｜DSML｜tool_calls> are a syntax.",
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text: str) -> None:
    assert read(DSML, text) == (text, [])
    assert read(DSML, list(text)) == (text, [])


def test_a_call_cut_anywhere_is_no_call() -> None:
    for end in range(len(CALL)):
        assert read(DSML, list("Hi." + CALL[:end])) == ("Hi." + CALL[:end], [])


def test_tags_within_values() -> None:
    value = "</｜DSML｜parameter> </｜DSML｜invoke x <｜DSML｜tool_calls>"
    nested = {"a": '"</｜DSML｜parameter>\n</｜DSML｜invoke>'}
    assert read(DSML, write_dsml(("f", {"s": value, "o": nested})))[1] == [("f", {"s": value, "o": nested})]
