"""The JSON Schema of a request, checked and rewritten into what llguidance enforces exactly.

Whatever the grammar lets a model say has to satisfy the schema. So each keyword is either enforced, known to say nothing about
the value, or refused by name; where llguidance or readers of schemas differ, the rewritten schema is the stricter one. Sizes and
depths are checked before llguidance, which is native code, sees any of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn
from urllib.parse import unquote

from pocketllm.text.schema_format import FORMATS, NUMBER_FORMATS
from pocketllm.text.schema_overlap import Overlap
from pocketllm.text.schema_pattern import PatternError, matches, read_pattern

MAX_DEPTH = 32  # schemas within schemas, and arrays and objects within a constant
MAX_SCHEMAS = 3_000  # schemas of one request, each reference once
MAX_DEFINITIONS = 300
MAX_PROPERTIES = 400  # of one object
MAX_VALUES = 2_000  # constants of one request
MAX_TEXT = 200_000  # characters of all names and constants
MAX_ITEMS = 500  # minItems; a larger maxItems is taken for this
MAX_CHARACTERS = 2_000  # minLength
MAX_LENGTH = 100_000  # a larger maxLength is taken for this
MAX_COMBINATIONS = 500  # of the branches that meet in one place
MAX_NUMBER = 2**53  # doubles count no further; looser bounds are taken for this
MAX_MULTIPLE = 10_000
SMALLEST = 1e-9  # what is above 0 is at least this

# They say something about the value for people, or for other keywords that are refused.
_ANNOTATIONS = frozenset(
    "$schema $id id $anchor $comment $vocabulary $defs definitions title description default deprecated readOnly writeOnly example examples"
    " contentMediaType contentEncoding contentSchema discriminator externalDocs xml".split()
)
_TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# keyword: what to do instead
_REFUSED = {
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
_HARMLESS: dict[str, tuple[Any, ...]] = {"uniqueItems": (False,), "nullable": (False,), "unevaluatedProperties": (True, {}), "unevaluatedItems": (True, {})}


class SchemaError(ValueError):
    """A schema that can't be enforced.

    Args:
        reason: names the keyword and the place; the second half of a sentence.
        remedy: what to send instead, a sentence without its full stop.
        is_invalid: whether it is no JSON Schema at all, rather than one that asks for too much.
    """

    def __init__(self, reason: str, remedy: str, *, is_invalid: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy
        self.is_invalid = is_invalid


def enforceable_schema(schema: Any) -> dict[str, Any]:
    """`schema` in the dialect of llguidance, for a `%json` rule or a JSON grammar; whatever satisfies it satisfies `schema`.

    Args:
        schema: a JSON Schema of draft 2020-12, or of an older draft where that means the same: an object, or true.

    Raises:
        SchemaError: naming the keyword that is invalid, can't be enforced, or is too large.
    """
    return _Rewriter(schema).document()


class _Rewriter:
    def __init__(self, root: Any) -> None:
        self._root = root
        self._names: dict[str, str] = {}  # of definitions, by reference
        self._pending: list[tuple[str, str]] = []
        self._definitions: dict[str, Any] = {}
        self._overlap = Overlap(lambda reference: self._target(reference, "#"))
        self._schemas = self._values = self._text = 0

    def document(self) -> dict[str, Any]:
        root = self._schema(self._root, "#", 0)
        while self._pending:
            reference, name = self._pending.pop()
            self._definitions[name] = self._schema(self._target(reference, reference), reference, 0)
        finite = self._finite_definitions()
        root = _without(root, finite)
        if not _is_finite(root, finite):
            raise SchemaError("no finite value satisfies it", "Give what recurs an end, or what is required a schema that has values")
        definitions = {name: _without(schema, finite) for name, schema in self._definitions.items() if name in finite}
        document = dict(root) if isinstance(root, Mapping) else {}
        self._check_combinations(document, definitions)
        if definitions:
            document["$defs"] = definitions
        return document

    # One method a keyword group. Each takes the schema, the rewritten one, and the place for messages.

    def _schema(self, schema: Any, place: str, depth: int) -> Any:
        if schema is True or schema is False:
            return {} if schema else False
        if not isinstance(schema, Mapping):
            _invalid(place, f"{_shown(schema)} is no schema", "A schema is an object, true or false")
        self._schemas += 1
        if self._schemas > MAX_SCHEMAS:
            _too_large(f"it has more than {MAX_SCHEMAS} schemas in it")
        if depth > MAX_DEPTH:
            _too_large(f"its schemas are nested more than {MAX_DEPTH} deep")
        out: dict[str, Any] = {}
        conjuncts: list[Any] = []
        for keyword, value in schema.items():
            if keyword in _ANNOTATIONS or keyword.startswith("x-"):
                continue
            if keyword in _REFUSED:
                if any(value == harmless and type(value) is type(harmless) for harmless in _HARMLESS.get(keyword, ())):
                    continue
                raise SchemaError(f'"{keyword}" at {place} can\'t be enforced while text is generated', f'Leave "{keyword}" out: {_REFUSED[keyword]}')
            handler = _KEYWORDS.get(keyword)
            if handler is None:
                raise SchemaError(f"{_shown(keyword)} at {place} is no keyword that can be enforced", f"Leave {_shown(keyword)} out")
            handler(self, keyword, value, place, depth, out, conjuncts)
        _check_numbers(schema, place, out)
        _check_counts(schema, place, out)
        if conjuncts:
            out["allOf"] = out.get("allOf", []) + conjuncts
        return out

    def _type(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        names = value if isinstance(value, list) else [value]
        for name in names:
            if not isinstance(name, str) or name not in _TYPES:
                _invalid(place, f'"type": {_shown(name)} is no type', f"The types are {', '.join(_TYPES)}")
        if not names:
            _invalid(place, '"type": [] names no type', f"The types are {', '.join(_TYPES)}")
        if "number" in names:
            names = [name for name in names if name != "integer"]
        out[keyword] = names[0] if len(names) == 1 else list(dict.fromkeys(names))

    def _constants(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        values = value if keyword == "enum" else [value]
        if not isinstance(values, list) or not values:
            _invalid(place, f'"{keyword}" is {_shown(value)}', 'Send "enum" as an array of values')
        for item in values:
            self._constant(item, f'"{keyword}" at {place}', 0)
        out[keyword] = value

    def _constant(self, value: Any, where: str, depth: int) -> None:
        self._values += 1
        if self._values > MAX_VALUES:
            _too_large(f"{where} brings it to more than {MAX_VALUES} constants")
        if depth > MAX_DEPTH:
            _too_large(f"{where} holds a value nested more than {MAX_DEPTH} deep")
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
            if not math.isfinite(value) or abs(value) > MAX_NUMBER:
                raise SchemaError(f"{where} holds a number beyond 2**53, where JSON readers disagree on its value", "Send such a number as a string")
            if value != 0 and abs(value) < SMALLEST:
                raise SchemaError(f"{where} holds a number closer to 0 than {SMALLEST}", "Use a larger unit")

    def _checked_text(self, text: str, where: str) -> None:
        self._text += len(text)
        if self._text > MAX_TEXT:
            _too_large(f"{where} brings its names and constants to more than {MAX_TEXT} characters")
        if any(0xD800 <= ord(character) <= 0xDFFF for character in text):
            raise SchemaError(f"{where} holds half of a surrogate pair, which is no character of any text", "Send valid Unicode", is_invalid=True)

    def _all_of(self, keyword: str, value: Any, place: str, depth: int, _out: dict[str, Any], conjuncts: list[Any]) -> None:
        conjuncts.extend(self._branches(keyword, value, place, depth))

    def _any_of(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], conjuncts: list[Any]) -> None:
        branches = self._branches(keyword, value, place, depth)
        if keyword == "oneOf" and not self._overlap.exclusive(value):
            raise SchemaError(
                f'"oneOf" at {place} can\'t be enforced: its branches are not seen to exclude each other',
                'Use "anyOf", or give the branches different types or a required property with different constants',
            )
        if "anyOf" in out:
            conjuncts.append({"anyOf": branches})
        else:
            out["anyOf"] = branches

    def _branches(self, keyword: str, value: Any, place: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            _invalid(place, f'"{keyword}" is {_shown(value)}', f'Send "{keyword}" as an array of schemas')
        if len(value) > MAX_VALUES:
            _too_large(f'"{keyword}" at {place} has more than {MAX_VALUES} branches')
        return [self._schema(branch, f"{place}/{keyword}/{index}", depth + 1) for index, branch in enumerate(value)]

    def _ref(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, str):
            _invalid(place, f'"$ref" is {_shown(value)}', 'Send "$ref" as a string such as "#/$defs/name"')
        if value not in self._names:
            self._target(value, place)
            if len(self._names) >= MAX_DEFINITIONS:
                _too_large(f"it refers to more than {MAX_DEFINITIONS} definitions")
            self._names[value] = f"d{len(self._names)}"
            self._pending.append((value, self._names[value]))
        out[keyword] = f"#/$defs/{self._names[value]}"

    def _target(self, reference: str, place: str) -> Any:
        """The schema that `reference` points to, by JSON Pointer from the root."""
        if reference != "#" and not reference.startswith("#/"):
            raise SchemaError(
                f'"$ref": {_shown(reference)} at {place} does not point into this schema, and nothing is fetched',
                'Put the schema into "$defs" and refer to it as "#/$defs/name"',
            )
        found = self._root
        for step in reference.split("/")[1:]:
            step = _percent_decoded(step).replace("~1", "/").replace("~0", "~")
            if isinstance(found, Mapping) and step in found:
                found = found[step]
            elif isinstance(found, list) and step.isascii() and step.isdigit() and len(step) < 7 and int(step) < len(found):
                found = found[int(step)]
            else:
                _invalid(place, f'"$ref": {_shown(reference)} points to nothing', 'Refer to a schema in "$defs"')
        return found

    def _pattern(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, str):
            _invalid(place, f'"pattern" is {_shown(value)}', 'Send "pattern" as a string')
        out[keyword] = self._regex(value, "pattern", place)[0]

    def _regex(self, pattern: str, keyword: str, place: str) -> tuple[str, bool]:
        self._checked_text(pattern, f'"{keyword}" at {place}')
        try:
            read = read_pattern(pattern)
        except PatternError as error:
            raise SchemaError(f'"{keyword}" {_shown(pattern)} at {place} can\'t be enforced: {error}', "Send a simpler pattern") from None
        return f"^{read.regex}$", read.is_exact

    def _format(self, _keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], conjuncts: list[Any]) -> None:
        if not isinstance(value, str):
            _invalid(place, f'"format" is {_shown(value)}', 'Send "format" as a string')
        if value in NUMBER_FORMATS:
            bounds = NUMBER_FORMATS[value]
            if bounds is not None:
                conjuncts.append({"minimum": max(bounds[0], -MAX_NUMBER), "maximum": min(bounds[1], MAX_NUMBER)})
            return
        if value not in FORMATS:
            raise SchemaError(f'"format": {_shown(value)} at {place} is none that can be enforced', f"The formats are {', '.join(FORMATS)}; or use \"pattern\"")
        conjuncts.append({"pattern": f"^(?:{FORMATS[value]})$"})

    def _properties(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, Mapping):
            _invalid(place, f'"properties" is {_shown(value)}', 'Send "properties" as an object of schemas')
        if len(value) > MAX_PROPERTIES:
            _too_large(f'"properties" at {place} has {len(value)} properties, and at most {MAX_PROPERTIES} are taken')
        for name in value:
            self._property_name(name, place)
        out[keyword] = {name: self._schema(schema, f"{place}/properties/{_step(name)}", depth + 1) for name, schema in value.items()}

    def _property_name(self, name: str, place: str) -> None:
        self._checked_text(name, f"a property at {place}")
        if not all(ord(character) >= 32 and character != "\x7f" for character in name):
            raise SchemaError(f"the property {_shown(name)} at {place} has a control character in its name", "Choose another name")

    def _pattern_properties(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, Mapping):
            _invalid(place, f'"patternProperties" is {_shown(value)}', 'Send "patternProperties" as an object of schemas')
        if len(value) > 16:
            _too_large(f'"patternProperties" at {place} has {len(value)} patterns, and at most 16 are taken')
        rewritten = {}
        for pattern, schema in value.items():
            regex, is_exact = self._regex(pattern, keyword, place)
            if not is_exact:
                # A name that only some readers match would be an additional property for llguidance alone.
                raise SchemaError(
                    f'"patternProperties" {_shown(pattern)} at {place} can\'t be enforced: readers of patterns disagree on what ".", \\d, \\w and \\s match',
                    "Write the characters out, such as [0-9]",
                )
            rewritten[regex] = self._schema(schema, f"{place}/patternProperties/{_step(pattern)}", depth + 1)
        if rewritten:
            out[keyword] = rewritten

    def _subschema(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if isinstance(value, list):
            _invalid(place, f'"{keyword}" is an array', 'Use "prefixItems" for the first items and "items" for the others')
        out[keyword] = self._schema(value, f"{place}/{keyword}", depth + 1)

    def _prefix_items(self, keyword: str, value: Any, place: str, depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if isinstance(value, list) and len(value) > MAX_ITEMS:
            _too_large(f'"prefixItems" at {place} has {len(value)} items, and at most {MAX_ITEMS} are taken')
        out[keyword] = self._branches(keyword, value, place, depth)

    def _required(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            _invalid(place, f'"required" is {_shown(value)}', 'Send "required" as an array of names')
        if len(value) > MAX_PROPERTIES:
            _too_large(f'"required" at {place} has {len(value)} names, and at most {MAX_PROPERTIES} are taken')
        for name in value:
            self._property_name(name, place)
        out[keyword] = list(dict.fromkeys(value))

    def _count(self, keyword: str, value: Any, place: str, _depth: int, out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0 or value != int(value):
            _invalid(place, f'"{keyword}" is {_shown(value)}', f'Send "{keyword}" as a whole number of at least 0')
        value = int(value)
        limit = MAX_CHARACTERS if keyword == "minLength" else MAX_LENGTH if keyword == "maxLength" else MAX_ITEMS
        if keyword.startswith("min") and value > limit:
            _too_large(f'"{keyword}" at {place} is {_shown(value)}, and at most {limit} is taken')
        out[keyword] = min(value, limit)

    def _number(self, keyword: str, value: Any, place: str, _depth: int, _out: dict[str, Any], _conjuncts: list[Any]) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not (isinstance(value, int) or math.isfinite(value)):
            _invalid(place, f'"{keyword}" is {_shown(value)}', f'Send "{keyword}" as a number')

    # What is known once all definitions are.

    def _finite_definitions(self) -> frozenset[str]:
        """Definitions that some finite value satisfies, as far as required properties and items tell."""
        finite: frozenset[str] = frozenset()
        while True:
            names = set(finite)
            for name in reversed(self._definitions):  # a definition mostly refers to later ones
                if name not in names and _is_finite(self._definitions[name], names):
                    names.add(name)
            if len(names) == len(finite):
                return finite
            finite = frozenset(names)

    def _check_combinations(self, root: dict[str, Any], definitions: dict[str, Any]) -> None:
        """llguidance writes out the meeting of branches, so their product has to be small."""
        known: dict[str, int] = {}

        def alternatives(schema: Any, depth: int) -> int:
            if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
                return 1
            total = 1
            if "anyOf" in schema:
                total *= min(MAX_COMBINATIONS + 1, sum(alternatives(branch, depth + 1) for branch in schema["anyOf"]))
            for branch in schema.get("allOf", ()):
                total = min(MAX_COMBINATIONS + 1, total * alternatives(branch, depth + 1))
            if "$ref" in schema:
                name = schema["$ref"].removeprefix("#/$defs/")
                if name not in known:
                    known[name] = 1  # for what refers back to it
                    known[name] = alternatives(definitions[name], depth + 1)
                total *= known[name]
            return min(MAX_COMBINATIONS + 1, total)

        for schema in _walk([root, *definitions.values()]):
            meets = len(schema.get("allOf", ())) + ("anyOf" in schema) + ("$ref" in schema)
            if meets > 1 and alternatives(schema, 0) > MAX_COMBINATIONS:
                _too_large(f'the branches of its "anyOf" and "allOf" meet in more than {MAX_COMBINATIONS} combinations')


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


def _check_numbers(schema: Mapping[str, Any], place: str, out: dict[str, Any]) -> None:
    """Write the bounds of numbers as inclusive ones that hold for every double that the digits may be read as."""
    lows = [schema[key] for key in ("minimum",) if key in schema] + [_above(schema[key]) for key in ("exclusiveMinimum",) if key in schema]
    highs = [schema[key] for key in ("maximum",) if key in schema] + [-_above(-schema[key]) for key in ("exclusiveMaximum",) if key in schema]
    if "multipleOf" in schema:
        step = schema["multipleOf"]
        if step <= 0:
            _invalid(place, f'"multipleOf" is {_shown(step)}', 'Send "multipleOf" as a number above 0')
        if step > MAX_MULTIPLE:
            _too_large(f'"multipleOf" at {place} is {_shown(step)}, and at most {MAX_MULTIPLE} is taken')
        if step * 1024 != int(step * 1024):
            raise SchemaError(
                f'"multipleOf": {_shown(step)} at {place} can\'t be enforced: readers that count in binary fractions disagree on its multiples',
                "Use a smaller unit and whole numbers",
            )
        out["multipleOf"] = int(step) if step == int(step) else step
        # Up to here doubles hold every such multiple.
        lows.append(-(2**40))
        highs.append(2**40)
    if out.get("type") == "integer":
        # A whole number without an end is one that a model may never end.
        lows.append(-_FAR)
        highs.append(_FAR)
    if not lows and not highs:
        return
    low = max((_floor_for(value, place) for value in lows), default=None)
    high = min((-_floor_for(-value, place) for value in highs), default=None)
    if out.get("type") == "integer":
        low, high = None if low is None else math.ceil(low), None if high is None else math.floor(high)
    if low is not None and high is not None and low > high:
        raise SchemaError(f'"minimum" and "maximum" at {place} leave no number between them', "Send bounds that some number keeps")
    if low is not None:
        out["minimum"] = low
    if high is not None:
        out["maximum"] = high


_FAR = 10**18  # a double, and within 64 bits


def _above(bound: float) -> float:
    """The least double above `bound`."""
    if bound == 0:
        return SMALLEST
    return bound if abs(bound) >= MAX_NUMBER else math.nextafter(float(bound), math.inf)


def _floor_for(bound: float, place: str) -> float:
    """A lower bound that is at least `bound` and exact as a double; an upper bound is the negative of one."""
    if bound >= MAX_NUMBER:
        raise SchemaError(f"a bound of numbers at {place} is beyond 2**53, where JSON readers disagree on numbers", "Send closer bounds")
    if bound <= -MAX_NUMBER:
        return -_FAR if bound <= -_FAR else -MAX_NUMBER
    if bound != 0 and abs(bound) < SMALLEST:
        return SMALLEST if bound > 0 else 0
    return bound


def _check_counts(schema: Mapping[str, Any], place: str, out: dict[str, Any]) -> None:
    """Drop property counts that always hold; refuse those that llguidance can't keep, or would count repeated names for."""
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if low in out and high in out and out[low] > out[high]:
            raise SchemaError(f'"{low}" is above "{high}" at {place}, which no value keeps', f'Send a smaller "{low}"')
    patterns, listed = out.get("patternProperties", {}), dict.fromkeys([*out.get("properties", {}), *out.get("required", ())])
    for regex in patterns:
        for name in listed:
            if matches(regex[1:-1], name):
                raise SchemaError(
                    f'"patternProperties" at {place} has a pattern that also matches the property {_shown(name)}, which can\'t be enforced',
                    "Send patterns that match no listed property",
                )
    required = len(out.get("required", ()))
    optional = len(listed) - required
    is_closed = out.get("additionalProperties") is False and not patterns
    if out.get("minProperties", required) <= required:
        out.pop("minProperties", None)
    if is_closed and out.get("maxProperties", 0) >= len(listed):
        out.pop("maxProperties", None)
    for keyword in ("minProperties", "maxProperties"):
        if keyword not in out:
            continue
        at_least_one = keyword == "minProperties" and out[keyword] == 1 and required == 0 and is_closed and "maxProperties" not in out
        # An additional name may come twice in the text, and then counts once.
        if (optional and not at_least_one) or (keyword == "minProperties" and out[keyword] > required + 1):
            raise SchemaError(
                f'"{keyword}" at {place} can\'t be enforced together with optional properties or repeated names', f'Leave "{keyword}" out, or list "required" ones'
            )


