"""A caller's grammar in Lark, held to what is harmless to compile: bounded in size and depth, its regular expressions by the rules of schema_pattern.py."""

from __future__ import annotations

import re

from pocketllm.text.schema_pattern import PatternError, whole_pattern

MAX_CHARACTERS = 20_000
MAX_RULES = 500
MAX_DEPTH = 32  # brackets within brackets
MAX_REPEAT = 1_000
_TAKEN = ("own_start", "own_lines", "in_calls", "in_format")  # rules that are put around a caller's grammar

_TOKEN = re.compile(
    r"""
    (?P<comment>(?://|\#)[^\n]*)
  | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
  | (?P<regex>/(?P<body>(?:[^/\\\n]|\\.)+)/(?P<flags>[a-z]*))
  | (?P<directive>%[a-zA-Z_]+)
  | (?P<repeat>\{\s*\d+\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
  | (?P<rule>^[?!]?(?P<named>[a-zA-Z_][a-zA-Z_0-9]*)(?:\.-?\d+)?\s*:)
  | (?P<name>[a-zA-Z_][a-zA-Z_0-9]*)
  | (?P<other>.)
    """,
    re.VERBOSE | re.MULTILINE | re.DOTALL,
)


class LarkError(ValueError):
    """A grammar that can't be enforced; the message is the second half of a sentence about it."""


def checked_lark(text: str, start: str = "start") -> str:
    """`text` as llguidance compiles it, with its rule start under the name `start`.

    Raises:
        LarkError: it has no rule called start, is too large or too deep, or asks for what is beyond a grammar of texts.
    """
    if len(text) > MAX_CHARACTERS:
        raise LarkError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are taken")
    parts, depth, names = [], 0, set[str]()
    for match in _TOKEN.finditer(text):
        kind, part = match.lastgroup, match.group()
        if match["regex"] is not None:
            part = _regex(match["body"], match["flags"])
        elif match["comment"] is not None:
            part = ""
        elif match["directive"] is not None and part not in ("%import", "%ignore"):
            raise LarkError(f"{part} is not taken")
        elif match["repeat"] is not None and max(map(int, re.findall(r"\d+", part))) > MAX_REPEAT:
            raise LarkError(f"a repeat is more than {MAX_REPEAT} times")
        elif match["rule"] is not None:
            name = match["named"]
            if name in names or name in _TAKEN:
                raise LarkError(f'it has a second rule called "{name}"' if name in names else f'no rule can be called "{name}"')
            names.add(name)
            part = f"{start if name == 'start' else name}:"
        elif match["name"] == "start":
            part = start
        elif kind == "other" and part in "([":
            depth += 1
        elif kind == "other" and part in ")]":
            depth -= 1
        elif kind == "other" and part in '<@"\0':
            raise LarkError(f"{part!r} is not taken" if part != '"' else "it has a text that does not end")
        if depth > MAX_DEPTH:
            raise LarkError(f"it nests brackets deeper than {MAX_DEPTH}")
        parts.append(part)
    if len(names) > MAX_RULES:
        raise LarkError(f"it has {len(names)} rules, and at most {MAX_RULES} are taken")
    if "start" not in names:
        raise LarkError('it has no rule called "start"')
    return "".join(parts).strip() + "\n"


def _regex(body: str, flags: str) -> str:
    if set(flags) - {"i", "s"}:
        raise LarkError(f"the flags {flags!r} of a regular expression are not taken")
    try:
        return f"/{whole_pattern(body)}/{flags}"
    except PatternError as error:
        raise LarkError(f"in the regular expression /{body[:60]}/ {error}") from None
