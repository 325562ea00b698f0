"""Whether two JSON Schemas can be seen to share no value, so that `oneOf` over them is the same as `anyOf`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

_TYPES = ("null", "boolean", "number", "string", "array", "object")
_DEPTH = 8
_STEPS = 20_000

Resolve = Callable[[str], Any]


class Overlap:
    """Compares schemas of one document.

    Args:
        resolve: the schema that a `$ref` names.
    """

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._steps = 0

    def exclusive(self, schemas: list[Any]) -> bool:
        """Whether it can be seen that no value satisfies two of `schemas`."""
        return all(self._apart(left, right, _DEPTH) for index, left in enumerate(schemas) for right in schemas[index + 1 :])

    def tag(self, schemas: list[Any]) -> str | None:
        """A property that tells `schemas`, all of objects, apart once each requires it, or None. Libraries don't require a tag that has a default."""
        parts = [self._parts(schema, _DEPTH) for schema in schemas]
        if any(self._types(several) != {"object"} for several in parts):
            return None
        listed = [{name: found for part in several for name, found in _properties(part).items()} for several in parts]
        common = [name for name in listed[0] if all(name in properties for properties in listed)]
        return next((name for name in common if self.exclusive([properties[name] for properties in listed])), None)

    def _apart(self, left: Any, right: Any, depth: int) -> bool:
        self._steps += 1
        if depth == 0 or self._steps > _STEPS:
            return False
        if left is False or right is False:
            return True
        lefts, rights = self._parts(left, depth), self._parts(right, depth)
        common = self._types(lefts) & self._types(rights)
        if not common:
            return True
        for part, others in [(part, rights) for part in lefts] + [(part, lefts) for part in rights]:
            branches = part.get("anyOf") or part.get("oneOf")
            whole = right if others is rights else left
            if isinstance(branches, list) and branches and all(self._apart(branch, whole, depth - 1) for branch in branches):
                return True
        return any(self._parts_apart(one, other, common, depth) for one in lefts for other in rights)

    def _parts_apart(self, left: Mapping[str, Any], right: Mapping[str, Any], common: set[str], depth: int) -> bool:
        values, others = _values(left), _values(right)
        if values is not None and others is not None and not any(_equal(value, other) for value in values for other in others):
            return True
        return common == {"object"} and (self._required_apart(left, right, depth) or self._required_apart(right, left, depth))

    def _required_apart(self, left: Mapping[str, Any], right: Mapping[str, Any], depth: int) -> bool:
        """Whether some property that `left` requires can't have one value for both."""
        mine, theirs = _properties(left), _properties(right)
        closed = right.get("additionalProperties") is False and not right.get("patternProperties")
        required = left.get("required")
        for name in required if isinstance(required, list) else []:
            if not isinstance(name, str):
                continue
            if name in theirs:
                if name in mine and self._apart(mine[name], theirs[name], depth - 1):
                    return True
            elif closed:
                return True
        return False

    def _parts(self, schema: Any, depth: int) -> list[Mapping[str, Any]]:
        """The object schemas that a value of `schema` has to satisfy, each once; after too many steps not all, which can only hide a difference."""
        found: dict[int, Mapping[str, Any]] = {}
        schemas = [(schema, depth)]
        while schemas and self._steps <= _STEPS:
            part, depth = schemas.pop()
            self._steps += 1
            if not isinstance(part, Mapping) or depth == 0 or id(part) in found:
                continue
            found[id(part)] = part
            if isinstance(part.get("$ref"), str):
                schemas.append((self._resolve(part["$ref"]), depth - 1))
            if isinstance(part.get("allOf"), list):
                schemas += [(branch, depth - 1) for branch in part["allOf"][:_STEPS]]
        return list(found.values())

    def _types(self, parts: list[Mapping[str, Any]]) -> set[str]:
        types = set(_TYPES)
        for part in parts:
            named = part.get("type")
            if isinstance(named, str):
                types &= {_type_name(named)}
            elif isinstance(named, list):
                types &= {_type_name(name) for name in named if isinstance(name, str)}
            values = _values(part)
            if values is not None:
                types &= {_type_of(value) for value in values}
        return types


def requiring(schema: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of `schema`, which is one of objects, that requires property `name` as well."""
    required = schema.get("required", [])
    return {**schema, "required": [*required, name] if isinstance(required, list) else required}


def _properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    listed = schema.get("properties")
    return listed if isinstance(listed, Mapping) else {}


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The finitely many values of a schema, or None."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and len(values) <= 200 else None


def _type_name(name: str) -> str:
    return "number" if name == "integer" else name


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    return "number" if isinstance(value, (int, float)) else "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _equal(left: Any, right: Any) -> bool:
    """Equality of JSON values, taking arrays and objects to be equal: they are not compared."""
    kind = _type_of(left)
    if kind != _type_of(right):
        return False
    return True if kind in ("array", "object") else bool(left == right)
