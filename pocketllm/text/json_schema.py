"""The JSON Schema of a request, checked and rewritten into what llguidance enforces exactly.

Whatever the grammar lets a model say has to satisfy the schema. So each keyword is either enforced, known to say nothing about
the value, or refused by name; where llguidance or readers of schemas differ, the rewritten schema is the stricter one. Sizes and
depths are checked before llguidance, which is native code, sees any of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pocketllm.text.schema_bounds import FAR, MAX_NUMBER, admits, check_constant, write_bounds, write_counts
from pocketllm.text.schema_error import SchemaError, invalid, shown, step, too_large
from pocketllm.text.schema_format import FORMATS, FREE_FORMATS, NUMBER_FORMATS
from pocketllm.text.schema_keywords import BRANCHING, HARMLESS, REFUSED, is_annotation, meeting_parts
from pocketllm.text.schema_names import PropertyNames
from pocketllm.text.schema_overlap import Overlap, requiring
from pocketllm.text.schema_pattern import PatternError, read_pattern
from pocketllm.text.schema_pointer import NOWHERE, pointed_to
from pocketllm.text.schema_spelling import plain_spelling
from pocketllm.text.schema_tree import exceed_combinations, finite_definitions, in_place_order, is_finite, without_others

MAX_DEPTH = 32  # schemas within schemas, and arrays and objects within a constant
MAX_SCHEMAS = 2_000  # schemas of one request, each reference once
MAX_DEFINITIONS = 300
MAX_PROPERTIES = 400  # of one object
MAX_VALUES = 2_000  # constants of one request
MAX_TEXT = 200_000  # characters of all names and constants
MAX_ITEMS = 500  # minItems; a larger maxItems is taken for this
MAX_CHARACTERS = 2_000  # minLength
MAX_LENGTH = 100_000  # a larger maxLength is taken for this
MAX_MULTIPLES = 100_000  # sum of all multipleOf, whose remainders llguidance counts
MAX_COMBINATIONS = 500  # of the branches that meet in one place

_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Any value of JSON whose numbers are ones that a double can be.
_ANY = {"$ref": "#/$defs/any"}
_ANY_DEFINITION = {"minimum": -FAR, "maximum": FAR, "items": _ANY, "additionalProperties": _ANY}


def enforceable_schema(schema: Any, *, document: Any = None, closed: bool = False) -> dict[str, Any]:
    """`schema` in the dialect of llguidance, for a `%json` rule or a JSON grammar; whatever satisfies it satisfies `schema`.

    Args:
        schema: a JSON Schema of draft 2020-12, or of an older draft where that means the same: an object, or true.
        document: what its references point into; None where that is `schema`.
        closed: whether objects that list properties have no others, except where "additionalProperties" is a schema of theirs.

    Raises:
        SchemaError: naming the keyword that is invalid, can't be enforced, or is too large.
    """
    rewriter = _Rewriter(schema if document is None else document, closed)
    try:
        return rewriter.rewritten(schema)
    except SchemaError as error:
        error.parameter = rewriter.parameter
        raise


class _Rewriter:
    def __init__(self, root: Any, closed: bool) -> None:
        self._root = root
        self._closed = closed
        self._alone = True  # whether no other schema in the document is about the same values, which could exclude what is added here
        # names of definitions, by reference, whether they are alone, and a property that is required beside the others
        self._names: dict[tuple[str, bool, str | None], str] = {}
        self._pending: list[tuple[str, bool, str | None, str, str | None]] = []
        self._definitions: dict[str, Any] = {}
        self._overlap = Overlap(lambda reference: self._target(reference, "#"))
        self._names_in = PropertyNames(lambda reference: self._target(reference, "#"))
        self._schemas = self._values = self._text = 0
        self._multiples = 0.0
        self.parameter: str | None = None  # the property of the whole whose schema is being read

    def rewritten(self, schema: Any) -> dict[str, Any]:
        root = self._schema(schema, "#", 0)
        while self._pending:
            reference, self._alone, tag, name, self.parameter = self._pending.pop()
            target = self._target(reference, reference)
            self._definitions[name] = self._schema(target if tag is None else requiring(target, tag), reference, 0)
        self.parameter = None
        order = in_place_order(self._definitions)
        if order is None:
            raise SchemaError('a "$ref" in it leads back to itself for one and the same value', "Let what recurs be a property or an item", is_invalid=True)
        finite = finite_definitions(self._definitions)
        root = without_others(root, finite)
        if not is_finite(root, finite):
            listed = root.get("properties", {}) if isinstance(root, Mapping) else {}
            self.parameter = next((name for name in listed if name in root.get("required", ()) and not is_finite(listed[name], finite)), None)
            raise SchemaError("no finite value satisfies it", "Give what recurs an end, or what is required a schema that has values")
        definitions = {name: without_others(schema, finite) for name, schema in self._definitions.items() if name in finite}
        document = dict(root) if isinstance(root, Mapping) else {}
        if exceed_combinations(document, definitions, [name for name in order if name in finite], MAX_COMBINATIONS):
            too_large(f'the branches of its "anyOf" and "allOf" meet in more than {MAX_COMBINATIONS} combinations')
        if definitions:
            document["$defs"] = definitions
        return document

    # One method a keyword group. Each takes the schema, the rewritten one, and the place for messages.

    def _schema(self, schema: Any, place: str, depth: int) -> Any:
        if schema is True or schema is False:
            return self._any() if schema else False
        if not isinstance(schema, Mapping):
            invalid(place, f"{shown(schema)} is no schema", "A schema is an object, true or false")
        self._schemas += 1
        if self._schemas > MAX_SCHEMAS:
            too_large(f"it has more than {MAX_SCHEMAS} schemas in it")
        if depth > MAX_DEPTH:
            too_large(f"its schemas are nested more than {MAX_DEPTH} deep")
        schema = plain_spelling(schema, place, lambda reference: self._target(reference, place))
        out: dict[str, Any] = {}
        conjuncts: list[Any] = []
        was_alone = self._alone
        self._alone = was_alone and meeting_parts(schema) <= 1
        for keyword, value in schema.items():
            if is_annotation(keyword):
                continue
            if keyword in REFUSED:
                if any(value == harmless and type(value) is type(harmless) for harmless in HARMLESS.get(keyword, ())):
                    continue
                raise SchemaError(f'"{keyword}" at {place} can\'t be enforced while text is generated', f'Leave "{keyword}" out: {REFUSED[keyword]}')
            handler = _KEYWORDS.get(keyword)
            if handler is None:
                raise SchemaError(f"{shown(keyword)} at {place} is no keyword that can be enforced", f"Leave {shown(keyword)} out")
            handler(self, keyword, value, place, depth, out, conjuncts)
        is_leaf = not any(keyword in schema for keyword in ("allOf", "const", "enum", *BRANCHING))
        if was_alone:
            self._close(schema, place, out, conjuncts)
        if is_leaf and self._alone:
            if not schema.keys() & _KEYWORDS.keys():
                return self._any()
            if admits("array", out) and "items" not in out:
                out["items"] = self._any()
            if admits("object", out) and "additionalProperties" not in out:
                out["additionalProperties"] = self._any()
        self._alone = was_alone
        write_bounds(schema, place, out, is_leaf=is_leaf)
        self._multiples += out.get("multipleOf", 0)
        if self._multiples > MAX_MULTIPLES:
            too_large(f'"multipleOf" at {place} brings the sum of all to more than {MAX_MULTIPLES}')
        write_counts(place, out)
        if conjuncts:
            out["allOf"] = out.get("allOf", []) + conjuncts
        return out

    def _any(self) -> dict[str, Any]:
        """The schema of any value. Where others are about the same values, only theirs bound numbers: two that recur can't be made one."""
        if not self._alone:
            return {}
        self._definitions["any"] = _ANY_DEFINITION
        return dict(_ANY)

    def _close(self, schema: Mapping[str, Any], place: str, out: dict[str, Any], conjuncts: list[Any]) -> None:
        """Where objects are to be closed, leave no other properties than those that `schema` lists, in all its parts together."""
        if not self._alone:
            names = self._names_in.of(schema)
            if names and len(names) > MAX_PROPERTIES:
                too_large(f"the schemas that meet at {place} have {len(names)} properties, and at most {MAX_PROPERTIES} are taken")
            if names and self._closed:
                conjuncts.append({"properties": {name: {} for name in names}, "additionalProperties": False})
        elif (
            self._closed
            and ("properties" in out or "required" in out)
            and "patternProperties" not in out
            and not isinstance(schema.get("additionalProperties"), Mapping)
        ):
            listed = out.get("properties", {})
            out["properties"] = {**listed, **{name: self._any() for name in out.get("required", ()) if name not in listed}}
            out["additionalProperties"] = False

    def _type(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                invalid(place, f'"type": {shown(name)} is no type', f"The types are {', '.join(_TYPES)}")
        if not names:
            invalid(place, '"type": [] names no type', f"The types are {', '.join(_TYPES)}")
        if "number" in names:
            names = [name for name in names if name != "integer"]
        out[keyword] = names[0] if len(names) == 1 else list(dict.fromkeys(names))

    def _constants(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        values = value if keyword == "enum" else [value]
        if not isinstance(values, list) or not values:
            invalid(place, f'"{keyword}" is {shown(value)}', 'Send "enum" as an array of values')
        for item in values:
            self._constant(item, f'"{keyword}" at {place}', 0)
        out[keyword] = value

    def _constant(self, value: Any, where: str, depth: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            too_large(f"{where} brings it to more than {MAX_VALUES} constants")
        if depth > MAX_DEPTH:
            too_large(f"{where} holds a value nested more than {MAX_DEPTH} deep")
        if isinstance(value, str):
            self._checked_text(value, where)
        elif isinstance(value, Mapping):
            for name, item in value.items():
                self._checked_text(name, where)
                self._constant(item, where, depth + 1)
        elif isinstance(value, list):
            for item in value:
                self._constant(item, where, depth + 1)
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            check_constant(value, where)

    def _checked_text(self, text: str, where: str) -> None:
        self._text += len(text)
        if self._text > MAX_TEXT:
            too_large(f"{where} brings its names and constants to more than {MAX_TEXT} characters")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
            raise SchemaError(f"{where} holds half of a surrogate pair, which is no character of any text", "Send valid Unicode", is_invalid=True)

    def _all_of(self, keyword: str, value: Any, place: str, depth: int, _out: dict[str, Any], conjuncts: list[Any]) -> None:
        conjuncts.extend(self._branches(keyword, value, place, depth))

    def _any_of(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], conjuncts: list[Any]) -> None:
        tag = None
        if keyword == "oneOf" and isinstance(value, list) and 0 < len(value) <= MAX_VALUES and not self._overlap.exclusive(value):
            tag = self._overlap.tag(value)
            if tag is None:
                self._branches(keyword, value, place, depth)  # what else is wrong with them comes first
                raise SchemaError(
                    f'"oneOf" at {place} can\'t be enforced: its branches are not seen to exclude each other',
                    'Use "anyOf", or give the branches different types or a required property with different constants',
                )
        branches = self._branches(keyword, value, place, depth, tag)
        if "anyOf" in out:
            conjuncts.append({"anyOf": branches})
        else:
            out["anyOf"] = branches

    def _branches(self, keyword: str, value: Any, place: str, depth: int, tag: str | None = None) -> list[Any]:
        if not isinstance(value, list) or not value:
            invalid(place, f'"{keyword}" is {shown(value)}', f'Send "{keyword}" as an array of schemas')
        if len(value) > MAX_VALUES:
            too_large(f'"{keyword}" at {place} has more than {MAX_VALUES} branches')
        return [self._branch(branch, f"{place}/{keyword}/{index}", depth + 1, tag) for index, branch in enumerate(value)]

    def _branch(self, schema: Any, place: str, depth: int, tag: str | None) -> Any:
        if tag is None:
            return self._schema(schema, place, depth)
        if all(keyword == "$ref" or is_annotation(keyword) for keyword in schema):
            return {"$ref": self._reference(schema["$ref"], place, tag)}
        return self._schema(requiring(schema, tag), place, depth)

    def _ref(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, str):
            invalid(place, f'"$ref" is {shown(value)}', 'Send "$ref" as a string such as "#/$defs/name"')
        out[keyword] = self._reference(value, place)

    def _reference(self, reference: str, place: str, tag: str | None = None) -> str:
        """A reference to the rewritten schema that `reference` points to, in which `tag` is required as well."""
        key = reference, self._alone, tag
        if key not in self._names:
            self._target(reference, place)
            if len(self._names) >= MAX_DEFINITIONS:
                too_large(f"it refers to more than {MAX_DEFINITIONS} definitions")
            self._names[key] = f"d{len(self._names)}"
            self._pending.append((*key, self._names[key], self.parameter))
        return f"#/$defs/{self._names[key]}"

    def _target(self, reference: str, place: str) -> Any:
        """The schema that `reference` points to, by JSON Pointer from the root."""
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(
                f'"$ref": {shown(reference)} at {place} does not point into this schema, and nothing is fetched',
                'Put the schema into "$defs" and refer to it as "#/$defs/name"',
            )
        found = pointed_to(self._root, reference)
        if found is NOWHERE:
            invalid(place, f'"$ref": {shown(reference)} points to nothing', 'Refer to a schema in "$defs"')
        return found

    def _pattern(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, str):
            invalid(place, f'"pattern" is {shown(value)}', 'Send "pattern" as a string')
        out[keyword] = self._regex(value, "pattern", place)[0]

    def _regex(self, pattern: str, keyword: str, place: str) -> tuple[str, bool]:
        self._checked_text(pattern, f'"{keyword}" at {place}')
        try:
            read = read_pattern(pattern)
        except PatternError as error:
            raise SchemaError(f'"{keyword}" {shown(pattern)} at {place} can\'t be enforced: {error}', "Send a simpler pattern") from None
        return f"^{read.regex}$", read.is_exact

    def _format(self, _keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], conjuncts: list[Any]) -> None:
        if not isinstance(value, str):
            invalid(place, f'"format" is {shown(value)}', 'Send "format" as a string')
        if value in NUMBER_FORMATS:
            bounds = NUMBER_FORMATS[value]
            if bounds is not None:
                conjuncts.append({"minimum": max(bounds[0], -MAX_NUMBER), "maximum": min(bounds[1], MAX_NUMBER)})
            return
        if value in FREE_FORMATS:
            return
        if value not in FORMATS:
            raise SchemaError(f'"format": {shown(value)} at {place} is none that can be enforced', f'The formats are {", ".join(FORMATS)}; or use "pattern"')
        conjuncts.append({"pattern": f"^(?:{FORMATS[value]})$"})

    def _properties(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, Mapping):
            invalid(place, f'"properties" is {shown(value)}', 'Send "properties" as an object of schemas')
        if len(value) > MAX_PROPERTIES:
            too_large(f'"properties" at {place} has {len(value)} properties, and at most {MAX_PROPERTIES} are taken')
        for name in value:
            self._property_name(name, place)
        rewritten = out[keyword] = {}
        for name, schema in value.items():
            if place == "#":
                self.parameter = name
            rewritten[name] = self._schema(schema, f"{place}/properties/{step(name)}", depth + 1)
        if place == "#":
            self.parameter = None

    def _property_name(self, name: str, place: str) -> None:
        self._checked_text(name, f"a property at {place}")
        if not all(ord(character) >= 32 and character != "\x7f" for character in name):
            raise SchemaError(f"the property {shown(name)} at {place} has a control character in its name", "Choose another name")

    def _pattern_properties(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, Mapping):
            invalid(place, f'"patternProperties" is {shown(value)}', 'Send "patternProperties" as an object of schemas')
        if len(value) > 16:
            too_large(f'"patternProperties" at {place} has {len(value)} patterns, and at most 16 are taken')
        rewritten = {}
        for pattern, schema in value.items():
            regex, is_exact = self._regex(pattern, keyword, place)
            if not is_exact:
                # A name that only some readers match would be an additional property for llguidance alone.
                raise SchemaError(
                    f'"patternProperties" {shown(pattern)} at {place} can\'t be enforced: readers of patterns disagree on what ".", \\d, \\w and \\s match',
                    "Write the characters out, such as [0-9]",
                )
            rewritten[regex] = self._schema(schema, f"{place}/patternProperties/{step(pattern)}", depth + 1)
        if rewritten:
            out[keyword] = rewritten

    def _subschema(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        out[keyword] = self._schema(value, f"{place}/{keyword}", depth + 1)

    def _prefix_items(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if isinstance(value, list) and len(value) > MAX_ITEMS:
            too_large(f'"prefixItems" at {place} has {len(value)} items, and at most {MAX_ITEMS} are taken')
        out[keyword] = self._branches(keyword, value, place, depth)

    def _required(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            invalid(place, f'"required" is {shown(value)}', 'Send "required" as an array of names')
        if len(value) > MAX_PROPERTIES:
            too_large(f'"required" at {place} has {len(value)} names, and at most {MAX_PROPERTIES} are taken')
        for name in value:
            self._property_name(name, place)
        out[keyword] = list(dict.fromkeys(value))

    def _count(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf or value != int(value):
            invalid(place, f'"{keyword}" is {shown(value)}', f'Send "{keyword}" as a whole number of at least 0')
        value = int(value)
        limit = MAX_CHARACTERS if keyword == "minLength" else MAX_LENGTH if keyword == "maxLength" else MAX_ITEMS
        if keyword.startswith("min") and value > limit:
            too_large(f'"{keyword}" at {place} is {shown(value)}, and at most {limit} is taken')
        out[keyword] = min(value, limit)

    def _number(self, keyword: str, value: Any, place: str, _depth: int, _out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -math.inf < value < math.inf:
            invalid(place, f'"{keyword}" is {shown(value)}', f'Send "{keyword}" as a number')


_Handler = Callable[[_Rewriter, str, Any, str, int, dict[str, Any], list[Any]], None]
_KEYWORDS: dict[str, _Handler] = {
    "type": _Rewriter._type,
    "const": _Rewriter._constants,
    "enum": _Rewriter._constants,
    "allOf": _Rewriter._all_of,
    "anyOf": _Rewriter._any_of,
    "oneOf": _Rewriter._any_of,
    "$ref": _Rewriter._ref,
    "pattern": _Rewriter._pattern,
    "format": _Rewriter._format,
    "properties": _Rewriter._properties,
    "patternProperties": _Rewriter._pattern_properties,
    "additionalProperties": _Rewriter._subschema,
    "required": _Rewriter._required,
    "items": _Rewriter._subschema,
    "prefixItems": _Rewriter._prefix_items,
    **dict.fromkeys(("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"), _Rewriter._count),
    **dict.fromkeys(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"), _Rewriter._number),
}
