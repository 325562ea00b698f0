"""The parameters that one tool of a request declares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.text.schema_keywords import is_annotation
from pocketllm.text.schema_pointer import NOWHERE, pointed_to
from pocketllm.text.tool_parsers.base import Tools

TYPES = ("string", "integer", "number", "boolean", "object", "array", "null")
_MAX_REFERENCES = 32


class ToolSchema:
    """One function's name and its parameters, in the schema's order.

    Anything of the schema that is not of the shape that JSON Schema gives it counts as absent, since the parser has to read an answer in any case.

    Args:
        tool: `{"type": "function", "function": {...}}`, or the function's object itself.
    """

    def __init__(self, tool: Mapping[str, Any]) -> None:
        function = tool.get("function")
        function = function if isinstance(function, Mapping) else tool
        self.name = str(function.get("name", ""))
        parameters = function.get("parameters")
        self.document: Mapping[str, Any] = parameters if isinstance(parameters, Mapping) else {}  # what references point into
        root = self.resolve(self.document)
        self.root: Mapping[str, Any] = root if isinstance(root, Mapping) else {}
        properties = self.root.get("properties")
        self.properties: dict[str, Any] = dict(properties) if isinstance(properties, Mapping) else {}
        required = self.root.get("required")
        self.required = frozenset(name for name in required if isinstance(name, str)) if isinstance(required, Sequence) else frozenset()

    def resolve(self, schema: Any) -> Any:
        """`schema` with a `$ref` into this document, or an `allOf` of one, replaced by what it stands for; True where it leads nowhere."""
        for _ in range(_MAX_REFERENCES):
            step = self._step(schema)
            if step is None:
                return schema
            target, rest = step
            schema = {**target, **rest} if isinstance(target, Mapping) else (rest or target)
        return True

    def clash(self, schema: Any) -> str | None:
        """The first keyword for which `resolve` has to choose between a `$ref`, or an `allOf` of one, and what is beside it."""
        for _ in range(_MAX_REFERENCES):
            step = self._step(schema)
            if step is None:
                return None
            target, rest = step
            target = target if isinstance(target, Mapping) else {}
            for keyword in rest:
                if not is_annotation(keyword) and keyword in target and rest[keyword] != target[keyword]:
                    return str(keyword)
            schema = {**target, **rest}
        return "$ref"

    def _step(self, schema: Any) -> tuple[Any, dict[str, Any]] | None:
        """What a `$ref`, or an `allOf` of one, stands for, and what is beside it; None where `schema` has neither."""
        if not isinstance(schema, Mapping):
            return None
        rest = dict(schema)
        if isinstance(reference := schema.get("$ref"), str):
            del rest["$ref"]
            target = pointed_to(self.document, reference)
            return (True if target is NOWHERE else target), rest
        if isinstance(parts := schema.get("allOf"), list) and len(parts) == 1:
            del rest["allOf"]
            return parts[0], rest
        return None

    def types(self, schema: Any) -> tuple[str, ...]:
        """The JSON types that a schema allows, in its order; none where it declares none, or none that JSON Schema knows."""
        return tuple(self._types(schema, set(), _MAX_REFERENCES) or ())

    def _types(self, schema: Any, seen: set[int], depth: int) -> dict[str, None] | None:
        """As `types`; None where the schema is one of those `seen`, which has had its say, or lies too deep."""
        if id(schema) in seen or not depth:
            return None
        seen.add(id(schema))
        schema = self.resolve(schema)
        if not isinstance(schema, Mapping):
            return {}
        declared = schema.get("type")
        if declared is not None:
            names = [declared] if isinstance(declared, str) else (declared if isinstance(declared, list) else [])
            return dict.fromkeys(name for name in names if name in TYPES)
        if (members := literals(schema)) is not None:
            return dict.fromkeys(map(json_type, members))
        found: dict[str, None] = {}
        for key in ("anyOf", "oneOf"):
            for branch in _listed(schema, key):
                types = self._types(branch, seen, depth - 1)
                if types is not None:
                    found.update(types or {"string": None})  # a branch of no type takes any text
        parts = [types for part in _listed(schema, "allOf") if (types := self._types(part, seen, depth - 1))]
        found.update(dict.fromkeys(name for name in (parts[0] if parts else ()) if all(name in types for types in parts)))
        return found


def tool_schemas(tools: Tools) -> dict[str, ToolSchema]:
    """The schemas by their functions' names."""
    return {schema.name: schema for schema in map(ToolSchema, tools)}


def _listed(schema: Mapping[str, Any], key: str) -> list[Any]:
    branches = schema.get(key)
    return branches if isinstance(branches, list) else []


def literals(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values of `enum` or `const`, or None."""
    if "const" in schema:
        return [schema["const"]]
    members = schema.get("enum")
    return list(members) if isinstance(members, list) else None


def json_type(value: Any) -> str:
    """The narrowest JSON type of a decoded value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer"
    if isinstance(value, float):
        return "number"
    return "string" if isinstance(value, str) else ("array" if isinstance(value, list) else "object")
