"""Types of the programs' command-line arguments, for argparse."""

from __future__ import annotations

import argparse
import json
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
