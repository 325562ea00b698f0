"""Token masks of grammars: over the default model's vocabulary, over a small one, and around a model's reasoning."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.text.grammar import GrammarCompiler, json_rule, response_format_grammar
from pocketllm.text.json_schema import enforceable_schema
from pocketllm.text.reasoned import AfterReasoning
from pocketllm.text.special_tokens import SpecialTokens
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer
from tests.conformance.json_schemas import SCHEMAS, response_format
from tests.grammar_sampling import EOS, allowed, byte_tokenizer, sample, validate

BYTES = byte_tokenizer()
COMPILER = GrammarCompiler(BYTES, BYTES.vocab_size)
START, END = BYTES.backend.token_to_id("<think>"), BYTES.backend.token_to_id("</think>")


def small(grammar: str, eos: frozenset[int] = frozenset({EOS})) -> Any:
    return COMPILER.constraint(grammar, eos, param="response_format")


def small_schema(schema: Any, **options: bool) -> Any:
    return small(response_format_grammar(response_format(schema), **options))


def accepts(constraint: Any, text: str) -> bool:
    """Whether `text` is a whole text of the grammar."""
    for id_ in BYTES.encode(text, add_special_tokens=False):
        if constraint.is_complete or id_ not in allowed(constraint, BYTES.vocab_size):
            return False
        constraint.accept(id_)
    return constraint.is_complete or EOS in allowed(constraint, BYTES.vocab_size)


class Real:
    """The default model's tokenizer and a compiler over its vocabulary."""

    def __init__(self, path: Path) -> None:
        self.tokenizer = load_tokenizer(open_checkpoint(path, "auto"), None)
        self.vocab_size = self.tokenizer.vocab_size
        self.compiler = GrammarCompiler(self.tokenizer, self.vocab_size)


@pytest.fixture(scope="module")
def real(default_model: Path) -> Real:
    return Real(default_model)


@pytest.mark.parametrize("name", SCHEMAS)
def test_what_a_schema_allows_is_valid(real: Real, name: str) -> None:
    grammar = response_format_grammar(response_format(SCHEMAS[name]))
    ended = 0
    for seed in range(20):
        drawn = sample(real.compiler.constraint(grammar, frozenset({EOS}), param="response_format"), real.tokenizer, real.vocab_size, seed)
        assert not any(real.tokenizer.is_special(id_) for id_ in drawn.token_ids)
        if drawn.is_ended:
            ended += 1
            validate(SCHEMAS[name], drawn.text)
            assert real.tokenizer.decode(drawn.token_ids).encode() == drawn.text
    assert ended >= 5


@pytest.mark.parametrize(
    "text", ['{"name": "Ann", "age": 7}', '{"name":"Ann","age":7}', '{\n  "name": "Ann",\n  "age": 7\n}', '{ "name" : "é\\n\\"😀" , "age" : 120 }']
)
def test_the_usual_styles_of_json_pass(real: Real, text: str) -> None:
    constraint = real.compiler.constraint(response_format_grammar(response_format(SCHEMAS["person"])), frozenset({EOS}), param="response_format")
    for id_ in real.tokenizer.encode(text, add_special_tokens=False):
        assert id_ in allowed(constraint, real.vocab_size)
        constraint.accept(id_)
    assert constraint.is_complete


def test_json_object() -> None:
    grammar = response_format_grammar({"type": "json_object"})
    for text in ("{}", '{"a": [1, -2500.25, null], "b": {"c": true}}', '{\n  "ä": "\\u0000"\n}'):
        assert accepts(small(grammar), text)
    for text in ("[]", "1", '{"a": 1,}', "{'a': 1}", '{"a": NaN}', '{"a": 01}', '{"a": 1e400}', '{"a"', " {}", "{} "):
        assert not accepts(small(grammar), text)


def test_white_space_is_bounded() -> None:
    schema = {"type": "array", "items": {"enum": [1]}}
    assert accepts(small_schema(schema), "[\n" + " " * 24 + "1]")
    for text in ("[" + " " * 2 + "1]", "[\n\n1]", "[\n" + " " * 25 + "1]", "[1] ", "\n[1]"):
        assert not accepts(small_schema(schema), text)


@pytest.mark.parametrize(("leading", "passing"), [("", True), ("\n", True), ("\n\n", True), ("\n\n\n", False), (" ", False)])
def test_leading_newlines(leading: str, passing: bool) -> None:
    assert accepts(small_schema({"enum": [7]}, leading_newlines=True), leading + "7") == passing
    assert accepts(small_schema({"enum": [7]}), leading + "7") == (leading == "")


