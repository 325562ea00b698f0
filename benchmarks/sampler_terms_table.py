"""The table of a sampler_terms report."""

from __future__ import annotations

import statistics
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Decode rates by kind of rows, a second of the clock and of the process's processors, and what part of the drawn rows' rate each is."""
    lines = ["| rows that decode | tokens/s, median (least to most) | of drawn | a second of processors | of drawn |", "| --- | --- | --- | --- | --- |"]
    for kind, samples in report["samples"].items():
        cells = [f"{report['rows']} {kind}"]
        for measure in ("rate", "cpu_rate"):
            rates = [sample[measure] for sample in samples]
            drawn = [sample[measure] for sample in report["samples"].get("drawn", samples)]
            median = statistics.median(rates)
            cells += [f"{median:,.1f} ({min(rates):,.1f} to {max(rates):,.1f})", f"{median / statistics.median(drawn):.3f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"
