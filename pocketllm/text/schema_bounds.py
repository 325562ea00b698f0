"""The bounds of numbers and the counts of properties in a JSON Schema, as llguidance keeps them exactly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from pocketllm.text.schema_error import SchemaError, invalid, shown, too_large
from pocketllm.text.schema_pattern import matches

MAX_NUMBER = 2**53  # doubles count no further; looser bounds are taken for this
MAX_DIGITS = 15  # that a double keeps
MAX_MULTIPLE = 10_000
SMALLEST = 1e-9  # what is above 0 is at least this
FAR = 10**18  # a double, and within 64 bits
_FAR_MULTIPLE = 2**40  # doubles hold every multiple of 1/1024 up to here
_UP = Context(prec=MAX_DIGITS, rounding=ROUND_CEILING)


def check_constant(value: float, where: str) -> None:
    """Pass a number that every reader of JSON reads alike and that llguidance writes exactly."""
    if value != value or abs(value) > MAX_NUMBER:
        raise SchemaError(f"{where} holds a number beyond 2**53, where JSON readers disagree on its value", "Send such a number as a string")
    if value != 0 and abs(value) < SMALLEST:
        raise SchemaError(f"{where} holds a number closer to 0 than {SMALLEST}", "Use a larger unit")
    if isinstance(value, float) and len(Decimal(repr(value)).as_tuple().digits) > MAX_DIGITS:
        raise SchemaError(f"{where} holds a number of more than {MAX_DIGITS} digits", "Send fewer digits")


def admits(kind: str, schema: Mapping[str, Any]) -> bool:
    """Whether the "type" of a schema allows values of type `kind`; an "integer" counts as a number."""
    names = schema.get("type", kind)
    names = [names] if isinstance(names, str) else names
    return kind in names or (kind == "number" and "integer" in names)


def write_bounds(schema: Mapping[str, Any], place: str, out: dict[str, Any], *, is_leaf: bool) -> None:
    """Add the bounds of numbers to `out`, whose "type" is known, as inclusive ones that hold however a reader rounds the digits.

    Args:
        schema: as the request has it.
        place: for messages.
        out: `schema` as far as it is rewritten.
        is_leaf: whether nothing else in `schema` may bound its numbers.

    Raises:
        SchemaError: "multipleOf" or a bound can't be kept, or they leave no number.
    """
    is_whole = out.get("type") == "integer"
    lows = [schema["minimum"]] if "minimum" in schema else []
    highs = [schema["maximum"]] if "maximum" in schema else []
    if "exclusiveMinimum" in schema:
        lows.append(_above(schema["exclusiveMinimum"], is_whole))
    if "exclusiveMaximum" in schema:
        highs.append(-_above(-schema["exclusiveMaximum"], is_whole))
    if "multipleOf" in schema:
        out["multipleOf"] = _multiple(schema["multipleOf"], place)
        lows.append(-_FAR_MULTIPLE)
        highs.append(_FAR_MULTIPLE)
    if is_whole or (is_leaf and admits("number", out)):
        # A number without bounds is one that a model may never end, or one such as 1e400 that no double can be.
        lows.append(-FAR)
        highs.append(FAR)
    low = max((_lower(value, is_whole, place) for value in lows), default=None)
    high = min((-_lower(-value, is_whole, place) for value in highs), default=None)
    if low is not None and high is not None and low > high:
        raise SchemaError(f'"minimum" and "maximum" at {place} leave no number between them', "Send bounds that some number keeps")
    if low is not None:
        out["minimum"] = low
    if high is not None:
        out["maximum"] = high


def _multiple(step: float, place: str) -> float:
    if step <= 0:
        invalid(place, f'"multipleOf" is {shown(step)}', 'Send "multipleOf" as a number above 0')
    if step > MAX_MULTIPLE:
        too_large(f'"multipleOf" at {place} is {shown(step)}, and at most {MAX_MULTIPLE} is taken')
    if step * 1024 != int(step * 1024):
        raise SchemaError(
            f'"multipleOf": {shown(step)} at {place} can\'t be enforced: readers that count in binary fractions disagree on its multiples',
            "Use a smaller unit and whole numbers",
        )
    return int(step) if step == int(step) else step


def _above(bound: float, is_whole: bool) -> float:
    """A number above `bound`, such that few lie between them."""
    if is_whole or abs(bound) > MAX_NUMBER:
        return math.floor(bound) + 1
    return bound + max(abs(bound) * SMALLEST, SMALLEST)


def _lower(bound: float, is_whole: bool, place: str) -> float:
    """A lower bound that is at least `bound` and of few enough digits; an upper bound is the negative of one."""
    if bound > MAX_NUMBER:
        raise SchemaError(f"a bound of numbers at {place} is beyond 2**53, where JSON readers disagree on numbers", "Send closer bounds")
    if bound <= -MAX_NUMBER:
        return -FAR if bound <= -FAR else -MAX_NUMBER
    if is_whole or bound == int(bound):
        return math.ceil(bound)
    if abs(bound) < SMALLEST:
        return SMALLEST if bound > 0 else 0
    return float(_UP.create_decimal(repr(bound)))


def write_counts(place: str, out: dict[str, Any]) -> None:
    """Drop from `out` the property counts that always hold.

    Raises:
        SchemaError: counts contradict each other, or llguidance can't keep them; or a pattern matches a listed property.
    """
    for low, high in (("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties")):
        if low in out and high in out and out[low] > out[high]:
            raise SchemaError(f'"{low}" is above "{high}" at {place}, which no value keeps', f'Send a smaller "{low}"')
    patterns, listed = out.get("patternProperties", {}), dict.fromkeys([*out.get("properties", {}), *out.get("required", ())])
    for regex in patterns:
        for name in listed:
            if matches(regex, name):
                raise SchemaError(
                    f'"patternProperties" at {place} has a pattern that also matches the property {shown(name)}, which can\'t be enforced',
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
                f'"{keyword}" at {place} can\'t be enforced together with optional properties or repeated names',
                f'Leave "{keyword}" out, or list "required" ones',
            )
