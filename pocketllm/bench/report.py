"""What every report of `pocketllm bench` begins with, and how it is written."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pocketllm.bench.hardware import describe_code, describe_hardware
from pocketllm.errors import ConfigurationError

SCHEMA = 1  # goes up when a field changes its meaning or goes


def new_report(benchmark: str, command: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The head of a report: what was run, when, with which code, on which machine."""
    return {
        "schema": SCHEMA,
        "benchmark": benchmark,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "code": describe_code(),
        "hardware": describe_hardware(),
        "settings": plain(settings),
    }


def plain(value: Any) -> Any:
    """`value` as JSON can hold it, without the folders of this machine."""
    if isinstance(value, Mapping):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(entry) for entry in value]
    if isinstance(value, (int, float, bool, type(None))):
        return value
    text = str(value)
    return Path(text).name if Path(text).is_absolute() else text


def check_writable(path: str | None, param: str) -> None:
    """Raises ConfigurationError where a report could not be written there, before anything is measured."""
    if path is None:
        return
    folder = Path(path).expanduser().absolute().parent
    if not folder.is_dir() or Path(path).expanduser().is_dir():
        raise ConfigurationError(f"{path} can't be written: name a file in an existing directory with --{param}.", param=param)


def write_report(report: Mapping[str, Any], path: str) -> None:
    """Raises ConfigurationError naming the file where it can't be written."""
    try:
        Path(path).expanduser().write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(f"{path} can't be written ({error.strerror}): choose another file with --output.", param="output") from None


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown, with columns of equal width, for a terminal as well as for a page."""
    cells = [list(head), *map(list, rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]

    def line(row: Sequence[str]) -> str:
        texts = [cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(row, widths, strict=True))]
        return f"| {' | '.join(texts)} |"

    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([line(head), f"|{rule}|", *map(line, rows)])
