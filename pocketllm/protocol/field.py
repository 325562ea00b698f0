"""What the table of request fields is made of: a field as the documentation has it, and a rule about the values of one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pocketllm.backends.base import MAX_LOGPROBS
from pocketllm.protocol.conditions import Condition

Endpoint = Literal["chat", "completions"]
Group = Literal["implemented", "refused", "inert"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)

RANKS = f"a whole number from 0 to {MAX_LOGPROBS}"  # what asks for alternatives, in words


@dataclass(frozen=True, slots=True)
class Field:
    """One request field, for the documentation.

    Args:
        name: as it is sent.
        endpoints: that have it.
        group: whether something acts on it, on a server with every feature that exists.
        accepts: its values, in words.
        behaviour: what the server does with it.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    group: Group
    accepts: str
    behaviour: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on one field.

    Args:
        field: the field; "a.b" is key b of field a, and its value is that of the key.
        endpoints: where the rule holds.
        allows: whether a value passes, given the whole body, or the part of it that does not; never called with None, which always passes.
        when: the values that it refuses, in words.
        instead: what the server does instead, or why the value means nothing; the second half of a sentence.
        remedy: what the caller should send.
        feature: the name in protocol/features.py that lifts the rule, or None.
        is_shape: whether it refuses the value's form rather than a feature.
    """

    field: str
    endpoints: tuple[Endpoint, ...]
    allows: Condition
    when: str
    instead: str
    remedy: str
    feature: str | None = None
    is_shape: bool = False
