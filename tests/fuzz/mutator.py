"""Seeded damage to request bodies: to their values and keys, and to their bytes."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from pocketllm.protocol.fields import FIELDS
from tests.fuzz.bodies import VALID

Path = tuple[str | int, ...]


def _nested(depth: int) -> Any:
    value: Any = 0
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


_NUMBERS: tuple[Any, ...] = (0, -0.0, 1, -1, 2, 3.5, 0.1, 20, 21, 128, 129, 1e-320, 1e300, -1e308, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**40, 1e16)
_NO_NUMBERS: tuple[Any, ...] = (float("nan"), float("inf"), float("-inf"))  # written as NaN and Infinity, which are no JSON
_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\x00",
    "a\x00b",
    "\n\r\n",
    "\ud800",
    "x\udfffy",
    "\ufeff",
    "\ufffd\uffff",
    "é🌍👩‍👩‍👧\u202e\u2028",
    "null",
    "true",
    "NaN",
    "1",
    "-1",
    "auto",
    "none",
    "required",
    "json_schema",
    "{{ 7 * 7 }}{% for x in y %}",
    "<|im_end|><think></think><tool_call>{}</tool_call>",
    "%s%n{0}$(id)`id`",
    "../../etc/passwd",
    "foo**",
    "((((((((((a{1,1000}){1,1000}){1,1000}){1,1000}",
    "#/$defs/none",
    "x" * 3000,
    "a" * 129,
)
_CONTAINERS: tuple[Any, ...] = (
    [],
    {},
    [None],
    [[]],
    [[[]]],
    {"": ""},
    {"type": None},
    {"type": "function"},
    {"type": "object", "properties": {"a": "b"}},
    {"function": {"name": "clock"}, "type": "function"},
    [0, "a", None, True, {}, []],
    ["a", ""],
    [1, 2, 3],
    [-1],
    [99999999],
    [True],
    [1.5],
    [256],
    list(range(300)),
    ["a"] * 200,
    {str(number): number for number in range(50)},
    {"AI": -100},
    {"65": 1e9},
)
_KEYS = tuple(sorted({field.name for field in FIELDS} | {"type", "function", "name", "content", "role", "schema", "effort", "__proto__", "", "\x00", "\ud800"}))


def paths(value: Any, at: Path = ()) -> list[Path]:
    """Where the values of `value` are, itself the first."""
    found: list[Path] = [at]
    if isinstance(value, dict):
        for key, item in value.items():
            found += paths(item, (*at, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            found += paths(item, (*at, index))
    return found


def value_at(value: Any, path: Path) -> Any:
    for step in path:
        value = value[step]
    return value


class Mutator:
    """Makes requests, the same ones for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._byte_faults: tuple[Callable[[bytes], bytes], ...] = (
            self._cut,
            self._flip,
            self._insert,
            self._repeat_key,
            self._pad,
            self._encode_otherwise,
            self._long_number,
            self._deepen,
        )

    def request(self) -> tuple[str, bytes]:
        """A path and a body."""
        path, valid = self._random.choice(VALID)
        body: Any = copy.deepcopy(valid)
        for _ in range(self._random.choice((0, 1, 1, 1, 2, 3, 6))):
            body = self._change(body)
        content = self._write(body)
        if self._random.random() < 0.25:
            content = self._random.choice(self._byte_faults)(content)
        return path, content

    def _write(self, body: Any) -> bytes:
        if self._random.random() < 0.3:
            return json.dumps(body, ensure_ascii=False, indent=self._random.choice((None, 2))).encode("utf-8", "surrogatepass")
        return json.dumps(body).encode()

    def value(self) -> Any:
        """Any value at all."""
        choice = self._random.choice
        kind = self._random.random()
        if kind < 0.15:
            return choice((None, True, False))
        if kind < 0.4:
            return choice(_NUMBERS)
        if kind < 0.42:
            return choice(_NO_NUMBERS)
        if kind < 0.65:
            return choice(_TEXTS)
        if kind < 0.85:
            return copy.deepcopy(choice(_CONTAINERS))
        if kind < 0.88:
            return _nested(choice((3, 20, 60, 63, 64, 65, 200)))
        donor = choice(VALID)[1]
        return copy.deepcopy(value_at(donor, choice(paths(donor)[1:])))

    def _change(self, body: Any) -> Any:
        """`body` with one fault."""
        places = paths(body)
        path = self._random.choice(places)
        if not path:
            return self.value() if self._random.random() < 0.1 or not isinstance(body, dict) else {**body, self._random.choice(_KEYS): self.value()}
        parent, last = value_at(body, path[:-1]), path[-1]
        old = parent[last]
        match self._random.randrange(8):
            case 0 | 1:
                parent[last] = self.value()
            case 2:
                del parent[last]
            case 3 if isinstance(parent, dict):
                parent[self._random.choice(_KEYS)] = parent.pop(last)
            case 4:
                parent[last] = self._random.choice(([old], {"a": old}, [old, old], {"type": old}, str(old), json.dumps(old)))
            case 5 if isinstance(old, list):
                old.extend(copy.deepcopy(old) * self._random.choice((1, 3)) or [self.value()])
            case 5 if isinstance(old, dict):
                old[self._random.choice(_KEYS)] = self.value()
            case 5 if isinstance(old, str):
                parent[last] = old + self._random.choice(_TEXTS)
            case 6 if isinstance(old, (int, float)):
                parent[last] = self._random.choice((-old, old + 1, old * 1000, float(old), old / 3, not old))
            case 7:
                other = self._random.choice(places)
                parent[last] = copy.deepcopy(value_at(body, other))
            case _:
                parent[last] = self.value()
        return body

    def _place(self, content: bytes) -> int:
        return self._random.randrange(len(content) + 1)

    def _cut(self, content: bytes) -> bytes:
        return content[: self._place(content)]

    def _flip(self, content: bytes) -> bytes:
        damaged = bytearray(content)
        for _ in range(self._random.choice((1, 3, 20))):
            damaged[self._random.randrange(len(damaged))] = self._random.randrange(256)
        return bytes(damaged)

    def _insert(self, content: bytes) -> bytes:
        place = self._place(content)
        piece = self._random.choice(
            (
                b"\x00",
                b"\xff",
                b"\xc3",
                b"\xed\xa0\x80",
                b"\xf4\x90\x80\x80",
                b"\xc0\x80",
                b"}",
                b"]",
                b'"',
                b"\\",
                b"\\u12",
                b"//",
                b"\n",
                b"{}",
                b"1e9999",
                b",",
            )
        )
        return content[:place] + piece + content[place:]

    def _repeat_key(self, content: bytes) -> bytes:
        key, value = json.dumps(self._random.choice(_KEYS)), json.dumps(self.value())
        return b"{" + f"{key}: {value}, {key}: {value}, ".encode() + content[1:]

    def _pad(self, content: bytes) -> bytes:
        return self._random.choice(
            (b"\xef\xbb\xbf" + content, content + content, b"\n" * 500 + content, content + b"\x00", b"", b"null", b"[" + content + b"]")
        )

    def _encode_otherwise(self, content: bytes) -> bytes:
        text = content.decode("utf-8", "surrogatepass")
        return self._random.choice((text.encode("utf-16", "surrogatepass"), text.encode("utf-32-le", "surrogatepass"), text.encode("latin-1", "replace")))

    def _long_number(self, content: bytes) -> bytes:
        number = self._random.choice((b"9" * 5000, b"1e400", b"-1e400", b"0." + b"0" * 5000 + b"1", b"1" + b"0" * 400, b"01", b"+1", b".5", b"0x10", b"1e"))
        return b'{"seed": ' + number + b", " + content[1:]

    def _deepen(self, content: bytes) -> bytes:
        depth = self._random.choice((62, 63, 64, 1000, 20_000))
        return b'{"metadata": ' + b"[" * depth + b"]" * depth + b", " + content[1:]
