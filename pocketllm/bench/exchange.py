"""One request of a load and what came back: raw while the clock runs, read afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "text", "refusal")


@dataclass
class Exchange:
    """What the client saw. Times are its clock's, in seconds.

    Args:
        due_at: when the request should have been sent.
        sent_at: when it was, before a connection was opened for it.
        status: HTTP status, 0 before it came.
        parts: (arrival, bytes) of the body, as they were received.
        ended_at: when the body had ended or the request had failed.
        failure: what went wrong with the connection, or None.
    """

    due_at: float
    sent_at: float = 0.0
    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)
    ended_at: float = 0.0
    failure: str | None = None


@dataclass(frozen=True)
class Answer:
    """A finished stream.

    Args:
        sent_at, ended_at: as of the exchange; `ended_at` is the arrival of the last event with text.
        events: arrival of each event with text.
        tokens: how many tokens each of them brought; see `spread_tokens`.
        prompt_tokens, completion_tokens: as the server counts them, None where it does not say.
        finish_reason: as the server says.
        is_counted: whether `tokens` stands on the server's count; else every event is taken for one token.
    """

    sent_at: float
    ended_at: float
    events: tuple[float, ...]
    tokens: tuple[int, ...]
    prompt_tokens: int | None
    completion_tokens: int | None
    finish_reason: str | None
    is_counted: bool


def read_answer(exchange: Exchange) -> Answer | str:
    """What the stream said; or in a few words why it does not count, the same words for the same cause."""
    if exchange.failure is not None:
        return exchange.failure
    if exchange.status != 200:
        return f"HTTP {exchange.status}"
    times: list[float] = []
    sizes: list[int] = []
    usage: dict[str, Any] = {}
    finish_reason: str | None = None
    has_ended = False
    for arrival, data in _events(exchange.parts):
        if data == b"[DONE]":
            has_ended = True
            continue
        try:
            chunk = json.loads(data)
        except ValueError:
            return "an event that is no JSON"
        if not isinstance(chunk, dict):
            return "an event that is no JSON object"
        if chunk.get("error"):
            return "an error event in the stream"
        usage = chunk.get("usage") or usage
        choices = chunk.get("choices") or []
        if not isinstance(choices, list) or not isinstance(usage or {}, dict):
            return "an event of another form"
        for choice in choices:
            if not isinstance(choice, dict) or not isinstance(choice.get("delta") or {}, dict):
                return "a choice that is no JSON object"
            finish_reason = choice.get("finish_reason") or finish_reason
            if size := _size(choice.get("delta") or choice):
                times.append(arrival)
                sizes.append(size)
    if not has_ended and finish_reason is None:
        return "the stream broke off"
    if not times:
        return "no text"
    completion = usage.get("completion_tokens")
    visible = completion
    if visible is not None and finish_reason == "stop" and visible > len(times):
        visible -= 1  # the step that ended the answer has no text
    tokens = spread_tokens(sizes, visible)
    return Answer(exchange.sent_at, times[-1], tuple(times), tuple(tokens), usage.get("prompt_tokens"), completion, finish_reason, completion is not None)


def spread_tokens(sizes: Sequence[int], total: int | None) -> list[int]:
    """How many of `total` tokens each event brought: one each, and the others in proportion to its characters, largest remainders first.

    One each too where the total is not known, or below the number of events.
    """
    counts = [1] * len(sizes)
    left = (total or 0) - len(sizes)
    if left <= 0:
        return counts
    # What an event is likely to hold beyond its first token: its characters beyond those of one token of average length.
    average = sum(sizes) / (total or 1)
    weights = [max(0.0, size - average) for size in sizes]
    whole = sum(weights) or 1.0
    shares = [left * weight / whole for weight in weights]
    counts = [count + int(share) for count, share in zip(counts, shares, strict=True)]
    missing = left - sum(int(share) for share in shares)
    by_remainder = sorted(range(len(sizes)), key=lambda place: (-(shares[place] % 1), -sizes[place]))
    for place in by_remainder * (missing // len(sizes) + 1):
        if missing <= 0:
            break
        counts[place] += 1
        missing -= 1
    return counts


def _events(parts: Sequence[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """(arrival of its last byte, data) of each event; comments and other fields are passed over."""
    rest = b""
    data: list[bytes] = []
    for arrival, part in parts:
        *lines, rest = (rest + part).split(b"\n")
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                data.append(line[5:].removeprefix(b" "))
            elif not line and data:
                yield arrival, b"\n".join(data)
                data = []


def _size(delta: dict[str, Any]) -> int:
    """Characters that a delta brings, those of tool calls included."""
    texts = [delta.get(name) for name in _TEXT_FIELDS]
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            texts += [function.get("name"), function.get("arguments")]
    return sum(len(text) for text in texts if isinstance(text, str))
