"""Writes the tables of docs/ that the code itself knows: CLI flags from the option classes, request fields from the field table.

python scripts/doc_tables.py            rewrites the tables between their markers
python scripts/doc_tables.py --check    exits with 1 if a table is out of date
"""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pocketllm.config import EngineArgs, ServerArgs
from pocketllm.protocol.fields import FIELDS, PATHS

ROOT = Path(__file__).resolve().parent.parent


def option_table(cls: type[EngineArgs] | type[ServerArgs]) -> str:
    """Flag, default and meaning of each field of an options class."""
    rows = []
    for option in dataclasses.fields(cls):
        default = "" if option.default in (None, dataclasses.MISSING) else f"`{option.default}`"
        rows.append((f"`--{option.name.replace('_', '-')}`", default, option.metadata["help"]))
    return _table(("Flag", "Default", "Meaning"), rows)


def field_table() -> str:
    """Name, endpoints, state and behaviour of each request field."""
    words = {"implemented": "works", "refused": "refused", "inert": "ignored"}
    rows = []
    for field in FIELDS:
        where = "both" if set(field.endpoints) == set(PATHS) else ", ".join(field.endpoints)
        rows.append((f"`{field.name}`", where, words[field.group], field.behaviour))
    return _table(("Field", "Endpoint", "State", "What the server does"), rows)


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "engine-flags": ("docs/cli.md", lambda: option_table(EngineArgs)),
    "server-flags": ("docs/cli.md", lambda: option_table(ServerArgs)),
    "request-fields": ("docs/http-api.md", field_table),
}


def outdated(*, write: bool) -> list[str]:
    """Names of the tables that differ from the code; with `write` they are put right.

    Raises:
        ValueError: a document lacks the markers of its table.
    """
    found = []
    for name, (document, make) in TABLES.items():
        path = ROOT / document
        text = path.read_text()
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", re.DOTALL)
        match = pattern.search(text)
        if match is None:
            raise ValueError(f"{document} has no place for the table {name}: put <!-- {name} --> and <!-- end of {name} --> where it belongs")
        fresh = text[: match.end(1)] + make() + text[match.start(2) :]
        if fresh != text:
            found.append(name)
            if write:
                path.write_text(fresh)
    return found


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print("usage: python scripts/doc_tables.py [--check]", file=sys.stderr)
        return 2
    names = outdated(write=not check)
    if check and names:
        print(f"doc_tables: out of date: {', '.join(names)}. Run python scripts/doc_tables.py.", file=sys.stderr)
        return 1
    return 0


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
