"""The parser that the call syntaxes share: content flows, calls are held until the answer has ended."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pocketllm.text.tool_parsers.base import ParsedEnd, ToolParser
from pocketllm.text.tool_parsers.call_json import new_call
from pocketllm.text.tool_parsers.cursor import SPACE, Cursor, MalformedCall, Steps

Calls = list[tuple[str, Mapping[str, Any]]]  # names and arguments
Reader = Callable[[Cursor], Steps[Calls]]


class _State(enum.Enum):
    CONTENT = enum.auto()  # no call has begun
    CALLS = enum.auto()  # one has, and all since is held
    TEXT = enum.auto()  # what began is no call: the rest is text


class HeldParser(ToolParser):
    """Releases content until `marker`, reads calls from there on, and gives the text back as soon as it can't be calls.

    What is held before a call begins is at most a run of white space and a part of the marker. All work is linear in the text, whatever the
    sizes of its pieces.

    Args:
        marker: begins the first call.
        readers: ways to read calls, from the marker to the end of the answer. The first that can reads the whole; a later one is asked
            only when all before it failed.
    """

    def __init__(self, marker: str, readers: Sequence[Reader]) -> None:
        self._marker = marker
        self._readers = list(readers)
        self._state = _State.CONTENT
        self._space: list[str] = []  # white space that a call may follow
        self._start = ""  # then, the beginning of a marker
        self._held: list[str] = []  # all since the marker
        self._cursor = Cursor()
        self._steps: Steps[Calls] | None = None
        self._calls: Calls = []

    def feed(self, text: str) -> str:
        if self._state is _State.CONTENT:
            return self._feed_content(text)
        if self._state is _State.CALLS:
            self._held.append(text)
            self._cursor.add(text)
            return self._advance()
        return text

    def finish(self) -> ParsedEnd:
        text = ""
        if self._state is _State.CONTENT:
            text = "".join(self._space) + self._start
        elif self._state is _State.CALLS:
            self._cursor.end()
            text = self._advance()
        return ParsedEnd(text, tuple(new_call(name, arguments) for name, arguments in self._calls))

    def _feed_content(self, text: str) -> str:
        text = self._start + text
        found = text.find(self._marker)
        content_end = found if found >= 0 else len(text) - _overlap(text, self._marker)
        released = self._release(text[:content_end])
        if found < 0:
            self._start = text[content_end:]
            return released
        self._start = ""
        self._held = [text[found:]]
        self._state = _State.CALLS
        return released + self._read_again()

    def _release(self, text: str) -> str:
        """Content out of what is held and `text`; white space at its end stays held."""
        content = text.rstrip(SPACE)
        if not content:
            self._space.append(text)
            return ""
        released = "".join(self._space) + content
        self._space = [text[len(content) :]]
        return released

    def _read_again(self) -> str:
        """Start the next reader at the marker, or give everything back when there is none."""
        text = "".join(self._held)
        if not self._readers:
            self._state = _State.TEXT
            released = "".join(self._space) + text
            self._held.clear()
            self._space.clear()
            return released
        ended = self._cursor.ended
        self._held = [text]
        self._cursor = Cursor()
        self._cursor.add(text)
        if ended:
            self._cursor.end()
        self._steps = self._readers.pop(0)(self._cursor)
        return self._advance()

    def _advance(self) -> str:
        assert self._steps is not None
        try:
            next(self._steps)
        except StopIteration as end:
            self._calls = end.value
        except MalformedCall:
            return self._read_again()
        return ""


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that starts `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
