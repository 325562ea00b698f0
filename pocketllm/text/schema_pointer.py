"""References within one JSON Schema, by JSON Pointer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

NOWHERE = object()


def pointed_to(document: Any, reference: str) -> Any:
    """What a reference such as "#/$defs/Color" leads to in `document`, or NOWHERE."""
    if reference != "#" and not reference.startswith("#/"):
        return NOWHERE
    found = document
    for part in reference.split("/")[1:]:
        part = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and part in found:
            found = found[part]
        elif isinstance(found, list) and part.isascii() and part.isdigit() and len(part) < 7 and int(part) < len(found):
            found = found[int(part)]
        else:
            return NOWHERE
    return found
