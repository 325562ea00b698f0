"""Grammars of calls: whatever they let a model write is a call whose arguments the tool's schema allows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import jsonschema
import llguidance
import pytest

from pocketllm.answer_form import answer_form
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.request import GenerationRequest, ToolUse
from pocketllm.sampling_params import SamplingParams
from pocketllm.text.tool_parsers import ToolSyntax
from tests.unit.tool_parsers.answers import DSML, QWEN, SYNTAXES, tool, write_dsml, write_qwen

EOS = 256


class _Bytes:
    """A vocabulary of one token for each byte."""

    eos_token_id = EOS
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff<eos>")
    special_token_ids = (EOS,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


VOCABULARY = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()))
# What ends the parts of a call: random bytes alone would hardly ever write it.
VALUE_ENDS = {"qwen": "\n</parameter>\n", "dsml": "</｜DSML｜parameter>\n", "json": '"'}  # noqa: RUF001
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "$defs": {
        "Color": {"enum": ["red", "grün", 'a"b']},
        "Point": {
            "type": "object",
            "properties": {"x": {"type": "number"}, "next": {"anyOf": [{"$ref": "#/$defs/Point"}, {"type": "null"}]}},
            "required": ["x"],
        },
    },
    "properties": {
        "text": {"type": "string", "description": "any"},
        "whole": {"type": "integer"},
        "real": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": ["boolean", "null"]}}, "additionalProperties": False}},
        "choice": {"enum": ["a", "b"]},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None},
        "union": {"anyOf": [{"type": "integer", "minimum": 3}, {"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        "color": {"$ref": "#/$defs/Color"},
        "point": {"$ref": "#/$defs/Point"},
        "short": {"type": "string", "minLength": 2, "maxLength": 5},
        "pattern": {"type": "string", "pattern": r"^[a-c\/]+\d{2}$"},
        "found": {"type": "string", "pattern": "b|^c/"},
        "when": {"type": "string", "format": "date-time"},
        "mixed": {"enum": [1, "1", None, "x", True]},
        "types": {"type": ["string", "null", "integer"]},
        "flags": {"type": ["boolean", "string"]},
        "any": {},
        "constant": {"const": "z"},
        "nothing": {"type": "null"},
        "range": {"type": "integer", "minimum": -3, "maximum": 12},
        "object": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["text", "union", "pattern"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "f", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "g"}},
    {"type": "function", "function": {"name": "h", "parameters": {}}},
    tool("k", ["a", "b"], a={"type": "number"}, b={"type": "string"}),
]


def generate(grammar: str, seed: int, value_end: str = '"', limit: int = 2500) -> bytes | None:
    """A random text of the grammar, or None where it did not come to an end."""
    rng = random.Random(seed)
    matcher = llguidance.LLMatcher(VOCABULARY, grammar)
    assert not matcher.is_error(), matcher.get_error()
    endings = [list(ending.encode()) for ending in (value_end, '"', "]", "}")]
    text: list[int] = []
    while len(text) < limit:
        mask = matcher.compute_bitmask()
        allowed = [token for token in range(EOS + 1) if mask[token >> 3] >> (token & 7) & 1]
        assert allowed, f"no way on after {bytes(text)!r}"
        if allowed[-1] == EOS and (len(allowed) == 1 or rng.random() < 0.5):
            return bytes(text)
        step = [rng.choice(allowed[:-1] if allowed[-1] == EOS else allowed)]
        if rng.random() < (0.1 if len(text) < 300 else 0.5):
            step = next((ending for ending in endings if matcher.validate_tokens(ending) == len(ending)), step)
        for token in step:
            assert matcher.consume_token(token), matcher.get_error()
        text += step
    return None


def allows(grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0)
    encoded = list(text.encode())
    return matcher.try_consume_tokens(encoded) == len(encoded) and matcher.is_accepting()


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", SYNTAXES)
def test_all_that_a_grammar_allows_is_calls_that_fit_the_schemas(name: str, parallel: bool) -> None:
    grammar = SYNTAXES[name].grammar(TOOLS, parallel=parallel)
    schemas = {one["function"]["name"]: one["function"].get("parameters") or {"additionalProperties": False} for one in TOOLS}
    called = []
    for seed in range(40):
        text = generate(grammar, seed, VALUE_ENDS[name])
        if text is None:
            continue
        parser = SYNTAXES[name].parser(TOOLS)
        assert parser.feed(text.decode()) == ""
        end = parser.finish()
        assert end.text == ""
        assert 1 <= len(end.calls) <= (100 if parallel and name != "json" else 1)
        for call in end.calls:
            jsonschema.validate(json.loads(call.arguments), schemas[call.name])
            called.append(call.name)
    assert set(called) == {"f", "g", "h", "k"}
    assert len(called) >= 15


@pytest.mark.parametrize(("syntax", "marker"), [(QWEN, "<tool_call>"), (DSML, "<｜DSML｜tool_calls>")])  # noqa: RUF001
def test_a_grammar_of_answers_without_calls(syntax: ToolSyntax, marker: str) -> None:
    grammar = syntax.grammar_without_calls()
    assert grammar is not None
    for text in ("", "\n\n", f"a {marker[:-1]}", f"{marker[:-1]}{marker[:4]} <<", "<b>é🦀</b>", marker[:-1] + "<" + marker[2:]):
        assert allows(grammar, text)
    assert not allows(grammar, f"é {marker}")
    assert not allows(grammar, marker[:5] + marker + " x")
    assert all(marker.encode() not in (generate(grammar, seed) or b"") for seed in range(5))


def test_the_model_s_own_way_of_writing_is_allowed() -> None:
    tools = [tool("f", ["s"], s={"type": "string"}, n={"type": "integer"}, o={"type": "array"}), tool("g")]
    call = write_qwen("f", {"s": "<b>\n\nhi</b> ", "n": 3, "o": [1, "a", None]})
    grammar = QWEN.grammar(tools, parallel=True)
    for text in (call, f"\n\n{call}", f"{call}\n{call}", write_qwen("f", {"s": ""}), write_qwen("g", {})):
        assert allows(grammar, text)
    for text in (f"{call} ", f"\n\n\n{call}", f"Hi {call}", write_qwen("f", {"n": 3}), write_qwen("f", {"n": 3, "s": ""}), write_qwen("h", {}), ""):
        assert not allows(grammar, text)
    assert not allows(QWEN.grammar(tools, parallel=False), f"{call}\n{call}")
    grammar = DSML.grammar(tools, parallel=True)
    for text in (write_dsml(("f", {"s": "a", "n": 3, "o": [1, {"a": None}]}), ("g", {})), write_dsml(("g", {})), write_dsml(("g", {})).strip()):
        assert allows(grammar, text)
    assert not allows(grammar, write_dsml(("f", {"s": 1})))
    assert not allows(DSML.grammar(tools, parallel=False), write_dsml(("g", {}), ("g", {})))


def test_long_bounded_text_does_not_exhaust_the_grammar() -> None:
    grammar = QWEN.grammar([tool("f", ["s"], s={"type": "string", "maxLength": 50_000})], parallel=False)
    assert allows(grammar, write_qwen("f", {"s": "<b>é</b> </p> " * 140}))
    assert not allows(grammar, write_qwen("f", {"s": "x" * 2001}))


@pytest.mark.parametrize("name", ["qwen", "dsml"])
@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"type": "string", "pattern": "a(?=b)"}, "look"),
        ({"type": "string", "pattern": r"\bx"}, "pattern"),
        ({"type": "string", "pattern": "a^b"}, "pattern"),
        ({"type": "string", "pattern": 5}, "pattern"),
        ({"type": "string", "format": "isbn"}, "format"),
        ({"type": "string", "maxLength": -1}, "maxLength"),
        ({"type": "string", "not": {"const": "x"}}, '"not"'),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "integer", "not": {"const": 3}}, "not"),
        ({"$ref": "#/$defs/missing"}, "$ref"),
        ({"oneOf": [{"type": "string", "minLength": 2}, {"type": "string"}]}, "oneOf"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}], "minLength": 3}, "minLength"),
        ({"type": "string", "enum": [1]}, "list of values"),
        (False, "no finite value"),
        ({"type": "strin"}, "strin"),
        ({"type": "string", "pattern": "foo**"}, "foo**"),
        ({"type": "string", "enum": ["a", "bb"], "maxLength": 1}, "maxLength"),
        ({"allOf": [{"type": "string"}, {"anyOf": [{"minLength": 2}, {"pattern": "a"}]}]}, "allOf"),
        ({"type": "string", "anyOf": [{"type": "string"}, {"enum": ["a"]}]}, '"type" beside "anyOf"'),
        ({"$ref": "#/$defs/missing", "pattern": "a"}, "$ref"),
        ({"allOf": [{"type": "string", "pattern": "^a"}], "pattern": "b$"}, '"pattern"'),
        ({"type": "array", "items": {"type": "string", "pattern": "foo**"}}, "foo**"),
        ({"anyOf": None}, '"anyOf"'),
        ({"type": "string", "minLength": None, "maxLength": 20}, '"minLength"'),
        ({"type": "x" * 3000}, '"type"'),
        ({"type": "string", "pattern": "^a$", "minLength": 3}, '"pattern"'),
        ({"type": "array", "items": {"allOf": [{"type": "string"}, {"type": "null"}]}, "minItems": 1}, "no value"),
    ],
)
def test_a_schema_that_can_not_be_enforced_is_named(name: str, schema: Any, keyword: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedFeatureError)) as caught:
        SYNTAXES[name].grammar([tool("fine"), tool("bad", ["x"], x=schema)], parallel=True, instead="or leave it out")
    message = caught.value.message
    assert caught.value.param == "tools"
    for part in ('"x" of "bad"', keyword):
        assert part in message
    assert message.endswith("; or leave it out.")
    assert len(message) < 500
    for internal in ("\n", "::", "(?s", "at 1(", "%json", "json-schema:"):
        assert internal not in message


def test_what_the_whole_object_asks_for_is_named_too() -> None:
    function = {"name": "bad", "parameters": {"type": "object", "properties": {"x": {}}, "dependentRequired": {"x": ["y"]}}}
    for syntax in SYNTAXES.values():
        with pytest.raises(UnsupportedFeatureError, match=r'the parameters of "bad".*dependentRequired'):
            syntax.grammar([{"type": "function", "function": function}], parallel=False)
    with pytest.raises(UnsupportedFeatureError, match='the name "a>b"'):
        QWEN.grammar([tool("f", **{"a>b": {"type": "string"}})], parallel=False)
    with pytest.raises(ConfigurationError, match='"tools" is empty'):
        QWEN.grammar([], parallel=False)


def test_a_schema_of_thousands_of_levels_is_refused() -> None:
    schema: dict[str, Any] = {"type": "array"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    for syntax in SYNTAXES.values():
        with pytest.raises(UnsupportedFeatureError, match="deep"):
            syntax.grammar([tool("f", x=schema)], parallel=False)


def qwen_calls(*calls: tuple[str, dict[str, Any]]) -> str:
    return "\n".join(write_qwen(name, arguments) for name, arguments in calls)


@pytest.mark.parametrize(("syntax", "write"), [(QWEN, qwen_calls), (DSML, write_dsml)])
def test_a_grammar_of_text_that_calls_may_end(syntax: ToolSyntax, write: Callable[..., str]) -> None:
    call = write(("k", {"a": 1, "b": "x"})).lstrip("\n")
    one, several = (syntax.grammar(TOOLS, parallel=parallel, optional=True) for parallel in (False, True))
    for text in ("", "no call <tool", "thinking…\n\n", call, f"First:\n\n{call}", f"<{call}"):
        assert allows(one, text), text
        assert allows(several, text), text
    twice = write(("k", {"a": 1, "b": "x"}), ("k", {"a": 2, "b": "y"}))
    assert allows(several, twice)
    assert not allows(one, twice)
    assert not allows(several, f"{call} and more")
    assert not allows(one, call[:-5])
    assert not allows(one, write(("k", {"a": "no number", "b": "x"})))


@pytest.mark.parametrize("name", SYNTAXES)
def test_no_number_of_a_call_is_beyond_a_double(name: str) -> None:
    properties = {"a": {"type": "array"}, "o": {"type": "object"}, "n": {"type": "number"}, "l": {"type": "array", "items": {"type": "number"}}}
    grammar = SYNTAXES[name].grammar([tool("f", ["a", "o", "n", "l"], **properties)], parallel=False)
    good = {"a": [1.5, [2]], "o": {"x": {"y": 3}}, "n": 4, "l": [5]}
    assert allows(grammar, write(name, good))
    for key, value in (("a", [10**400]), ("a", [[10**400]]), ("o", {"x": {"y": 10**400}}), ("n", 10**400), ("l", [10**400])):
        assert not allows(grammar, write(name, {**good, key: value}))


@pytest.mark.parametrize("name", SYNTAXES)
def test_objects_within_calls_are_closed(name: str) -> None:
    inner = {"type": "object", "properties": {"a": {"type": "integer"}}}
    parameters = {"properties": {"o": {"type": "array", "items": {"$ref": "#/$defs/I"}}, "free": {"type": "object"}}, "$defs": {"I": inner}}
    grammar = SYNTAXES[name].grammar([{"type": "function", "function": {"name": "f", "parameters": parameters}}], parallel=False)
    assert allows(grammar, write(name, {"o": [{"a": 1}], "free": {"x": 1}}))
    assert not allows(grammar, write(name, {"o": [{"a": 1, "type": "integer"}], "free": {}}))
    assert not allows(grammar, write(name, {"o": [], "free": {}, "more": {}}))


def write(name: str, arguments: dict[str, Any]) -> str:
    if name == "json":
        return json.dumps({"name": "f", "arguments": arguments})
    return write_qwen("f", arguments) if name == "qwen" else write_dsml(("f", arguments))


@pytest.mark.parametrize("name", SYNTAXES)
@pytest.mark.parametrize(("schema", "keyword"), [({"type": "strin"}, '"type"'), ({"type": "string", "pattern": "foo**"}, '"pattern"')])
@pytest.mark.parametrize("optional", [False, True])
def test_what_no_syntax_can_enforce_is_refused_by_all(name: str, schema: Any, keyword: str, optional: bool) -> None:
    with pytest.raises((ConfigurationError, UnsupportedFeatureError), match=f'the parameter "x" of "f".*{keyword}'):
        SYNTAXES[name].grammar([tool("f", x=schema)], parallel=True, optional=optional)


def test_many_large_tools_are_refused_soon() -> None:
    properties = {f"p{index}": {"type": "object", "properties": {f"q{i}": {"type": "integer"} for i in range(60)}} for index in range(30)}
    with pytest.raises(UnsupportedFeatureError, match="fewer or smaller tools"):
        QWEN.grammar([tool(f"f{index}", **properties) for index in range(128)], parallel=True)


TRUE = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"properties": {"x": {"not": {}}}}}}


@pytest.mark.parametrize(
    ("tools", "form", "remedy"),
    [
        (ToolUse((TRUE,)), None, 'or leave "strict" out of the tools.'),
        (ToolUse((TRUE,), "required"), None, 'or let the model choose with "tool_choice": "auto" and leave "strict" out of the tools.'),
        (ToolUse((tool("f", x={"not": {}}),), "function", "f"), None, 'or let the model choose with "tool_choice": "auto".'),
        (ToolUse((tool("f", x={"not": {}}),), parallel=False), None, 'or leave "parallel_tool_calls" out.'),
        (ToolUse((tool("f", x={"not": {}}),)), {"type": "json_object"}, 'or leave "response_format" out.'),
    ],
)
def test_the_remedy_is_for_what_was_asked(tools: ToolUse, form: Any, remedy: str) -> None:
    request = GenerationRequest("", SamplingParams(), "r", metadata={"messages": []}, response_format=form, tools=tools)
    with pytest.raises(UnsupportedFeatureError) as caught:
        answer_form(request, QWEN, reasons=False)
    assert caught.value.message.endswith(f"; {remedy}")
    assert '"not"' in caught.value.message


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        ({"type": "string", "allOf": [{"pattern": "^a"}, {"pattern": "b$", "maxLength": 4}]}, ["ab", "axxb"], ["b", "a", "axxxb"]),
        ({"type": "string", "minLength": 2, "allOf": [{"pattern": "^a"}, {"format": "hostname"}]}, ["ab"], ["a", "a b", "b"]),
        ({"type": "string", "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}, ["1.2.3.4", "::1"], ["1.2.3", "x"]),
        ({"type": "string", "format": "includes", "pattern": r"x\.y"}, ["ax.yb"], ["xy"]),
    ],
)
def test_strings_with_several_conditions(schema: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    grammar = QWEN.grammar([tool("f", ["s"], s=schema)], parallel=False)
    form = "<tool_call>\n<function=f>\n<parameter=s>\n{}\n</parameter>\n</function>\n</tool_call>"
    assert [allows(grammar, form.format(text)) for text in [*right, *wrong]] == [True] * len(right) + [False] * len(wrong)
