"""A tool that nobody has heard of: its name and its keys mean nothing, and the question says what goes where."""

from __future__ import annotations

import json
from typing import Any

from .skills import listed
from .source import Source
from .tool import Case, Tool, declare, failure, object_result, schema

_KINDS = ("string", "integer", "number", "boolean", "array", "object")


def any_tool(source: Source) -> Tool:
    """A declaration of one to four parameters of any JSON type."""
    name = source.identifier()
    kinds: dict[str, str] = {}
    for _ in range(source.integer(1, 4)):
        kinds[source.thing() if source.chance(0.3) else source.identifier()] = source.weighted(_KINDS, (0.3, 0.2, 0.14, 0.14, 0.13, 0.09))
    properties = {one: schema(source, kind, f"The {one}", **_inner(source, kind)) for one, kind in kinds.items()}
    optional = {one for one in kinds if len(kinds) > 1 and source.chance(0.2)}
    required = [one for one in kinds if one not in optional]

    def ask(source: Source) -> Case:
        arguments = {one: any_value(source, kind) for one, kind in kinds.items() if one not in optional or source.chance(0.5)}
        arguments = arguments or {one: any_value(source, kind) for one, kind in kinds.items()}
        result, answer = failure(source) or _result(source)
        return Case(_question(source, name, arguments), (arguments,), (result,), answer)

    return Tool(name, name, declare(source, name, f"Runs {name}", properties, required), ask)


def any_value(source: Source, kind: str) -> Any:
    """A value of the JSON type `kind`."""
    if kind == "string":
        return " ".join(source.word() for _ in range(source.weighted((1, 2, 3), (0.6, 0.25, 0.15)))) if source.chance(0.85) else str(source.integer(0, 9999))
    if kind == "integer":
        return source.integer(-99, 9999) if source.chance(0.4) else source.integer(0, 99)
    if kind == "number":
        return source.number(-20, 200)
    if kind == "boolean":
        return source.chance(0.5)
    if kind == "array":
        inner = source.pick(("string", "integer"))
        return [source.word() if inner == "string" else source.integer(0, 99) for _ in range(source.integer(1, 4))]
    return {source.word(): source.word() if source.chance(0.5) else source.integer(0, 99) for _ in range(source.integer(1, 2))}


def _inner(source: Source, kind: str) -> dict[str, Any]:
    return {"items": {}} if kind == "array" and source.chance(0.2) else {}


def _question(source: Source, name: str, arguments: dict[str, Any]) -> str:
    if source.chance(0.3):
        return f"{source.pick(('Call', 'Use', 'Run'))} {name}: {', '.join(f'{key}={_spelled(value)}' for key, value in arguments.items())}"
    parts = listed([f"{key} {_spelled(value)}" for key, value in arguments.items()])
    return f"{source.pick(('Call', 'Use', 'Run', 'Please call', 'Please use'))} {name} with {parts}."


def _spelled(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _result(source: Source) -> tuple[str, str]:
    """What such a tool returns, a text, a number or an object, and the sentence that reports it."""
    if source.chance(0.6):
        value = any_value(source, source.pick(("string", "integer", "number")))
        return str(value), f"The result is {value}."
    values = {source.thing(): any_value(source, source.pick(("string", "integer", "number", "boolean"))) for _ in range(source.integer(1, 2))}
    parts = listed([f"{key} is {_spelled(value)}" for key, value in values.items()])
    return object_result(source, values), f"The {parts}."
