"""Qwen's calls: framing, types, and what is no call."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from pocketllm.text.tool_parsers import find_syntax
from pocketllm.text.tool_parsers.qwen_xml import QwenXml
from tests.unit.tool_parsers.answers import QWEN, one_qwen, read, tool, write_qwen

CALL = "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</function>\n</tool_call>"


def test_content_before_calls_and_both_styles_of_framing() -> None:
    tools = [tool("f", x={"type": "integer"}), tool("g", y={"type": "string"}), tool("h")]
    compact = "<tool_call><function=g><parameter=y>a b</parameter></function></tool_call>"
    empty = "<tool_call>\n<function=h>\n</function>\n</tool_call>"
    assert read(QWEN, f"Let me look.\n\n{CALL}\n{compact} {empty}\n", tools) == ("Let me look.", [("f", {"x": 1}), ("g", {"y": "a b"}), ("h", {})])
    assert read(QWEN, f"\n\n{CALL}", tools) == ("", [("f", {"x": 1})])


def test_without_tools_or_for_an_unknown_function_or_parameter_values_stay_text() -> None:
    assert read(QWEN, CALL, [])[1] == [("f", {"x": "1"})]
    assert read(QWEN, CALL, [tool("other", x={"type": "integer"})])[1] == [("f", {"x": "1"})]
    assert read(QWEN, CALL, [tool("f", y={"type": "integer"})])[1] == [("f", {"x": "1"})]
    for parameters in (None, {}, {"type": "object"}, "nonsense"):
        assert read(QWEN, CALL, [{"type": "function", "function": {"name": "f", "parameters": parameters}}])[1] == [("f", {"x": "1"})]


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("3", {"type": "integer"}, 3),
        (" 3 ", {"type": "integer"}, 3),
        ("3.0", {"type": "integer"}, 3),
        ("3.5", {"type": "integer"}, "3.5"),
        ("1e3", {"type": "integer"}, 1000),
        ("1e9999", {"type": "integer"}, "1e9999"),
        ("007", {"type": "integer"}, "007"),
        ("123456789012345678901234567890", {"type": "integer"}, 123456789012345678901234567890),
        ("9" * 5000, {"type": "integer"}, "9" * 5000),
        ("2026-01-15", {"type": "integer"}, "2026-01-15"),  # ml-explore/mlx-lm#1236
        ("3", {"type": "number"}, 3),
        ("-2.50", {"type": "number"}, -2.5),
        ("1e400", {"type": "number"}, "1e400"),
        ("NaN", {"type": "number"}, "NaN"),
        ("\u0663", {"type": "integer"}, "\u0663"),
        ("01234", {"type": "string"}, "01234"),
        ("true", {"type": "string"}, "true"),
        ("null", {"type": "string"}, "null"),
        ("", {"type": "string"}, ""),
        ("\n\n", {"type": "string"}, "\n\n"),
        ("true", {"type": "boolean"}, True),
        ("False", {"type": "boolean"}, False),
        ("yes", {"type": "boolean"}, "yes"),
        ("None", {"type": "null"}, None),
        ("null", {"type": ["string", "null"]}, None),
        ("None", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, None),
        ("5", {"anyOf": [{"type": "integer"}, {"type": "null"}]}, 5),
        ("5", {"type": ["integer", "string"]}, 5),
        ("5", {"type": ["string", "integer"]}, "5"),
        ('["a"]', {"anyOf": [{"type": "string"}, {"type": "array"}]}, ["a"]),
        ("[a]", {"anyOf": [{"type": "string"}, {"type": "array"}]}, "[a]"),
        ('[{"a":true,"b":null}]', {"type": "array"}, [{"a": True, "b": None}]),  # vllm-project/vllm#43238
        ("[{'a': True, 'b': None, 'c': 'it\\'s \"so\"'}]", {"type": "array"}, [{"a": True, "b": None, "c": 'it\'s "so"'}]),
        ('["True", "None"]', {"type": "array"}, ["True", "None"]),
        ('{"a": [1e400]}', {"type": "object"}, '{"a": [1e400]}'),
        ('{"a": NaN}', {"type": "object"}, '{"a": NaN}'),
        ("[" * 5000, {"type": "array"}, "[" * 5000),
        ("[1]", {"type": "object"}, "[1]"),
        ("__import__('os')", {"type": "object"}, "__import__('os')"),
        ("2", {"enum": [1, 2, "auto"]}, 2),
        ("auto", {"enum": [1, 2, "auto"]}, "auto"),
        ("1", {"enum": ["1", "2"]}, "1"),
        ("1", {"type": "string", "enum": ["1"]}, "1"),
        ("True", {"const": True}, True),
        ("1", {"enum": [True, "x"]}, "1"),
        ("7", {"enum": [1, 2]}, 7),
        ("7", {"$ref": "#/$defs/missing"}, "7"),
        ("7", {"$ref": "https://example.com/schema"}, "7"),
        ("7", {"type": "int"}, "7"),
        ("7", {"type": 5}, "7"),
        ("7", {}, "7"),
        ("7", True, "7"),
        ("7", {"allOf": [{"type": "integer"}]}, 7),
        ("7", {"anyOf": [{}, {"type": "null"}]}, "7"),
    ],
)
def test_a_value_is_typed_by_its_schema(text: str, schema: Any, value: Any) -> None:
    read_value = one_qwen(text, schema)
    assert read_value == value
    assert type(read_value) is type(value)


def test_references_are_followed_and_circles_end() -> None:
    definitions = {
        "Count": {"$ref": "#/$defs/Whole"},
        "Whole": {"type": "integer"},
        "Loop": {"$ref": "#/$defs/Loop"},
        "Tree": {"anyOf": [{"$ref": "#/$defs/Tree"}, {"$ref": "#/$defs/Tree"}]},
    }
    parameters = {
        "type": "object",
        "$defs": definitions,
        "properties": {"n": {"$ref": "#/$defs/Count"}, "loop": {"$ref": "#/$defs/Loop"}, "tree": {"$ref": "#/$defs/Tree"}},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    text = write_qwen("f", {"n": 3, "loop": 3, "tree": 3})
    assert read(QWEN, text, tools)[1] == [("f", {"n": 3, "loop": "3", "tree": "3"})]


@pytest.mark.parametrize(
    "text",
    [
        f"{CALL} And that is it.",
        f"{CALL}\nthen\n{CALL}",
        CALL[:-1],
        "<tool_call>",
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "<tool_call>\n<function=>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f\n>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\nhello\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=x>\n2\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>\n<function=f>\n</function>\n</tool_call>",
        f"Use <tool_call> like so: {CALL}",
        "<function=f>\n</function>",
        " \n ",
        "",
    ],
)
def test_what_is_no_call_stays_as_it_was_written(text: str) -> None:
    tools = [tool("f", x={"type": "integer"})]
    assert read(QWEN, text, tools) == (text, [])
    assert read(QWEN, list(text), tools) == (text, [])


def test_a_call_cut_anywhere_is_no_call() -> None:
    """vllm-project/vllm#53269: no partial call that looks complete, and the text stays."""
    text = "Yes.\n\n" + CALL + "\n" + CALL.replace("=x>", "=longer>")
    whole = len("Yes.\n\n" + CALL)
    for end in range(len(text)):
        calls = read(QWEN, text[:end], [tool("f")])[1]
        if whole <= end <= whole + 1:
            assert len(calls) == 1
        else:
            assert (calls, read(QWEN, list(text[:end]), [tool("f")])[0]) == ([], text[:end])


