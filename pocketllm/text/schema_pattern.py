"""The `pattern` of a JSON Schema, for llguidance: read as ECMA-262 and Python's `re` agree on it, written as a Rust regex.

JSON Schema means ECMA-262, most validators on the client's side are Python, and llguidance has Rust's regexes. The three differ
in class escapes, anchors, escapes and what they reject. So a pattern is read by the rules that all share, anything else is
refused, and a class that differs becomes what every one of them matches: what is generated then satisfies each.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLTokenizer

MAX_LENGTH = 4_000  # characters of a pattern
MAX_DEPTH = 32  # groups within groups
MAX_STATES = 4_000  # characters that a match may hold once every repeat is written out

ANY = "(?s:.)"
_SYNTAX = frozenset("^$\\.*+?()[]{}|/")
_CONTROLS = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v"}
_COUNT = re.compile(r"\{(\d{1,9})(,(\d{0,9}))?\}")

# What both ECMA-262 and Python match, and what either does; a complement must leave out the latter.
_NARROW = {"d": "0-9", "w": "0-9A-Za-z_", "s": r"\t\n\x0B\f\r "}
_WIDE = {"d": r"\p{Nd}", "w": r"\p{L}\p{M}\p{N}_", "s": r"\s\x1C-\x1F\x{85}\x{FEFF}"}
_DOT = r"[^\n\r\x{2028}\x{2029}]"


class PatternError(ValueError):
    """A pattern that can't be enforced; the message is the second half of a sentence about it."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern that can be enforced.

    Args:
        regex: Rust regex of the whole string that the pattern is found in.
        is_exact: whether it matches all that the pattern does, not only what every dialect agrees on.
    """

    regex: str
    is_exact: bool


@dataclass(frozen=True, slots=True)
class _Part:
    regex: str
    states: int
    at_start: bool = False  # it has "^" of its own
    at_end: bool = False


def read_pattern(text: str) -> Pattern:
    """The regex of every string in which `text` is found.

    Raises:
        PatternError: it is no valid pattern, means different things to different readers, or is too large.
    """
    if len(text) > MAX_LENGTH:
        raise PatternError(f"it has {len(text)} characters, and at most {MAX_LENGTH} are taken")
    reader = _Reader(text)
    branches, _ = reader.branches(0)
    if reader.place < len(text):
        raise PatternError("it closes a group that was not opened")
    return Pattern(f"(?:{_whole(branches)})", reader.is_exact)


def whole_pattern(text: str) -> str:
    """The regex of every string that `text` matches from its beginning to its end. Raises as `read_pattern` does."""
    read_pattern(text)  # by itself, so that it can't close the group that it is put into
    text = text.removeprefix("^")
    backslashes = len(text.removesuffix("$")) - len(text.removesuffix("$").rstrip("\\"))
    if backslashes % 2 == 0:
        text = text.removesuffix("$")
    return read_pattern(f"^(?:{text})$").regex


def matches(regex: str, text: str) -> bool:
    """Whether all of `text` matches `regex`, as `read_pattern` wrote it, anchored or not. Takes time in the text's length alone, unlike Python's `re`."""
    from llguidance import LLMatcher  # here, so that reading a schema without "patternProperties" loads no native module

    matcher = LLMatcher(byte_vocabulary(), f"start: /{regex.removeprefix('^').removesuffix('$')}/", log_level=0)
    encoded = text.encode()
    return matcher.try_consume_tokens(list(encoded)) == len(encoded) and matcher.is_accepting()


class _Bytes:
    """The vocabulary of 256 bytes and an EOS, in the shape that LLTokenizer reads."""

    is_tokenizer_wrapper = True
    eos_token_id = 256
    bos_token_id = None
    tokens = (*(bytes([byte]) for byte in range(256)), b"<eos>")
    special_token_ids = (256,)

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@functools.cache
def byte_vocabulary() -> LLTokenizer:
    from llguidance import LLTokenizer

    return LLTokenizer(_Bytes(), slices=[])  # type: ignore[arg-type]


def _whole(branches: list[list[_Part]]) -> str:
    """The branches as a regex of the whole string: open at the ends that are not anchored."""
    written = []
    for parts in branches:
        start, end = bool(parts) and parts[0].at_start, bool(parts) and parts[-1].at_end
        written.append(("" if start else ANY + "*") + "".join(part.regex for part in parts) + ("" if end else ANY + "*"))
    return "|".join(written)


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.place = 0
        self.is_exact = True

    def branches(self, depth: int) -> tuple[list[list[_Part]], int]:
        """Branches up to the end of the group, and how many states they have."""
        if depth > MAX_DEPTH:
            raise PatternError(f"its groups are nested more than {MAX_DEPTH} deep")
        found: list[list[_Part]] = [[]]
        states = 1
        while self.place < len(self.text) and self.text[self.place] != ")":
            if self.text[self.place] == "|":
                self.place += 1
                found.append([])
                continue
            part = self._repeated(self._atom(depth))
            states += part.states
            if states > MAX_STATES:
                raise PatternError(f"written out it has more than {MAX_STATES} characters: its repeats are too large")
            found[-1].append(part)
        for parts in found:
            for index, part in enumerate(parts):
                if (part.at_start and index > 0) or (part.at_end and index < len(parts) - 1):
                    raise PatternError('it has "^" or "$" elsewhere than at the ends')
        return found, states

    def _atom(self, depth: int) -> _Part:
        character = self._next()
        if character == "^":
            return _Part("", 0, at_start=True)
        if character == "$":
            return _Part("", 0, at_end=True)
        if character == ".":
            self.is_exact = False
            return _Part(_DOT, 1)
        if character == "(":
            return self._group(depth)
        if character == "[":
            return _Part(self._class(), 1)
        if character == "\\":
            escaped = self._escape()
            return _Part(escaped if len(escaped) > 1 else _literal(escaped), 1)
        if character in "*+?":
            raise PatternError(f'"{character}" has nothing to repeat')
        if character == "{" and re.match(r"\d*,?\d*\}", self.text[self.place : self.place + 32]):
            raise PatternError('"{" has nothing to repeat')
        return _Part(_literal(character), 1)

    def _group(self, depth: int) -> _Part:
        if self._has("?"):
            kind = self._next()
            if kind in "=!" or (kind == "<" and self._peek() in "=!"):
                raise PatternError("it looks around the text, which can't be enforced while text is generated")
            if kind != ":":
                raise PatternError(f'readers of patterns disagree on the group "(?{kind}"')
        branches, states = self.branches(depth + 1)
        if not self._has(")"):
            raise PatternError("a group is not closed")
        if any(part.at_start or part.at_end for parts in branches for part in parts):
            # Its branches are anchored on their own, so it has to be all that there is beside it: each branch is then a whole string.
            return _Part(f"(?:{_whole(branches)})", states, at_start=True, at_end=True)
        return _Part("(?:" + "|".join("".join(part.regex for part in parts) for parts in branches) + ")", states)

    def _repeated(self, part: _Part) -> _Part:
        character = self._peek()
        if character in ("*", "+", "?"):
            self.place += 1
            low, high, suffix = (1 if character == "+" else 0), (1 if character == "?" else None), character
        elif character == "{" and (count := _COUNT.match(self.text, self.place)):
            self.place = count.end()
            low = int(count[1])
            high = low if count[2] is None else int(count[3]) if count[3] else None
            if high is not None and high < low:
                raise PatternError(f'the repeat "{count[0]}" ends before it starts')
            suffix = f"{{{low}}}" if high == low else f"{{{low},{'' if high is None else high}}}"
        elif character == "{" and re.match(r"\{,\d*\}", self.text[self.place : self.place + 32]):
            raise PatternError('readers of patterns disagree on a repeat that starts with "{,"')
        else:
            return part
        if part.at_start or part.at_end:
            raise PatternError('it repeats "^" or "$"')
        self._has("?")  # lazy or not, the same strings match
        if self._peek() in ("*", "+", "?") or _COUNT.match(self.text, self.place):
            raise PatternError(f'"{self._peek()}" repeats a repeat')
        return _Part(f"(?:{part.regex}){suffix}", part.states * (low + 1 if high is None else high) + 1)

    def _escape(self) -> str:
        """After a backslash: a character, or a class as a regex (which has several)."""
        character = self._next()
        if character in "dwsDWS":
            self.is_exact = False
            letter = character.lower()
            return f"[{_NARROW[letter]}]" if character == letter else f"[^{_WIDE[letter]}]"
        return self._character(character)

    def _character(self, character: str) -> str:
        if character in _CONTROLS:
            return _CONTROLS[character]
        if character in "xu":
            digits = self.text[self.place : self.place + (2 if character == "x" else 4)]
            if not re.fullmatch(r"[0-9A-Fa-f]{2}([0-9A-Fa-f]{2})?", digits) or len(digits) != (2 if character == "x" else 4):
                raise PatternError(f'readers of patterns disagree on "\\{character}" without {2 if character == "x" else 4} hexadecimal digits')
            self.place += len(digits)
            return chr(int(digits, 16))
        if character == "0" and not self._peek().isdigit():
            return "\0"
        if character.isdigit():
            raise PatternError(f'"\\{character}" refers back to a group, which can\'t be enforced while text is generated')
        if character in "bB":
            raise PatternError(f'"\\{character}" looks around the text, which can\'t be enforced while text is generated')
        if character.isalnum() or character == "_" or not character.isascii():
            raise PatternError(f'readers of patterns disagree on "\\{character}"')
        return character

    def _class(self) -> str:
        negated = self._has("^")
        classes, other = (_WIDE, _NARROW) if negated else (_NARROW, _WIDE)
        items: list[str] = []
        if self._peek() == "]":
            raise PatternError('readers of patterns disagree on "[" with "]" right after it')
        while not self._has("]"):
            low = self._class_item(classes, other, items)
            if low is None:
                if self._peek() == "-" and self.text[self.place + 1 : self.place + 2] != "]":
                    raise PatternError("a range starts with a class")
                continue
            if self._peek() == "-" and self.text[self.place + 1 : self.place + 2] not in ("]", ""):
                self.place += 1
                high = self._class_item(classes, other, items)
                if high is None:
                    raise PatternError("a range ends with a class")
                if high < low:
                    raise PatternError(f'the range "{low}-{high}" ends before it starts')
                items.append(f"{_literal(low)}-{_literal(high)}")
            else:
                items.append(_literal(low))
        return f"[{'^' if negated else ''}{''.join(items)}]"

    def _class_item(self, classes: dict[str, str], other: dict[str, str], items: list[str]) -> str | None:
        """One character of a class; or None, for a class within it, which is in `items` then."""
        character = self._next()
        if character != "\\":
            return character
        character = self._next()
        if character == "b":
            raise PatternError('"\\b" in a class is a character that no one means')
        if character not in "dwsDWS":
            return self._character(character)
        self.is_exact = False
        letter = character.lower()
        items.append(classes[letter] if character == letter else f"[^{other[letter]}]")
        return None

    def _peek(self) -> str:
        return self.text[self.place : self.place + 1]

    def _has(self, character: str) -> bool:
        if self._peek() != character:
            return False
        self.place += 1
        return True

    def _next(self) -> str:
        character = self._peek()
        if not character:
            raise PatternError("it ends too early")
        self.place += 1
        return character


def _literal(character: str) -> str:
    if 0xD800 <= ord(character) <= 0xDFFF:
        raise PatternError("it holds half of a surrogate pair, which is no character of any text")
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):X}}}"
