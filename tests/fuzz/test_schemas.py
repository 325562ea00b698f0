"""Damaged JSON schemas, in tools and in response_format: a grammar, or a refusal of one line; and a parser that no call brings down."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from pocketllm.backends.base import Capabilities
from pocketllm.errors import PocketLLMError
from pocketllm.protocol.features import features
from pocketllm.protocol.fields import check_fields
from pocketllm.protocol.tools import tool_use
from pocketllm.text.grammar import response_format_grammar
from pocketllm.text.tool_parsers import JSON_CALLS
from pocketllm.text.tool_parsers.base import Tools, ToolSyntax
from pocketllm.text.tool_parsers.dsml import Dsml
from pocketllm.text.tool_parsers.qwen_xml import QwenXml
from tests.fuzz.bodies import SCHEMA
from tests.fuzz.mutator import Mutator, paths, value_at

SCHEMAS = 1_500
FEATURES = features(Capabilities("fake", "none", 4, 1000, 256, logprobs=True, structured_outputs=True), "full")
SYNTAXES: tuple[ToolSyntax, ...] = (QwenXml(), Dsml(), JSON_CALLS)
KEYWORDS = [
    "$anchor",
    "$defs",
    "$id",
    "$ref",
    "additionalProperties",
    "allOf",
    "anyOf",
    "const",
    "contains",
    "default",
    "definitions",
    "dependentRequired",
    "else",
    "enum",
    "examples",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "format",
    "if",
    "items",
    "maxItems",
    "maxLength",
    "maximum",
    "minItems",
    "minLength",
    "minProperties",
    "minimum",
    "multipleOf",
    "not",
    "nullable",
    "oneOf",
    "pattern",
    "patternProperties",
    "prefixItems",
    "properties",
    "propertyNames",
    "required",
    "then",
    "type",
    "unevaluatedProperties",
    "uniqueItems",
]
CALL = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in (("city", "x"), ("days", "3"), ("tags", "[1]"), ("either", "true"), ("ratio", "null"))
)


def damaged(source: random.Random, mutator: Mutator) -> Any:
    """A schema with one to three faults; JSON has room for it."""
    schema: Any = copy.deepcopy(SCHEMA)
    for _ in range(source.choice((1, 1, 2, 3))):
        places = paths(schema)
        path = source.choice(places)
        found = value_at(schema, path)
        parent = value_at(schema, path[:-1]) if path else None
        kind = source.random()
        if isinstance(found, dict) and (kind < 0.4 or not path):
            found[source.choice(KEYWORDS)] = source.choice((mutator.value(), copy.deepcopy(value_at(schema, source.choice(places)))))
        elif kind < 0.6 and path:
            parent[path[-1]] = mutator.value()
        elif kind < 0.75 and path:
            parent[path[-1]] = copy.deepcopy(value_at(schema, source.choice(places)))
        elif isinstance(parent, dict):
            parent[source.choice(KEYWORDS)] = parent.pop(path[-1])
    return json.loads(json.dumps(schema), parse_constant=lambda _name: 0)


def test_damaged_schemas_are_honoured_or_refused() -> None:
    source, mutator = random.Random(3), Mutator(3)
    outcomes: dict[str, int] = {"honoured": 0, "refused": 0}
    findings: list[str] = []

    def attempt(what: str, schema: Any, work: Callable[[], object]) -> None:
        try:
            work()
            outcomes["honoured"] += 1
        except PocketLLMError as error:
            outcomes["refused"] += 1
            if error.status_code != 400 or "\n" in error.message or len(error.message) > 1500:
                findings.append(f"{what}: {error.status_code} {error.message[:200]!r}: {json.dumps(schema)[:1000]}")
        except Exception as error:  # what the server would answer with 500
            findings.append(f"{what}: {type(error).__name__} {error}: {json.dumps(schema)[:1000]}")

    for number in range(SCHEMAS):
        schema = damaged(source, mutator)
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        function = {"name": "get_weather", "parameters": schema, "strict": number % 2 == 0}
        body = {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}

        def answer(form: Any = form) -> None:
            check_fields({"response_format": form}, "chat", FEATURES)
            response_format_grammar(form)

        def calls(syntax: ToolSyntax, body: Any = body) -> None:
            syntax.grammar(tools_of(body), parallel=True)

        def reading(syntax: ToolSyntax, body: Any = body) -> None:
            parser = syntax.parser(tools_of(body))
            parser.feed(f"<tool_call>\n<function=get_weather>\n{CALL}</function>\n</tool_call>")
            parser.finish()

        attempt("response_format", schema, answer)
        for syntax in SYNTAXES:
            attempt(f"{type(syntax).__name__}.grammar", schema, lambda syntax=syntax: calls(syntax))  # type: ignore[misc]
            attempt(f"{type(syntax).__name__}.parser", schema, lambda syntax=syntax: reading(syntax))  # type: ignore[misc]
    print(outcomes)
    assert findings == [], f"{len(findings)} findings; the first: {findings[0]}"
    assert min(outcomes.values()) > SCHEMAS


def tools_of(body: dict[str, Any]) -> Tools:
    """The definitions of a body that passes the table."""
    check_fields(body, "chat", FEATURES)
    use = tool_use(body)
    assert use is not None
    return use.definitions
