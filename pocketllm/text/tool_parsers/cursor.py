"""Reading calls from text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

SPACE = " \t\r\n"  # what may stand between tags

T = TypeVar("T")
Steps = Generator[None, None, T]  # stops wherever it needs more text, and returns what it read


class MalformedCall(Exception):
    """The text can't become calls any more, or it ended within one."""


class Cursor:
    """A place in text of which more may come. Every reader is a generator that yields when it has to see more.

    A reader looks at each character a bounded number of times, however the text is cut, so that reading stays linear.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self.ended = False

    def add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def end(self) -> None:
        """No more text will come: a reader that needs some raises MalformedCall."""
        self.ended = True

    def literal(self, expected: str) -> Steps[None]:
        if (yield from self.one_of((expected,))) is None:
            raise MalformedCall

    def one_of(self, options: Sequence[str]) -> Steps[str | None]:
        """Read whichever option comes next; read nothing when none does. No option starts another."""
        option = yield from self.sees(options)
        self._at += len(option or "")
        return option

    def sees(self, options: Sequence[str]) -> Steps[str | None]:
        """As `one_of`, but nothing is read."""
        while True:
            for option in options:
                if self._text.startswith(option, self._at):
                    return option
            rest = self._text[self._at : self._at + max(map(len, options))]
            if self.ended or not any(option.startswith(rest) for option in options):
                return None
            yield

    def space(self) -> Steps[str]:
        """Read a run of white space, which may be empty."""
        pieces = []
        while True:
            rest = self._text[self._at : self._at + 64]
            run = len(rest) - len(rest.lstrip(SPACE))
            pieces.append(rest[:run])
            self._at += run
            if run < len(rest) or (self._at == len(self._text) and self.ended):
                return "".join(pieces)
            if self._at == len(self._text):
                yield

    def peek(self) -> Steps[str]:
        """The next character, which is not read, or "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield
        return self._text[self._at : self._at + 1]

    def name(self, closer: str, forbidden: str) -> Steps[str]:
        """Read a name and the `closer` after it.

        Raises:
            MalformedCall: the name is empty, or holds a character of `forbidden`.
        """
        pieces: list[str] = []
        while True:
            found = self._text.find(closer, self._at)
            piece = self._text[self._at : found if found >= 0 else max(self._at, len(self._text) - len(closer) + 1)]
            if any(character in piece for character in forbidden):
                raise MalformedCall
            pieces.append(piece)
            self._at += len(piece)
            if found >= 0:
                self._at += len(closer)
                name = "".join(pieces)
                if not name:
                    raise MalformedCall
                return name
            yield from self._more()

    def until(self, closer: str, *, outside_strings: bool = False) -> Steps[str]:
        """Read up to the next `closer`, and the closer, which is not part of the result.

        Args:
            outside_strings: don't see a closer within a JSON string.
        """
        pieces: list[str] = []
        in_string = False
        while True:
            if in_string:
                ends = self._first(('"', "\\"))
                if ends is None:
                    pieces.append(self._take(len(self._text)))
                elif ends[1] == '"':
                    pieces.append(self._take(ends[0] + 1))
                    in_string = False
                    continue
                elif ends[0] + 2 <= len(self._text):  # an escape: the character after the backslash ends nothing
                    pieces.append(self._take(ends[0] + 2))
                    continue
                else:
                    pieces.append(self._take(ends[0]))
            else:
                ends = self._first((closer, '"') if outside_strings else (closer,))
                if ends is None:
                    pieces.append(self._take(max(self._at, len(self._text) - len(closer) + 1)))
                elif ends[1] == closer:
                    pieces.append(self._take(ends[0]))
                    self._at += len(closer)
                    return "".join(pieces)
                else:
                    pieces.append(self._take(ends[0] + 1))
                    in_string = True
                    continue
            yield from self._more()

    def at_end(self) -> Steps[bool]:
        return (yield from self.peek()) == ""

    def _more(self) -> Steps[None]:
        if self.ended:
            raise MalformedCall
        yield

    def _take(self, end: int) -> str:
        piece = self._text[self._at : end]
        self._at = end
        return piece

    def _first(self, options: Sequence[str]) -> tuple[int, str] | None:
        """Where the first of the options starts, and which it is."""
        best: tuple[int, str] | None = None
        for option in options:
            at = self._text.find(option, self._at, best[0] + len(option) if best else None)
            if at >= 0 and (best is None or at < best[0]):
                best = (at, option)
        return best
