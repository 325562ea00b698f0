"""Questions about a whole rewritten JSON Schema: which definitions have values at all, and how many branches meet in one place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_LISTS = ("allOf", "anyOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_MAPS = ("properties", "patternProperties")
_SCALARS = ("null", "boolean", "number", "string")
_DEFINITION = "#/$defs/"


def finite_definitions(definitions: dict[str, Any]) -> frozenset[str]:
    """Names of the definitions that some finite value satisfies, as far as required properties and items tell."""
    finite: set[str] = set()
    while True:
        before = len(finite)
        for name in reversed(definitions):  # a definition mostly refers to later ones
            if name not in finite and is_finite(definitions[name], finite):
                finite.add(name)
        if len(finite) == before:
            return frozenset(finite)


def is_finite(schema: Any, finite: frozenset[str] | set[str]) -> bool:
    """Whether some finite value may satisfy `schema`, given the definitions of which that is known."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if "$ref" in schema and schema["$ref"].removeprefix(_DEFINITION) not in finite:
        return False
    if not all(is_finite(branch, finite) for branch in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(is_finite(branch, finite) for branch in schema["anyOf"]):
        return False
    types = schema.get("type", _SCALARS)
    types = {types} if isinstance(types, str) else set(types)
    if "const" in schema or "enum" in schema or types - {"array", "object"}:
        return True
    if "array" in types:
        least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed = [*prefix[:least], *([schema.get("items", {})] if least > len(prefix) else [])]
        if all(is_finite(item, finite) for item in needed):
            return True
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties", {})
    return "object" in types and all(is_finite(properties.get(name, additional), finite) for name in schema.get("required", ()))


def without_others(schema: Any, finite: frozenset[str]) -> Any:
    """`schema` with false for each reference to a definition that is not in `finite`."""
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix(_DEFINITION) not in finite:
        return False
    out = dict(schema)
    for keyword in _LISTS:
        if keyword in out:
            out[keyword] = [without_others(branch, finite) for branch in out[keyword]]
    for keyword in _SINGLES:
        if keyword in out:
            out[keyword] = without_others(out[keyword], finite)
    for keyword in _MAPS:
        if keyword in out:
            out[keyword] = {name: without_others(branch, finite) for name, branch in out[keyword].items()}
    return out


def in_place_order(definitions: Mapping[str, Any]) -> list[str] | None:
    """The definitions, each after those that it refers to for the same value; None where one so refers back to itself, which means nothing."""
    waiting = {name: _in_place(schema) for name, schema in definitions.items()}
    order: list[str] = []
    while waiting:
        ready = [name for name, needed in waiting.items() if not needed & waiting.keys()]
        if not ready:
            return None
        for name in ready:
            del waiting[name]
        order += ready
    return order


def _in_place(schema: Any) -> set[str]:
    """Names of the definitions that a value of `schema` itself may have to satisfy."""
    found, schemas = set(), [schema]
    while schemas:
        schema = schemas.pop()
        if isinstance(schema, Mapping):
            if "$ref" in schema:
                found.add(schema["$ref"].removeprefix(_DEFINITION))
            schemas += [*schema.get("allOf", ()), *schema.get("anyOf", ())]
    return found


def exceed_combinations(root: Any, definitions: Mapping[str, Any], order: list[str], limit: int) -> bool:
    """Whether more than `limit` branches meet in one place, which llguidance would write out one by one.

    Args:
        root: rewritten, as are the definitions.
        order: of the definitions, by `in_place_order`.
    """
    known: dict[str, int] = {}

    def count(schema: Any) -> int:
        if not isinstance(schema, Mapping):
            return 1
        total = sum(count(branch) for branch in schema["anyOf"]) if "anyOf" in schema else 1
        for branch in schema.get("allOf", ()):
            total = min(limit + 1, total * count(branch))
        if "$ref" in schema:
            total *= known[schema["$ref"].removeprefix(_DEFINITION)]
        return min(limit + 1, total)

    for name in order:
        known[name] = count(definitions[name])
    return any(
        len(schema.get("allOf", ())) + ("anyOf" in schema) + ("$ref" in schema) > 1 and count(schema) > limit for schema in _walk([root, *definitions.values()])
    )


def _walk(schemas: list[Any]) -> Iterator[Mapping[str, Any]]:
    while schemas:
        schema = schemas.pop()
        if isinstance(schema, Mapping):
            yield schema
            schemas += [branch for keyword in _LISTS for branch in schema.get(keyword, ())]
            schemas += [schema[keyword] for keyword in _SINGLES if keyword in schema]
            schemas += [branch for keyword in _MAPS for branch in schema.get(keyword, {}).values()]
