"""The table of a sampler_terms report."""

from __future__ import annotations

import statistics
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Decode rates by kind of rows, and what part of the drawn rows' rate each is."""
    medians = {kind: statistics.median(sample["rate"] for sample in samples) for kind, samples in report["samples"].items()}
    lines = ["| rows that decode | tokens/s, median (least to most) | of drawn |", "| --- | --- | --- |"]
    for kind, samples in report["samples"].items():
        rates = [sample["rate"] for sample in samples]
        ratio = f"{medians[kind] / medians['drawn']:.3f}" if "drawn" in medians else "-"
        lines.append(f"| {report['rows']} {kind} | {medians[kind]:,.1f} ({min(rates):,.1f} to {max(rates):,.1f}) | {ratio} |")
    return "\n".join(lines) + "\n"