def test_free_text_has_no_grammar() -> None:
    with pytest.raises(ValueError, match="free text"):
        response_format_grammar({"type": "text"})


def test_eos_ids_are_allowed_where_the_text_may_end_and_nowhere_else() -> None:
    letter = 3 + ord("a")
    constraint = small(
        "start: /a{1,2}b?/", frozenset({0, letter + 1, BYTES.vocab_size + 5})
    )  # "b" itself ends the row, and an id beyond the vocabulary never comes
    assert allowed(constraint, BYTES.vocab_size).tolist() == [letter]
    constraint.accept(letter)
    assert allowed(constraint, BYTES.vocab_size).tolist() == [0, letter, letter + 1]
    assert not constraint.is_complete
    constraint.accept(letter)
    assert allowed(constraint, BYTES.vocab_size).tolist() == [0, letter + 1]


def test_a_text_that_nothing_may_follow_is_complete() -> None:
    constraint = small_schema({"const": "a"})
    for byte in b'"a"':
        assert not constraint.is_complete
        constraint.fill(np.zeros(9, np.uint32))
        constraint.accept(3 + byte)
    assert constraint.is_complete


def test_a_constraint_can_be_accepted_without_masks() -> None:
    constraint = small_schema({"const": "a"})
    for byte in b'"a"':
        constraint.accept(3 + byte)
    assert constraint.is_complete


def test_control_tokens_are_no_text_and_other_added_tokens_are() -> None:
    ids = set(allowed(small('start: "\\"" /.*/ "\\""'), BYTES.vocab_size))
    assert ids == {3 + ord('"')}
    constraint = small_schema({"type": "string"})
    constraint.accept(3 + ord('"'))
    ids = set(allowed(constraint, BYTES.vocab_size))
    assert {START, END} <= ids
    assert not ids & {0, 1, 2}
    constraint.accept(START)
    constraint.accept(3 + ord('"'))
    assert constraint.is_complete


@pytest.mark.parametrize("words", [9, 12])
def test_masks_of_any_length_are_wholly_written(words: int) -> None:
    mask = np.full((2, words), 0xFFFFFFFF, np.uint32)
    small_schema({"enum": [5]}).fill(mask[1])
    bits = np.unpackbits(mask[1].view(np.uint8), bitorder="little")
    assert np.nonzero(bits)[0].tolist() == [3 + ord("5")]
    assert (mask[0] == 0xFFFFFFFF).all()


def test_strided_masks() -> None:
    mask = np.full((9, 2), 0xFFFFFFFF, np.uint32)
    small_schema({"enum": [5]}).fill(mask[:, 0])
    assert mask[:, 0].tolist() == [0, 1 << ((3 + ord("5")) % 32), 0, 0, 0, 0, 0, 0, 0]


def test_a_padded_vocabulary() -> None:
    compiler = GrammarCompiler(BYTES, 500)
    constraint = compiler.constraint(response_format_grammar(response_format({"type": "string"})), frozenset({EOS}), param="response_format")
    constraint.accept(3 + ord('"'))
    assert max(allowed(constraint, 500)) < BYTES.vocab_size


def test_rows_of_one_grammar_are_apart() -> None:
    grammar = response_format_grammar(response_format({"enum": ["ab", "ac"]}))
    first, second = small(grammar), small(grammar)
    for byte in b'"a':
        first.accept(3 + byte)
    assert accepts(second, '"ac"')
    assert accepts(first, 'b"')


def test_constraints_from_many_threads() -> None:
    compiler = GrammarCompiler(BYTES, BYTES.vocab_size)
    barrier = threading.Barrier(8)

    def work(number: int) -> None:
        barrier.wait()
        for turn in range(100):  # more grammars than are kept
            schema = {"enum": [f"{turn}", f"{turn}{number % 3}"]}
            constraint = compiler.constraint(response_format_grammar(response_format(schema)), frozenset({EOS}), param="response_format")
            drawn = sample(constraint, BYTES, BYTES.vocab_size, number)
            validate(schema, drawn.text)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(work, number) for number in range(8)]:
            done.result()


def test_tools_embed_schemas() -> None:
    rule = json_rule(enforceable_schema({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}))
    assert accepts(small(f'start: "<call>" value "</call>"\nvalue: {rule}\n'), '<call>{"n": 3}</call>')


