"""Sixty JSON Schemas of the kinds that people send, each with a line that asks a model for such a value."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _object(properties: dict[str, Any], required: list[str] | None = None, **more: Any) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties) if required is None else required, "additionalProperties": False, **more}


SCHEMAS: dict[str, Schema] = {
    "string": {"type": "string", "maxLength": 12},
    "integer": {"type": "integer"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "nullable string": {"type": ["string", "null"], "maxLength": 10},
    "enum": {"enum": ["red", "green", "blue"]},
    "enum of all kinds": {"enum": ["one", 2, 3.5, True, None, [4], {"five": 5}]},
    "enum in unicode": {"enum": ["grün", "синий", "赤", "🟡 gelb", "naïve"]},
    "enum with quotes": {"enum": ['say "hi"', "back\\slash", "line\nbreak", "tab\t", "nul\x00", "del\x7f", "</script>", "'single'"]},
    "enum with line separators": {"enum": ["a\u2028b", "a\u2029b", "a\u00a0b"]},
    "enum behind $ref": {"$ref": "#/$defs/colour", "$defs": {"colour": {"enum": ["rot", "grün"]}}},
    "enum behind two $refs": _object({"c": {"$ref": "#/$defs/a"}}, **{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"enum": ["x", "y"]}}}),
    "enum with a type": {"type": "string", "enum": ["left", "right"]},
    "const string": {"const": "fixed"},
    "const object": {"const": {"b": 1, "a": [True, None, "é"]}},
    "const in an object": _object({"version": {"const": 2}, "kind": {"const": "reply"}}),
    "percent": {"type": "integer", "minimum": 0, "maximum": 100},
    "exclusive bounds": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "negative bounds": {"type": "number", "minimum": -273.15, "maximum": -0.5},
    "bounds in an object": _object({"age": {"type": "integer", "minimum": 0, "maximum": 130}, "score": {"type": "number", "minimum": 0, "maximum": 10}}),
    "multiple of five": {"type": "integer", "multipleOf": 5, "minimum": 10, "maximum": 95},
    "multiple of a half": {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 5},
    "int32": {"type": "integer", "format": "int32"},
    "pattern": {"type": "string", "pattern": "^[A-Z]{3}-[0-9]{4}$"},
    "pattern with classes": {"type": "string", "pattern": r"^\w{2,8}@\w{2,8}\.(com|org)$"},
    "pattern that is searched": {"type": "string", "pattern": "[0-9]", "maxLength": 12},
    "pattern with branches": {"type": "string", "pattern": "^(yes|no|maybe)$"},
    "pattern and length": {"type": "string", "pattern": "^[a-z ]+$", "minLength": 4, "maxLength": 16},
    "phone": {"type": "string", "pattern": r"^\+?[0-9]{3}[- ][0-9]{4}$"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "email": {"type": "string", "format": "email"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "hostname": {"type": "string", "format": "hostname"},
    "array of numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 2, "maxItems": 4},
    "nested arrays": {"type": "array", "items": {"type": "array", "items": {"enum": [0, 1]}, "minItems": 2, "maxItems": 2}, "minItems": 2, "maxItems": 2},
    "tuple": {"type": "array", "prefixItems": [{"enum": ["x", "y"]}, {"type": "integer", "maximum": 9, "minimum": 0}], "items": False, "minItems": 2},
    "tuple with a tail": {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}, "minItems": 1, "maxItems": 3},
    "array of enums": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    "person": _object({"name": {"type": "string", "maxLength": 16}, "age": {"type": "integer", "minimum": 0, "maximum": 120}}),
    "optional properties": _object({"a": {"type": "boolean"}, "b": {"type": "integer", "minimum": 0, "maximum": 9}, "c": {"type": "null"}}, ["b"]),
    "names with quotes": _object({'the "name"': {"type": "boolean"}, "größe": {"type": "boolean"}, "a/b~c": {"type": "null"}, "$ref": {"type": "boolean"}}),
    "nested objects": _object({"outer": _object({"inner": _object({"value": {"enum": [1, 2]}})})}),
    "object in an array": {"type": "array", "items": _object({"id": {"type": "integer", "minimum": 1, "maximum": 9}}), "minItems": 1, "maxItems": 2},
    "typed additional": {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 99}, "maxProperties": 2},
    "pattern properties": {"type": "object", "patternProperties": {"^x-[a-z]{1,6}$": {"type": "boolean"}}, "additionalProperties": False, "maxProperties": 2},
    "required not listed": {"type": "object", "required": ["answer"], "additionalProperties": {"type": "boolean"}, "maxProperties": 1},
    "anyOf scalars": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"enum": ["none", "all"]}, {"type": "null"}]},
    "anyOf objects": {"anyOf": [_object({"ok": {"const": True}, "n": {"enum": [1, 2]}}), _object({"ok": {"const": False}, "why": {"enum": ["late", "lost"]}})]},
    "anyOf with siblings": {"type": "string", "maxLength": 5, "anyOf": [{"pattern": "^a"}, {"pattern": "z$"}]},
    "oneOf by type": {"oneOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 9}]},
    "oneOf by a constant": {
        "oneOf": [{"$ref": "#/$defs/cat"}, {"$ref": "#/$defs/dog"}],
        "discriminator": {"propertyName": "kind"},
        "$defs": {
            "cat": _object({"kind": {"const": "cat"}, "lives": {"enum": [7, 9]}}),
            "dog": _object({"kind": {"const": "dog"}, "barks": {"type": "boolean"}}),
        },
    },
    "allOf": {
        "allOf": [{"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}, _object({"a": {"type": "integer"}, "b": {"type": "null"}}, ["b"])]
    },
    "allOf of bounds": {"type": "integer", "allOf": [{"minimum": 10}, {"maximum": 20}, {"multipleOf": 2}]},
    "recursive list": {
        "$ref": "#/$defs/node",
        "$defs": {"node": _object({"v": {"enum": [0, 1]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}})},
    },
    "recursive tree": _object({"leaf": {"type": "boolean"}, "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1}}),
}


def response_format(schema: Schema) -> dict[str, Any]:
    """The request field that asks for `schema`."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