def test_tags_within_values() -> None:
    text = "<tool_call> </parameter> </function> </parameter> </function> x <parameter=y> </tool_call>"
    assert one_qwen(text, {"type": "string"}) == text
    nested = [f"a</parameter>\n<parameter=y>{CALL}", {"b": '"</parameter></function></tool_call>'}]
    assert one_qwen(json.dumps(nested), {"type": "array"}) == nested
    assert one_qwen('["', {"type": "array"}) == '["'
    broken = write_qwen("f", {"x": '["', "y": '"]'})
    assert read(QWEN, broken, [tool(x={"type": "array"})])[1] == [("f", {"x": '["', "y": '"]'})]


def test_content_is_released_as_soon_as_it_can_be_no_call() -> None:
    parser = QWEN.parser([])
    assert parser.feed("Hello ") == "Hello"
    assert parser.feed("<b") == " <b"
    assert parser.feed(">\n<tool_c") == ">"
    assert parser.feed("ase>") == "\n<tool_case>"
    assert parser.feed("\n<tool_call>") == ""
    assert parser.feed("\n<fun") == ""
    assert parser.feed("ny>") == "\n<tool_call>\n<funny>"
    assert parser.feed(CALL) == CALL
    assert parser.finish().text == ""


def test_calls_end_once_and_have_ids_of_their_own() -> None:
    """vllm-project/vllm#51697 and ggml-org/llama.cpp#12279."""
    calls = []
    for _ in range(2):
        parser = QWEN.parser([tool("f", x={"type": "integer"})])
        assert "".join(map(parser.feed, [CALL[:-1], CALL[-1:] + "\n", CALL])) == ""
        end = parser.finish()
        assert end.text == ""
        assert [call.arguments for call in end.calls] == ['{"x": 1}'] * 2
        calls += end.calls
    assert len({call.id for call in calls}) == 4
    assert all(call.id.startswith("call_") and len(call.id) == 29 for call in calls)


