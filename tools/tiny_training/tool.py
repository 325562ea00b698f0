"""A tool as a request declares it, and a question that it answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .source import Source, words


@dataclass(frozen=True, slots=True)
class Case:
    """A question, the calls that it takes, what they return and the answer.

    Args:
        calls: the arguments of each call, in the order that they are written in.
        results: what each call returns, as the text of a tool message.
    """

    question: str
    calls: tuple[Mapping[str, Any], ...]
    results: tuple[str, ...]
    answer: str


@dataclass(frozen=True, slots=True)
class Tool:
    """One declared function.

    Args:
        family: what it is of; two tools of one conversation are of different families.
        name: as declared.
        declaration: in OpenAI's form.
        ask: draws a question for it.
    """

    family: str
    name: str
    declaration: Mapping[str, Any]
    ask: Callable[[Source], Case]


def declare(source: Source, name: str, description: str, properties: Mapping[str, Mapping[str, Any]], required: list[str]) -> dict[str, Any]:
    """A declaration in OpenAI's form. Some leave out the description, or what is required, as people's do."""
    function: dict[str, Any] = {"name": name}
    if source.chance(0.85):
        function["description"] = description
    function["parameters"] = {"type": "object", "properties": dict(properties)}
    if required and source.chance(0.85):
        function["parameters"]["required"] = required
    return {"type": "function", "function": function}


def named(source: Source, verbs: str, nouns: str) -> str:
    """A function's name: a verb and a noun of those given, or now and then one that says nothing."""
    if source.chance(0.12):
        return source.identifier()
    joined = source.chance(0.9)
    verb, noun = source.pick(words(verbs)), source.pick(words(nouns))
    return f"{verb}_{noun}" if joined else verb + noun.capitalize()


def key(source: Source, names: str) -> str:
    """A parameter's name out of those given."""
    return source.pick(words(names))


def schema(source: Source, kind: str, description: str, **more: Any) -> dict[str, Any]:
    """A parameter's schema; half of them are described."""
    found: dict[str, Any] = {"type": kind, **more}
    if source.chance(0.4):
        found["description"] = description
    return found


def failure(source: Source) -> tuple[str, str] | None:
    """Now and then the text of a result that is an error, and the answer to it."""
    if not source.chance(0.06):
        return None
    reason = source.pick(("not found", "no connection", "access denied", "timed out", f"unknown {source.thing()}", f"{source.word()} is missing"))
    return json.dumps({"error": reason}), f"The tool failed: {reason}."


def object_result(source: Source, values: Mapping[str, Any]) -> str:
    """A result as a JSON object, compact or spaced."""
    return json.dumps(values, ensure_ascii=False, separators=(",", ":") if source.chance(0.2) else None)
