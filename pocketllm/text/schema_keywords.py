"""The keywords of JSON Schema that say nothing of the value, those that are refused, and those that bring schemas of one value together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# They say something about the value for people, or for other keywords that are refused.
_ANNOTATIONS = frozenset(
    (
        *("$schema", "$id", "id", "$anchor", "$comment", "$vocabulary", "$defs", "definitions"),
        *("title", "description", "default", "deprecated", "readOnly", "writeOnly", "example", "examples"),
        *("contentMediaType", "contentEncoding", "contentSchema", "discriminator", "externalDocs", "xml"),
    )
)
# keyword: what to do instead
REFUSED = {
    "not": "describe what is allowed instead",
    "if": 'use "anyOf" with one branch for each case',
    "then": 'use "anyOf" with one branch for each case',
    "else": 'use "anyOf" with one branch for each case',
    "dependentRequired": 'use "anyOf" with one branch for each case',
    "dependentSchemas": 'use "anyOf" with one branch for each case',
    "dependencies": 'use "anyOf" with one branch for each case',
    "unevaluatedProperties": 'use "additionalProperties"',
    "unevaluatedItems": 'use "items"',
    "nullable": 'use "type" with "null" in it, or "anyOf"',
    "$dynamicRef": 'use "$ref"',
    "$recursiveRef": 'use "$ref"',
    "uniqueItems": "check the parsed answer",
    "contains": "check the parsed answer",
    "minContains": "check the parsed answer",
    "maxContains": "check the parsed answer",
}
# values with which a refused keyword says nothing
HARMLESS: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,), "nullable": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {})}

BRANCHING = ("anyOf", "oneOf", "$ref")
# Keywords that say what is within arrays and objects. Beside branches or a reference they meet other schemas of the same values.
_INNER = ("properties", "patternProperties", "additionalProperties", "required", "items", "prefixItems")


def is_annotation(keyword: str) -> bool:
    """Whether a keyword says nothing that a value could break."""
    return keyword in _ANNOTATIONS or keyword.startswith("x-")


def meeting_parts(schema: Mapping[str, Any]) -> int:
    """How many schemas of the same values meet in one."""
    parts = sum(keyword in schema for keyword in BRANCHING) + any(keyword in schema for keyword in _INNER)
    return parts + (len(schema["allOf"]) if isinstance(schema.get("allOf"), list) else 0)
