"""The keywords of JSON Schema that are not enforced: those that say nothing of the value, and those that are refused."""

from __future__ import annotations

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
    "propertyNames": 'use "patternProperties" with "additionalProperties": false',
    "unevaluatedProperties": 'use "additionalProperties"',
    "unevaluatedItems": 'use "items"',
    "additionalItems": 'use "prefixItems" and "items"',
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


def is_annotation(keyword: str) -> bool:
    """Whether a keyword says nothing that a value could break."""
    return keyword in _ANNOTATIONS or keyword.startswith("x-")
