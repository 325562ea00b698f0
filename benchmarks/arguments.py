"""Types of the programs' command-line arguments, for argparse."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from typing import Any


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object."""
    value = json.loads(text)
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value


def some_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """A type for argparse: some of `names`, with commas between them."""
    known = list(names)

    def parse(text: str) -> list[str]:
        asked = text.split(",")
        for name in asked:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(known)}")
        return asked

    return parse
