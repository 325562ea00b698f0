"""The table of a serving_cuda report."""

from __future__ import annotations

from typing import Any


def table(streams: int, prompt: int, answer: int, offline: dict[str, Any], served: dict[str, Any]) -> str:
    """Markdown: a row a load, beside the offline rate."""
    lines = [
        f"| {streams} streams of {prompt} + {answer} tokens | tokens/s | offline | of it | first token p50, ms | p99 "
        "| inter-token p50, ms | p90 | p99 | p99 / p50 | largest | tokens an event |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in served.items():
        rate, reference = row["tokens_per_s"], offline.get(name.partition(" ")[0])
        p50, p99 = row["inter_token_p50_ms"], row["inter_token_p99_ms"]
        beside = "- | -" if reference is None else f"{reference:,.0f} | {rate / reference:.0%}"
        lines.append(
            f"| {name} | {rate:,.0f} | {beside} | {row['first_token_p50_ms']:.0f} | {row['first_token_p99_ms']:.0f} "
            f"| {p50:.2f} | {row['inter_token_p90_ms']:.2f} | {p99:.2f} | {f'{p99 / p50:.2f}' if p50 else '-'} "
            f"| {row['inter_token_max_ms']:.1f} | {row['tokens_per_event']:.2f} |"
        )
    return "\n".join(lines)
