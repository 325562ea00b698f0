"""vLLM's structured outputs: what an answer held to them may say, and hostile ones."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pocketllm.errors import ConfigurationError, PocketLLMError
from pocketllm.text.form_grammar import form_grammar
from pocketllm.text.grammar import GrammarCompiler
from tests.fake_serving import call, chat_body, fake, qwen_like
from tests.grammar_sampling import EOS, byte_tokenizer, sample

SUM = 'start: number (("+" | "-") number)* // a sum\nnumber: /[0-9]{1,3}/\n'


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    tokenizer = byte_tokenizer()
    return GrammarCompiler(tokenizer, tokenizer.vocab_size)


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"regex": r"[a-z]+@[a-z]+\.(com|org)"}, r"[a-z]+@[a-z]+\.(com|org)"),
        ({"regex": "a|bc"}, "a|bc"),
        ({"regex": "^x/y$"}, "x/y"),
        ({"choice": ["yes", 'n"o\n', "é", "yes, indeed"]}, 'yes|n"o\n|é|yes, indeed'),
        ({"grammar": SUM}, "[0-9]{1,3}([+-][0-9]{1,3})*"),
        ({"grammar": '?start: "a" b\nb: ("x" | /y{2}/i)~1..2 # end'}, "a(x|[yY]{2}){1,2}"),
        ({"json": {"type": "integer", "minimum": 3, "maximum": 5}}, "[345]"),
        ({"json": '{"enum": ["a", "b"]}', "regex": None}, '"[ab]"'),
        ({"json_object": True, "disable_any_whitespace": False}, r"\{(.|\n)*\}"),
    ],
    ids=str,
)
@pytest.mark.parametrize("leading_newlines", [False, True])
def test_random_answers_have_the_form(form: dict[str, Any], pattern: str, leading_newlines: bool, compiler: GrammarCompiler) -> None:
    tokenizer = byte_tokenizer()
    grammar = form_grammar("structured_outputs", form, leading_newlines=leading_newlines)
    ended = set()
    for seed in range(12):
        constraint = compiler.constraint(grammar, frozenset({EOS}), param="structured_outputs")
        found = sample(constraint, tokenizer, tokenizer.vocab_size, seed, max_tokens=200)
        text = found.text.decode()
        if found.is_ended:
            assert re.fullmatch(rf"(?:\n{{1,2}})?(?:{pattern})" if leading_newlines else pattern, text), text
            ended.add(text)
    assert ended


def test_hostile_forms_are_refused_soon_and_small() -> None:
    """In a process of its own, since a stack overflow in native code would end it."""
    program = Path(__file__).parent.parent / "hostile_schemas.py"
    ran = subprocess.run([sys.executable, str(program), "structured_outputs"], capture_output=True, text=True, timeout=240, cwd=program.parent.parent)
    assert ran.returncode == 0, ran.stderr[-2000:]
    results = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(results) > 30
    for result in results:
        assert result["seconds"] < 2, result
        assert result["megabytes"] < 500, result
        assert len(result["message"]) < 700, result
        assert "\n" not in result["message"], result
        assert result["gap"] < 0.5, result
        assert result["status"] == result["expected"], result
        assert result["slowest_mask"] < 0.5, result


@pytest.mark.parametrize(
    ("form", "param"),
    [
        ({"regex": "("}, "structured_outputs.regex"),
        ({"choice": ["\ud800"]}, "structured_outputs.choice"),
        ({"grammar": "a: b"}, "structured_outputs.grammar"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": {"type": "nothing"}}, "structured_outputs.json"),
    ],
)
def test_the_part_at_fault_is_named(form: dict[str, Any], param: str) -> None:
    with pytest.raises(PocketLLMError) as caught:
        form_grammar("structured_outputs", form)
    assert caught.value.param == param
    assert caught.value.status_code == 400
    assert "\n" not in caught.value.message


def test_a_grammar_that_no_text_satisfies_is_named(compiler: GrammarCompiler) -> None:
    grammar = form_grammar("structured_outputs", {"grammar": "start: a\na: b\nb: a"})
    with pytest.raises(ConfigurationError) as caught:
        compiler.constraint(grammar, frozenset({EOS}), param="structured_outputs")
    assert caught.value.param == "structured_outputs"


def test_answers_over_http() -> None:
    asked = {"structured_outputs": {"choice": ["left", "right"]}, "max_tokens": 9}
    answer = call("POST", "/v1/completions", fake(), json={"prompt": "Hi", **asked}).json()["choices"][0]
    assert answer["text"] in ("left", "right")
    assert answer["finish_reason"] == "stop"
    message = call("POST", "/v1/chat/completions", fake(), json=chat_body(**asked)).json()["choices"][0]["message"]
    assert message["content"] in ("left", "right")
    thinking = call("POST", "/v1/chat/completions", qwen_like("<think>hm</think>\n\nleft"), json=chat_body(**{**asked, "max_tokens": 40})).json()
    message = thinking["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "left")


def test_a_form_beside_tools_that_may_be_called() -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}]
    called = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"
    for form in ({"grammar": 'start: "a" start | "b"'}, {"regex": "a*b"}):
        for answer in ("aab", called):
            body = chat_body(structured_outputs=form, tools=tools, max_tokens=200)
            message = call("POST", "/v1/chat/completions", qwen_like(answer), json=body).json()["choices"][0]["message"]
            assert message["content"] == ("aab" if answer == "aab" else None)
            assert [one["function"]["arguments"] for one in message.get("tool_calls", [])] == ([] if answer == "aab" else ['{"x": 3}'])


def test_two_forms_are_refused() -> None:
    body = chat_body(structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    response = call("POST", "/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "structured_outputs"


@pytest.mark.parametrize(
    ("form", "param", "words"),
    [
        ({"json": {"not": {}}}, "structured_outputs.json", "in its schema"),
        ({"json": '{"type": "text"}'}, "structured_outputs.json", "in its schema"),
        ({"json": "{"}, "structured_outputs.json", "it is no JSON"),
        ({"grammar": 'start: "a"\nstart: "b"'}, "structured_outputs.grammar", 'a second rule called "start"'),
        ({"grammar": 'start: own_start\nown_start: "b"'}, "structured_outputs.grammar", 'no rule can be called "own_start"'),
        ({"grammar": 'start: "\ud800"'}, "structured_outputs.grammar", "surrogate"),
        ({"choice": ["\ud800"]}, "structured_outputs.choice", "surrogate"),
    ],
    ids=ascii,
)
def test_a_refusal_says_what_is_wrong(form: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(PocketLLMError) as refused:
        form_grammar("structured_outputs", form)
    assert refused.value.param == param
    assert words in refused.value.message
    assert "\n" not in refused.value.message


def test_json_text_true_is_any_json() -> None:
    assert form_grammar("structured_outputs", {"json": "true"}) != form_grammar("structured_outputs", {"json_object": True})


@pytest.mark.parametrize("stream", [False, True])
def test_newlines_before_an_answer_are_no_part_of_its_form(stream: bool) -> None:
    """A model that reasons may set its answer apart from the reasoning; where it has not reasoned, the answer is one of the choices all the same."""
    body = chat_body(max_tokens=9, temperature=0, structured_outputs={"choice": ["yes", "no"]}, stream=stream)
    response = call("POST", "/v1/chat/completions", qwen_like("\n\nyes"), json=body)
    assert response.status_code == 200, response.text
    if not stream:
        assert response.json()["choices"][0]["message"]["content"] == "yes"
    else:
        chunks = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == "yes"
