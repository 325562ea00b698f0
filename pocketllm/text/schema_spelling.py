"""JSON Schemas in the spellings of older drafts and of libraries that write schemas, said in the keywords that json_schema.py takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pocketllm.text.schema_error import SchemaError, invalid, shown
from pocketllm.text.schema_format import FORMATS, STANDARD_FORMATS
from pocketllm.text.schema_keywords import is_annotation

_MAX_REFERENCES = 32
_ANY_CHARACTER = r"(?:[^\n]|\n)"  # unlike ".", the same to every reader of patterns

Resolve = Callable[[str], Any]


def plain_spelling(schema: Mapping[str, Any], place: str, resolve: Resolve) -> Mapping[str, Any]:
    """`schema`, or where it needs rewording a copy of the top level, which takes no value that `schema` refuses.

    A list of "items", as drafts before 2020-12 have it, becomes "prefixItems". "propertyNames", which pydantic and zod write for a dictionary's keys,
    becomes what properties there are. A "format" of a library's own says no more than the "pattern" that it puts beside it.

    Args:
        place: for messages.
        resolve: the schema that a `$ref` names.

    Raises:
        SchemaError: names are restricted in a way that can't be said so.
    """
    if "additionalItems" in schema or isinstance(schema.get("items"), list):
        schema = _tuple(schema, place)
    if "propertyNames" in schema:
        schema = _named(schema, place, resolve)
    name = schema.get("format")
    if isinstance(name, str) and isinstance(schema.get("pattern"), str) and name not in STANDARD_FORMATS:
        schema = {keyword: value for keyword, value in schema.items() if keyword != "format"}
    return schema


def _tuple(schema: Mapping[str, Any], place: str) -> Mapping[str, Any]:
    found = {keyword: value for keyword, value in schema.items() if keyword != "additionalItems"}
    if not isinstance(schema.get("items"), list):
        return found  # without a list, "additionalItems" says nothing in any draft
    if "prefixItems" in schema:
        invalid(place, '"items" is an array beside "prefixItems"', 'Use "prefixItems" for the first items and "items" for the others')
    if first := found.pop("items"):
        found["prefixItems"] = first
    if "additionalItems" in schema:
        found["items"] = schema["additionalItems"]
    return found


def _named(schema: Mapping[str, Any], place: str, resolve: Resolve) -> Mapping[str, Any]:
    found = {keyword: value for keyword, value in schema.items() if keyword != "propertyNames"}
    rule = _said(schema["propertyNames"], place, resolve)
    if not rule:
        return found
    others, listed = found.pop("additionalProperties", True), found.get("properties", {})
    if not found.get("patternProperties") and isinstance(listed, Mapping):
        names = [rule["const"]] if rule.keys() == {"const"} else rule["enum"] if rule.keys() == {"enum"} else None
        if isinstance(names, list):
            properties = {name: listed.get(name, others) for name in names if isinstance(name, str)}
            return {**found, "properties": properties, "additionalProperties": False}
        pattern = _pattern(rule)
        if pattern is not None and not listed and not found.get("required"):
            return {**found, "patternProperties": {pattern: others}, "additionalProperties": False}
    raise SchemaError(
        f'"propertyNames" at {place} can\'t be enforced while text is generated',
        'Leave "propertyNames" out: use "patternProperties" with "additionalProperties": false',
    )


def _said(rule: Any, place: str, resolve: Resolve) -> dict[str, Any]:
    """What a schema of names says of them, beyond that they are strings."""
    for _ in range(_MAX_REFERENCES):
        if rule is True or rule is False:
            return {} if rule else {"enum": []}
        if not isinstance(rule, Mapping):
            invalid(place, f'"propertyNames" is {shown(rule)}', "A schema is an object, true or false")
        said = {keyword: value for keyword, value in rule.items() if not is_annotation(keyword)}
        if said.keys() != {"$ref"} or not isinstance(said["$ref"], str):
            break
        rule = resolve(said["$ref"])
    return {keyword: value for keyword, value in said.items() if (keyword, value) != ("type", "string")}


def _pattern(rule: Mapping[str, Any]) -> str | None:
    """The one pattern that says what `rule` does, or None."""
    if rule.keys() == {"pattern"} and isinstance(rule["pattern"], str):
        return rule["pattern"]
    if rule.keys() == {"format"} and isinstance(rule["format"], str) and rule["format"] in FORMATS:
        return f"^(?:{FORMATS[rule['format']]})$"
    low, high = rule.get("minLength", 0), rule.get("maxLength", "")
    if rule.keys() <= {"minLength", "maxLength"} and type(low) is int and (high == "" or type(high) is int) and low >= 0:
        return f"^{_ANY_CHARACTER}{{{low},{high}}}$"
    return None