@pytest.mark.parametrize("grammar", ["start: missing", "start: /(/", "no grammar at all", '{"grammars": 3}'])
def test_a_broken_grammar_is_an_error_that_names_the_field(grammar: str) -> None:
    with pytest.raises((ConfigurationError, UnsupportedFeatureError)) as raised:
        COMPILER.constraint(grammar, frozenset({EOS}), param="tools")
    assert raised.value.param == "tools"
    assert "\n" not in raised.value.message


def test_a_grammar_too_large_for_the_limits() -> None:
    with pytest.raises(ConfigurationError, match="limits of grammars allow") as raised:
        small_schema({"type": "integer", "allOf": [{"multipleOf": step} for step in (9973, 9967, 9949)]})
    assert raised.value.param == "response_format"


def test_a_row_that_becomes_too_much_work_fails_alone(real: Real) -> None:
    grammar = response_format_grammar(response_format({"type": "string", "pattern": "^.*a.{200}$"}))
    constraint = real.compiler.constraint(grammar, frozenset({EOS}), param="response_format")
    with pytest.raises(ConfigurationError, match="for one token") as raised:
        sample(constraint, real.tokenizer, real.vocab_size, 0, max_tokens=1000)
    assert raised.value.param == "response_format"
    assert len(raised.value.message) < 400
    other = real.compiler.constraint(response_format_grammar(response_format({"type": "null"})), frozenset({EOS}), param="response_format")
    assert sample(other, real.tokenizer, real.vocab_size, 0).text == b"null"


def test_a_token_that_the_mask_did_not_allow_is_an_error() -> None:
    with pytest.raises(ConfigurationError):
        small_schema({"enum": [5]}).accept(3 + ord("x"))


def test_a_vocabulary_that_is_no_bytes_is_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    words = Tokenizer(Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a")), SpecialTokens(), "words")
    with pytest.raises(UnsupportedFeatureError, match="bytes"):
        GrammarCompiler(words, 2).prepare()


ANSWER = response_format_grammar(response_format({"enum": [5]}), leading_newlines=True)


def test_open_reasoning_allows_everything_but_an_end() -> None:
    constraint = AfterReasoning(small(ANSWER), START, END, frozenset({0, EOS}), is_open=True)
    assert set(allowed(constraint, BYTES.vocab_size)[: BYTES.vocab_size]) >= set(range(BYTES.vocab_size)) - {0, EOS, START}
    assert not set(allowed(constraint, BYTES.vocab_size)) & {0, EOS, START}
    for id_ in [*(3 + byte for byte in b"hm 5"), END, 3 + 10, 3 + 10]:
        assert id_ in allowed(constraint, BYTES.vocab_size)
        assert not constraint.is_complete
        constraint.accept(id_)
    assert allowed(constraint, BYTES.vocab_size).tolist() == [3 + ord("5")]
    constraint.accept(3 + ord("5"))
    assert constraint.is_complete


def test_closed_reasoning_may_be_opened_first() -> None:
    constraint = AfterReasoning(small(ANSWER), START, END, frozenset({EOS}), is_open=False)
    assert allowed(constraint, BYTES.vocab_size).tolist() == [3 + 10, 3 + ord("5"), START]
    constraint.accept(START)
    assert 3 + ord("x") in allowed(constraint, BYTES.vocab_size)
    assert START not in allowed(constraint, BYTES.vocab_size)
    constraint.accept(END)
    assert allowed(constraint, BYTES.vocab_size).tolist() == [3 + 10, 3 + ord("5")]


def test_closed_reasoning_need_not_be_opened() -> None:
    constraint = AfterReasoning(small(ANSWER), START, END, frozenset({EOS}), is_open=False)
    constraint.accept(3 + 10)
    assert START not in allowed(constraint, BYTES.vocab_size)
    constraint.accept(3 + ord("5"))
    assert constraint.is_complete


def test_reasoning_that_only_the_prompt_opens() -> None:
    constraint = AfterReasoning(small(ANSWER), None, END, frozenset({EOS}), is_open=False)
    assert allowed(constraint, BYTES.vocab_size).tolist() == [3 + 10, 3 + ord("5")]
    opened = AfterReasoning(small(ANSWER), None, END, frozenset({EOS}), is_open=True)
    assert START in allowed(opened, BYTES.vocab_size)


def test_text_of_the_grammar_is_one_rule_a_line() -> None:
    grammar = response_format_grammar(response_format({"enum": ["a\nb"]}))
    assert [line.split(":")[0] for line in grammar.splitlines()] == ["start", "answer"]
    assert json.loads(grammar.splitlines()[1].partition("%json ")[2])["enum"] == ["a\nb"]
