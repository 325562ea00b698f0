"""Gives each hostile schema to the grammar compiler and prints, one JSON line a schema, what came of it and what it cost.

    python tests/hostile_schemas.py response_format|forced|strict|structured_outputs

"forced" gives it as the parameters of a function in JSON's call form, "strict" as one parameter in that of Qwen, where calls are the model's choice.
"structured_outputs" gives the regular expressions, choices and grammars of HOSTILE_FORMS instead.
A program of its own: what it tries to bring down is the process that runs it. Its seconds are those of a processor, so that they do not depend on what
else the machine does.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from pocketllm.errors import PocketLLMError
from pocketllm.text.form_grammar import form_grammar
from pocketllm.text.grammar import GrammarCompiler, response_format_grammar
from pocketllm.text.tool_parsers import JSON_CALLS
from pocketllm.text.tool_parsers.qwen_xml import QwenXml
from tests.conformance.json_schemas import response_format
from tests.grammar_sampling import EOS, byte_tokenizer, sample

STRING = {"type": "string"}


def nested(count: int, wrap: Callable[[Any], Any], leaf: Any = STRING) -> Any:
    for _ in range(count):
        leaf = wrap(leaf)
    return leaf


def pattern(text: str) -> dict[str, Any]:
    return {"type": "string", "pattern": text}


def chain(count: int, link: Callable[[str], Any]) -> dict[str, Any]:
    return {"$ref": "#/$defs/d0", "$defs": {**{f"d{i}": link(f"#/$defs/d{i + 1}") for i in range(count)}, f"d{count}": STRING}}


def wide(count: int, prefix: str) -> dict[str, Any]:
    return {"type": "object", "properties": {f"{prefix}_property_{i}": STRING for i in range(count)}}


def choice(kind: str, count: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "object", "properties": {f"{kind}{i}": {"enum": [1, 2]}}, "required": [f"{kind}{i}"]} for i in range(count)]}


# name: (status that has to come, schema); a schema within the limits may also be refused, but must do no harm
HOSTILE: dict[str, tuple[int, Callable[[], Any]]] = {
    "10,000 nested parentheses": (400, lambda: pattern("(" * 10_000 + ")" * 10_000)),
    "1,000 nested parentheses": (400, lambda: pattern("(" * 1_000 + "a" + ")" * 1_000)),
    "5,000 levels of properties": (400, lambda: nested(5_000, lambda inner: {"type": "object", "properties": {"a": inner}})),
    "5,000 levels of items": (400, lambda: nested(5_000, lambda inner: {"items": inner})),
    "5,000 levels of allOf": (400, lambda: nested(5_000, lambda inner: {"allOf": [inner]})),
    "5,000 levels in a constant": (400, lambda: {"const": nested(5_000, lambda inner: [inner], 1)}),
    "30 levels": (200, lambda: nested(30, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]})),
    "100k enum values": (400, lambda: {"enum": [f"value {i}" for i in range(100_000)]}),
    "2,000 enum values": (200, lambda: {"enum": [f"value number {i} " * 5 for i in range(2_000)]}),
    "500 enum objects": (200, lambda: {"enum": [{"a": i, "b": [i]} for i in range(500)]}),
    "100k properties": (400, lambda: wide(100_000, "a")),
    "400 properties": (200, lambda: wide(400, "a")),
    "400 properties four times over": (400, lambda: {"allOf": [wide(400, str(i)) for i in range(4)]}),
    "one of 1,600 properties": (400, lambda: {"anyOf": [wide(400, str(i)) for i in range(4)]}),
    "huge repeat": (400, lambda: pattern("x{1,100000}")),
    "huge repeat of repeats": (400, lambda: pattern("((a{1,50}){1,50}){1,50}")),
    "large repeat of repeats": (200, lambda: pattern("^([a-z]{0,60}){0,60}$")),
    "100k branches": (400, lambda: pattern("|".join(["(a|b)"] * 100_000))),
    "exponential automaton": (200, lambda: pattern("^.*a.{200}$")),
    "exponential automaton in branches": (200, lambda: pattern("^(?:.*a.{90}|.*b.{91}|.*c.{92})$")),
    "ambiguous repeats": (200, lambda: pattern("^(a|aa|aaa|b|ab)*(.*a.{0,300})(.*b.{300})$")),
    "pattern against length": (200, lambda: {**pattern("^.*a.{50}.*$"), "minLength": 500, "maxLength": 1_000}),
    "10,000 references": (400, lambda: chain(10_000, lambda to: {"$ref": to})),
    "299 references": (200, lambda: chain(299, lambda to: {"$ref": to})),
    "references doubled 40 times": (200, lambda: chain(40, lambda to: {"allOf": [{"$ref": to}, {"$ref": to}]})),
    "references thirtyfold under oneOf": (
        400,
        lambda: {"oneOf": [{"$ref": "#/$defs/d0"}] * 2, "$defs": chain(9, lambda to: {"type": "object", "allOf": [{"$ref": to}] * 30})["$defs"]},
    ),
    "branching references": (200, lambda: chain(200, lambda to: {"anyOf": [{"$ref": to}, {"type": "array", "items": {"$ref": to}}]})),
    "deep branching references": (200, lambda: chain(290, lambda to: nested(2, lambda inner: {"anyOf": [{"allOf": [inner]}]}, {"$ref": to}))),
    "long recursion": (400, lambda: {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{(i + 1) % 299}"}, STRING]} for i in range(299)}}),
    "product of branches": (400, lambda: {"allOf": [choice(f"p{i}_", 10) for i in range(20)]}),
    "smaller product of branches": (200, lambda: {"allOf": [choice(f"p{i}_", 2) for i in range(8)]}),
    "recursion that meets itself": (
        400,
        lambda: {
            "allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
            "$defs": {
                "a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}, "y": {"$ref": "#/$defs/b"}}},
                "b": {"type": "object", "properties": {"x": {"$ref": "#/$defs/b"}, "y": {"$ref": "#/$defs/a"}}},
            },
        },
    ),
    "minLength 10**9": (400, lambda: {"type": "string", "minLength": 10**9}),
    "maxLength 10**9": (200, lambda: {"type": "string", "maxLength": 10**9}),
    "minItems 10**6": (400, lambda: {"type": "array", "minItems": 10**6}),
    "500 items of 500 items": (200, lambda: nested(3, lambda inner: {"type": "array", "minItems": 500, "items": inner})),
    "maxItems within maxItems": (200, lambda: nested(30, lambda inner: {"type": "array", "maxItems": 500, "items": inner})),
    "large common multiple": (400, lambda: {"type": "integer", "allOf": [{"multipleOf": m} for m in (9973, 9967, 9949)]}),
    "4,000 digits": (400, lambda: {"minimum": 10**4000}),
    "constant of 4,000 digits": (400, lambda: {"enum": [10**4000]}),
    "name of a million characters": (400, lambda: {"properties": {"x" * 1_000_000: STRING}}),
    "500 exclusive branches": (400, lambda: {"oneOf": [{"properties": {"k": {"const": i}}, "required": ["k"], "type": "object"} for i in range(500)]}),
    "400 multiples": (200, lambda: {"anyOf": [{"type": "integer", "multipleOf": m} for m in range(9_000, 9_400)]}),
    "300 patterns": (200, lambda: {"anyOf": [pattern(f"a{i}.*b.{{0,50}}c") for i in range(300)]}),
}


def lark(text: str) -> dict[str, Any]:
    return {"grammar": text}


HOSTILE_FORMS: dict[str, tuple[int, Callable[[], Any]]] = {
    "regex of 10,000 nested parentheses": (400, lambda: {"regex": "(" * 10_000 + ")" * 10_000}),
    "regex of repeats within repeats": (400, lambda: {"regex": "((a{1,1000}){1,1000}){1,1000}"}),
    "regex that closes its group": (400, lambda: {"regex": "a)|(b"}),
    "long regex": (400, lambda: {"regex": "a" * 100_000}),
    "regex that looks back": (400, lambda: {"regex": r"(a+)\1"}),
    "ambiguous regex": (200, lambda: {"regex": "(a|a|a){0,300}(a*)*b"}),
    "many choices": (400, lambda: {"choice": [str(number) for number in range(100_000)]}),
    "long choices": (400, lambda: {"choice": ["x" * 1_000_000]}),
    "1,000 choices": (200, lambda: {"choice": [f"choice number {number}" for number in range(1_000)]}),
    "empty choice": (200, lambda: {"choice": [""]}),
    "grammar without start": (400, lambda: lark('a: "x"')),
    "grammar of nothing": (400, lambda: lark("")),
    "grammar that can't end": (400, lambda: lark('start: "a" start')),
    "rule that is not there": (400, lambda: lark("start: b")),
    "left recursion": (200, lambda: lark('start: start "a" | "a"')),
    "ambiguous grammar": (200, lambda: lark('start: start start start | start start | "a"')),
    "empty loops": (200, lambda: lark('start: a* "x"\na: b*\nb: c?\nc: a? b?')),
    "rules in a ring": (400, lambda: lark("start: a\na: b\nb: a")),
    "chain of rules": (200, lambda: lark("start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(400)) + 'r400: "x"\n')),
    "too many rules": (400, lambda: lark('start: "a"\n' + "".join(f'r{i}: "x"\n' for i in range(2_000)))),
    "long grammar": (400, lambda: lark("start: " + '"a" ' * 10_000)),
    "grammar of nested parentheses": (400, lambda: lark("start: " + "(" * 4_000 + '"a"' + ")" * 4_000)),
    "grammar of nested regex": (400, lambda: lark("start: /" + "(" * 4_000 + "a" + ")" * 4_000 + "/")),
    "large repeat": (400, lambda: lark('start: "a"{1,100000000}')),
    "repeats of repeats": (400, lambda: lark("start: r0\n" + "".join(f"r{i}: r{i + 1}{{1000}}\n" for i in range(12)) + 'r12: "x"\n')),
    "doubling rules": (200, lambda: lark("start: r0\n" + "".join(f"r{i}: r{i + 1} r{i + 1}\n" for i in range(60)) + 'r60: ""\n')),
    "schema within a grammar": (400, lambda: lark('start: %json {"type": "object"}')),
    "options within a grammar": (400, lambda: lark('%llguidance {"no_forcing": true}\nstart: "a"')),
    "control token": (400, lambda: lark("start: <|im_end|>")),
    "text that does not end": (400, lambda: lark('start: "a')),
    "ambiguous terminals": (200, lambda: lark("start: (A | B | C)*\nA: /[a-z]{1,40}/\nB: /[a-y]{1,41}/\nC: /[b-z]{1,42}/")),
    "schema of no object": (400, lambda: {"json": "[1, 2"}),
    "deep schema text": (400, lambda: {"json": "[" * 100_000}),
}


class Clock:
    """The longest that this process computed while this thread did not get to run."""

    def __init__(self) -> None:
        self.gap = 0.0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        last = time.process_time()
        while True:
            time.sleep(0.002)
            now = time.process_time()
            self.gap = max(self.gap, now - last)
            last = now


def megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def grammar_of(way: str, schema: Any) -> tuple[str, str]:
    """A grammar, and the field that asks for it."""
    if way == "structured_outputs":
        return form_grammar(way, schema), way
    if way == "response_format":
        return response_format_grammar(response_format(schema)), way
    if way == "forced":
        if not {"type", "properties", "allOf", "anyOf", "oneOf", "$ref"} & schema.keys() or schema.get("type", "object") != "object":
            schema = parameter(schema)
        return JSON_CALLS.grammar([{"type": "function", "function": {"name": "f", "parameters": schema}}], parallel=True), "tools"
    function = {"name": "f", "parameters": parameter(schema), "strict": True}
    return QwenXml().grammar([{"type": "function", "function": function}], parallel=True, optional=True), "tools"


def parameter(schema: Any) -> dict[str, Any]:
    definitions = {"$defs": schema["$defs"]} if "$defs" in schema else {}
    return {"type": "object", "properties": {"x": {key: value for key, value in schema.items() if key != "$defs"}}, "required": ["x"], **definitions}


def main(way: str) -> None:
    tokenizer = byte_tokenizer()
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size)
    compiler.prepare()
    clock = Clock()
    for name, (expected, build) in (HOSTILE_FORMS if way == "structured_outputs" else HOSTILE).items():
        schema = build()
        before, start, status, slowest, message = megabytes(), time.process_time(), 200, 0.0, ""
        clock.gap = 0.0
        seconds = 0.0
        try:
            grammar, param = grammar_of(way, schema)
            constraint = compiler.constraint(grammar, frozenset({EOS}), param=param)
            seconds = time.process_time() - start
            slowest = _slowest_mask(constraint, tokenizer)
        except PocketLLMError as error:
            status = error.status_code
            message = error.message
        seconds = seconds or time.process_time() - start
        result = {"name": name, "expected": expected, "status": status, "seconds": seconds, "megabytes": megabytes() - before, "gap": clock.gap}
        print(json.dumps({**result, "slowest_mask": slowest, "message": message}), flush=True)


def _slowest_mask(constraint: Any, tokenizer: Any) -> float:
    slowest = 0.0
    fill = constraint.fill

    def timed(mask: Any) -> None:
        nonlocal slowest
        start = time.process_time()
        fill(mask)
        slowest = max(slowest, time.process_time() - start)

    constraint.fill = timed
    sample(constraint, tokenizer, tokenizer.vocab_size, 0, max_tokens=150)
    return slowest


if __name__ == "__main__":
    main(sys.argv[1])
