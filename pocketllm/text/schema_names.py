"""Which properties the objects of a JSON Schema may have by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from pocketllm.text.schema_error import too_large

_STEPS = 20_000


class PropertyNames:
    """Collects names within one document, whose shape need not have been checked.

    Args:
        resolve: the schema that a `$ref` names.
    """

    def __init__(self, resolve: Callable[[str], Any]) -> None:
        self._resolve = resolve
        self._steps = 0

    def of(self, schema: Mapping[str, Any]) -> list[str] | None:
        """The properties that `schema` lists or requires, in all its branches and references together; None where some part has a schema for others.

        Raises:
            SchemaError: too many schemas meet in too many places.
        """
        names: dict[str, None] = {}
        seen: set[int] = set()
        schemas: deque[Any] = deque([schema])
        while schemas:
            part = schemas.popleft()
            self._steps += 1
            if self._steps > _STEPS:
                too_large('too many schemas meet in its "$ref", "allOf" and "anyOf"')
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
                    schemas.extend(part[keyword])
            if isinstance(part.get("$ref"), str):
                schemas.append(self._resolve(part["$ref"]))
        return list(names)