def _is_finite(schema: Any, finite: frozenset[str] | set[str]) -> bool:
    """Whether some finite value may satisfy a rewritten schema, given the definitions of which that is known."""
    if not isinstance(schema, Mapping):
        return schema is not False
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    if not all(_is_finite(branch, finite) for branch in schema.get("allOf", ())):
        return False
    if "anyOf" in schema and not any(_is_finite(branch, finite) for branch in schema["anyOf"]):
        return False
    types = schema.get("type", _TYPES)
    types = {types} if isinstance(types, str) else set(types)
    if "const" in schema or "enum" in schema or types - {"array", "object"}:
        return True
    if "array" in types:
        least, prefix = schema.get("minItems", 0), schema.get("prefixItems", [])
        needed = [*prefix[:least], *([schema.get("items", {})] if least > len(prefix) else [])]
        if all(_is_finite(item, finite) for item in needed):
            return True
    properties, additional = schema.get("properties", {}), schema.get("additionalProperties", {})
    return "object" in types and all(_is_finite(properties.get(name, additional), finite) for name in schema.get("required", ()))


def _without(schema: Any, finite: frozenset[str]) -> Any:
    """`schema` with false for each reference to a definition that no finite value satisfies."""
    if not isinstance(schema, Mapping):
        return schema
    if "$ref" in schema and schema["$ref"].removeprefix("#/$defs/") not in finite:
        return False
    out = dict(schema)
    for keyword in _LISTS:
        if keyword in out:
            out[keyword] = [_without(branch, finite) for branch in out[keyword]]
    for keyword in _SINGLES:
        if keyword in out:
            out[keyword] = _without(out[keyword], finite)
    for keyword in _MAPS:
        if keyword in out:
            out[keyword] = {name: _without(branch, finite) for name, branch in out[keyword].items()}
    return out


def _walk(schemas: list[Any]) -> Iterator[Mapping[str, Any]]:
    """Every object schema within `schemas`."""
    while schemas:
        schema = schemas.pop()
        if isinstance(schema, Mapping):
            yield schema
            schemas += [branch for keyword in _LISTS for branch in schema.get(keyword, ())]
            schemas += [schema[keyword] for keyword in _SINGLES if keyword in schema]
            schemas += [branch for keyword in _MAPS for branch in schema.get(keyword, {}).values()]


_LISTS = ("allOf", "anyOf", "prefixItems")
_SINGLES = ("items", "additionalProperties")
_MAPS = ("properties", "patternProperties")


def _invalid(place: str, what: str, remedy: str) -> NoReturn:
    raise SchemaError(f"{what} at {place}, which is no JSON Schema", remedy, is_invalid=True)


def _too_large(what: str) -> NoReturn:
    raise SchemaError(what, "Send a smaller schema")


def _shown(value: object) -> str:
    from pocketllm.protocol.fields import summary  # here, because the table of fields checks schemas with this module

    return summary(value)


def _step(name: str) -> str:
    return name if len(name) <= 40 else name[:40] + "…"


def _percent_decoded(step: str) -> str:
    return unquote(step) if "%" in step else step
