"""Every figure that the project shows traces to a report in benchmarks/results/."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
PICTURES = sorted((ROOT / "benchmarks" / "results").rglob("*.png"))
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]

# Rates and ratios of speed. Times and sizes are settings more often than measurements.
FIGURE = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?: ?x\b|(?= (?:and [\d,.]+ )?(?:tokens/s|tok/s|[GT]B/s|[GT]FLOP/s)))")


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def numbers(value: Any) -> Iterator[float]:
    if isinstance(value, dict):
        for entry in value.values():
            yield from numbers(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from numbers(entry)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield float(value)


def figures(text: str) -> list[str]:
    """Of a document, those that its generated tables do not hold."""
    return FIGURE.findall(re.sub(r"<!-- ([\w-]+) -->.*?<!-- end of \1 -->|```.*?```", "", text, flags=re.DOTALL))


@pytest.mark.parametrize("path", RESULTS, ids=relative)
def test_a_report_says_where_it_comes_from(path: Path) -> None:
    report = json.loads(path.read_text(encoding="utf-8"))
    assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", report["code"]["commit"])
    assert report["hardware"]["cpu"]
    assert re.match(r"(python benchmarks/|pocketllm bench )\S+", report["command"])
    assert f"](../{relative(path)})" in (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")


def test_pictures_have_their_reports_and_fit_a_page() -> None:
    for path in PICTURES:
        assert path.with_suffix(".json") in RESULTS
        assert struct.unpack(">I", path.read_bytes()[16:20]) == (800,)


@pytest.mark.parametrize("path", DOCUMENTS, ids=relative)
def test_a_figure_outside_a_generated_table_is_in_a_report(path: Path) -> None:
    known = [number for result in RESULTS for number in numbers(json.loads(result.read_text(encoding="utf-8")))]
    for figure in figures(path.read_text(encoding="utf-8")):
        digits = len(figure.partition(".")[2])
        value = float(figure.replace(",", ""))
        assert any(round(number, digits) == value for number in known), f"{figure}: no report has it"


def test_figures_are_found() -> None:
    text = (
        "It makes 1,234 tokens/s, 2.5x as much (3,517 and 5,333 tokens/s).\n<!-- made -->\n9 tokens/s\n<!-- end of made -->\nWith 8x100 and 4 clients in 10 ms."
    )
    assert figures(text) == ["1,234", "2.5", "3,517", "5,333"]
