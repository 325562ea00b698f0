"""Which properties the objects of a JSON Schema may have by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


def property_names(schema: Mapping[str, Any], resolve: Callable[[str], Any]) -> list[str] | None:
    """The properties that `schema` lists or requires, in all its branches and references together, in their order.

    Args:
        schema: whose shape need not have been checked.
        resolve: the schema that a `$ref` names.

    Returns:
        None where some part of it has a schema for other properties too.
    """
    names: dict[str, None] = {}
    seen: set[int] = set()
    schemas: list[Any] = [schema]
    while schemas:
        part = schemas.pop(0)
        if not isinstance(part, Mapping) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part.get("additionalProperties"), Mapping) or part.get("patternProperties"):
            return None
        for listed in (part.get("properties"), part.get("required")):
            if isinstance(listed, (Mapping, list)):
                names.update((name, None) for name in listed if isinstance(name, str))
        for keyword in ("allOf", "anyOf", "oneOf"):
            if isinstance(part.get(keyword), list):
                schemas += part[keyword]
        if isinstance(part.get("$ref"), str):
            schemas.append(resolve(part["$ref"]))
    return list(names)