def test_a_lone_surrogate_does_not_reach_the_client_as_one() -> None:
    parser = QWEN.parser([tool(x={"type": "array"})])
    parser.feed('<tool_call><function=f><parameter=x>["\\ud800ü"]</parameter></function></tool_call>')
    (call,) = parser.finish().calls
    assert call.arguments == '{"x": ["\\ud800\\u00fc"]}'


@pytest.mark.parametrize("filler", ["abc ", "\n", "</parameter>", "<tool_call>", '["', "\\"])
@pytest.mark.parametrize("opening", ["", "<tool_call>\n<function=f>\n<parameter=x>\n", "<tool_call>\n<function=f>\n<parameter=x>\n["])
def test_work_is_linear_in_the_text(filler: str, opening: str) -> None:
    text = opening + filler * (100_000 // len(filler))
    start = time.process_time()
    assert read(QWEN, list(text), [tool(x={"type": "array"})]) == (text, [])
    assert time.process_time() - start < 2  # quadratic work takes minutes


def test_the_syntax_is_known_by_the_template() -> None:
    assert isinstance(find_syntax("… <tool_call>\n<function=f>\n<parameter=a>", "qwen3_5_moe"), QwenXml)
    assert find_syntax('<tool_call>{"name": …}</tool_call>', "qwen3") is None
    assert find_syntax(None, "llama") is None


@pytest.mark.parametrize(
    ("reference", "arguments"),
    [("#/$defs/a%20b~1", '{"x": 5}'), ("#/$defs/list/1", '{"x": 5}'), ("#/$defs/list/" + "9" * 5000, '{"x": "5"}'), ("#/nothing", '{"x": "5"}')],
)
def test_references_of_any_form_are_followed_or_let_be(reference: str, arguments: str) -> None:
    parameters = {"properties": {"x": {"$ref": reference}}, "$defs": {"a b/": {"type": "integer"}, "list": [{}, {"type": "integer"}]}}
    parser = QwenXml().parser([{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    assert parser.feed("<tool_call><function=f><parameter=x>5</parameter></function></tool_call>") == ""
    assert [call.arguments for call in parser.finish().calls] == [arguments]
