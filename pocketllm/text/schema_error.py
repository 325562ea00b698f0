"""Why a JSON Schema is refused."""

from __future__ import annotations

from typing import NoReturn

from pocketllm.protocol.refusals import summary


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
        self.parameter: str | None = None  # the property of the whole schema in which the fault lies


def invalid(place: str, what: str, remedy: str) -> NoReturn:
    raise SchemaError(f"{what} at {place}, which is no JSON Schema", remedy, is_invalid=True)


def too_large(what: str) -> NoReturn:
    raise SchemaError(what, "Send a smaller schema")


def shown(value: object) -> str:
    """`value` on a few characters, for a message."""
    return summary(value)


def step(name: str) -> str:
    """A property's name in a place, for a message."""
    return name if len(name) <= 40 else name[:40] + "…"
