"""Schemas as pydantic, zod and older drafts of JSON Schema spell them: taken, and held to what their own draft means."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from pocketllm.text.grammar import GrammarCompiler, json_rule, response_format_grammar
from pocketllm.text.json_schema import enforceable_schema
from tests.conformance.json_schemas import response_format
from tests.grammar_sampling import EOS, allowed, byte_tokenizer, sample

TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER, TOKENIZER.vocab_size)
INTEGER = {"type": "integer"}
COLOR = {"enum": ["red", "blue"], "type": "string", "title": "Color"}
CAT = {"type": "object", "properties": {"kind": {"const": "cat", "default": "cat", "type": "string"}, "lives": INTEGER}, "required": ["lives"]}
ADD = {"type": "object", "properties": {"kind": {"const": "add", "default": "add"}, "left": {"$ref": "#/$defs/Term"}}, "required": ["left"]}
NUMBER = {"type": "object", "properties": {"kind": {"const": "number", "default": "number"}, "value": INTEGER}, "required": ["value"]}
TERM = {"oneOf": [{"$ref": "#/$defs/Add"}, {"$ref": "#/$defs/Number", "description": "a leaf"}], "discriminator": {"propertyName": "kind"}}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}

# schema, texts that it has to take, texts that it must not
CASES: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "a record of zod 4": (
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": INTEGER}, ['{}', '{"a": 1, "b": 2}'], ['{"a": "b"}'],
    ),
    "a record of zod 4 with an enum": (
        {"type": "object", "propertyNames": {"type": "string", "enum": ["a", "b"]}, "additionalProperties": INTEGER, "required": ["a", "b"]},
        ['{"a": 1, "b": 2}'], ['{"a": 1}', '{"a": 1, "b": 2, "c": 3}', '{"a": 1, "b": "x"}'],
    ),
    "a dictionary of pydantic with an Enum": (
        {"type": "object", "propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": INTEGER, "$defs": {"Color": COLOR}},
        ['{}', '{"red": 1}', '{"red": 1, "blue": 2}'], ['{"green": 1}', '{"red": "x"}'],
    ),
    "one name": ({"type": "object", "propertyNames": {"const": "a"}}, ['{}', '{"a": [1]}'], ['{"b": 1}']),
    "no name": ({"type": "object", "propertyNames": False}, ['{}'], ['{"a": 1}']),
    "names of a length": ({"type": "object", "propertyNames": {"minLength": 2}, "additionalProperties": {}}, ['{"ab": 1}'], ['{"a": 1}', '{"": 1}']),
    "names of a pattern": ({"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}}, ['{"ab": 1}'], ['{"A": 1}']),
    "names that are dates": (
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": INTEGER}, ['{"2024-02-29": 1}'], ['{"2023-02-29": 1}', '{"a": 1}'],
    ),
    "a tuple of draft 7": (
        {**DRAFT_7, "type": "array", "items": [{"type": "string"}, INTEGER], "additionalItems": False, "minItems": 2, "maxItems": 2},
        ['["a", 1]'], ['["a"]', '[1, "a"]', '["a", 1, 2]'],
    ),
    "a tuple with a rest": (
        {**DRAFT_7, "type": "array", "items": [{"type": "string"}], "additionalItems": INTEGER, "minItems": 1}, ['["a"]', '["a", 1, 2]'], ['[]', '["a", "b"]'],
    ),
    "additionalItems without a tuple": ({**DRAFT_7, "type": "array", "items": INTEGER, "additionalItems": False}, ['[1, 2, 3]'], ['["a"]']),
    "a format of zod's own beside its pattern": ({"type": "string", "format": "starts_with", "pattern": "^ab.*"}, ['"abc"'], ['"bc"']),
    "formats that say nothing of a text": ({"type": "string", "format": "path"}, ['"/a/b"', '""'], ['1']),
    "base64": ({"type": "string", "format": "base64"}, ['""', '"YQ=="', '"YWI="', '"YWJj"'], ['"YQ="', '"Y"', '"a b="']),
    "a tagged union whose tags have defaults": (
        {"oneOf": [CAT, {"type": "object", "properties": {"kind": {"const": "dog"}}}]},
        ['{"kind": "cat", "lives": 9}', '{"kind": "dog"}'], ['{"lives": 9}', '{}', '{"kind": "cow"}'],
    ),
    "a tagged union that recurs": (
        {**TERM, "$defs": {"Add": ADD, "Number": NUMBER, "Term": TERM}},
        ['{"kind": "number", "value": 1}', '{"kind": "add", "left": {"kind": "number", "value": 1}}'],
        ['{"value": 1}', '{"kind": "add", "left": {"value": 1}}'],
    ),
}  # fmt: skip


def accepts(grammar: str, text: str) -> bool:
    row = COMPILER.constraint(grammar, frozenset({EOS}), param="tools")
    for id_ in TOKENIZER.encode(text, add_special_tokens=False):
        if row.is_complete or id_ not in allowed(row, TOKENIZER.vocab_size):
            return False
        row.accept(id_)
    return row.is_complete or EOS in allowed(row, TOKENIZER.vocab_size)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_what_is_taken_and_what_is_not(name: str, closed: bool) -> None:
    schema, right, wrong = CASES[name]
    before = json.dumps(schema)
    grammar = f"start: {json_rule(enforceable_schema(schema, closed=closed))}\n"
    for text in right:
        assert accepts(grammar, text), text
    for text in wrong:
        assert not accepts(grammar, text), text
    assert json.dumps(schema) == before


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_satisfies_the_schema_as_its_draft_reads_it(name: str) -> None:
    schema = CASES[name][0]
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    ended = 0
    for seed in range(12):
        drawn = sample(
            COMPILER.constraint(response_format_grammar(response_format(schema)), frozenset({EOS}), param="response_format"),
            TOKENIZER,
            TOKENIZER.vocab_size,
            seed,
        )
        if drawn.is_ended:
            ended += 1
            kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(drawn.text))
    assert ended
