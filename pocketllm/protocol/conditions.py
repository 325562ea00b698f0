"""Conditions on request values, for the rules of fields.py. Each takes the value and the whole body; none sees a null."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

Condition = Callable[[Any, Mapping[str, Any]], bool]


def whole_number(value: object) -> int | None:
    """`value` as an int when it is a whole number (2 and 2.0 are, True and "2" are not), else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return float(value)


def whole(low: int, high: float = math.inf) -> Condition:
    def allows(value: Any, _body: Mapping[str, Any]) -> bool:
        found = whole_number(value)
        return found is not None and low <= found <= high

    return allows


def real(low: float, high: float = math.inf, *, above: bool = False) -> Condition:
    def allows(value: Any, _body: Mapping[str, Any]) -> bool:
        found = number(value)
        return found is not None and (low < found if above else low <= found) and found <= high

    return allows


def instance_of(*kinds: type) -> Condition:
    return lambda value, _body: isinstance(value, kinds)


def one_of(*values: object) -> Condition:
    """Equality that keeps booleans and numbers apart, and takes 1.0 for 1."""
    return lambda value, _body: any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def is_empty(value: Any, _body: Mapping[str, Any]) -> bool:
    return isinstance(value, (str, list, tuple, dict)) and not value


def is_strings(value: Any, _body: Mapping[str, Any]) -> bool:
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value))


def matches_nothing(value: Any, _body: Mapping[str, Any]) -> bool:
    return not value or (not isinstance(value, str) and not any(value))


def is_one_prompt(value: Any, _body: Mapping[str, Any]) -> bool:
    return not (isinstance(value, (list, tuple)) and len(value) > 1 and any(isinstance(item, (str, list, tuple)) for item in value))


def is_prompt(value: Any, _body: Mapping[str, Any]) -> bool:
    if isinstance(value, (list, tuple)) and len(value) == 1 and isinstance(value[0], (str, list, tuple)):
        value = value[0]
    return isinstance(value, str) or (isinstance(value, (list, tuple)) and all(whole_number(item) is not None for item in value))


def ranking_asked(value: Any, body: Mapping[str, Any]) -> bool:
    return value == 0 or body.get("logprobs") is True


def is_greedy(value: Any, body: Mapping[str, Any]) -> bool:
    return number(body.get("temperature")) == 0


def is_reasoning(value: Any, _body: Mapping[str, Any]) -> bool:
    if isinstance(value, bool):
        return True
    return isinstance(value, Mapping) and set(value) <= {"effort"} and value.get("effort") in (None, *REASONING_EFFORTS)
