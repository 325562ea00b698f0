"""The table of a serving report."""

from __future__ import annotations

from typing import Any

SIDES = ("pocketllm", "bare")
BUSY = 0.9  # share of its core from which on the client may be what limits the figure


def table(report: dict[str, Any]) -> str:
    """Markdown: both sides of each load."""
    lines = [
        "| load | server | tokens/s carried | tokens an event | CPU us/token | CPU share | first token p50, ms | p99, ms | added p50, ms |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in report["summary"].items():
        for side in SIDES:
            one = row[side]
            added = _range(row["added_first_token_p50_ms"], 2) if side == "pocketllm" else "-"
            lines.append(
                f"| {name} | {side} | {_range(one['tokens_per_s'], 0)} | {one['tokens_per_event']['median']:.1f} | {_range(one['server_cpu_us_per_token'], 1)} "
                f"| {one['server_cpu_share']['median']:.0%} | {_range(one['first_token_p50_ms'], 2)} | {_range(one['first_token_p99_ms'], 2)} | {added} |"
            )
    lines += [
        "",
        f"{report['hardware']['cpu']}, one core for the server and one for the clients, {report['settings']['rounds']} alternating rounds, "
        f"medians (min to max), commit {report['code']['commit']}.",
    ]
    for name, row in report["summary"].items():
        if row["client_may_limit"]:
            sides = " and ".join(row["client_may_limit"])
            lines.append(f"At {name} the clients used more than {BUSY:.0%} of their core against {sides}: they may be the limit.")
    return "\n".join(lines)


def _range(side: dict[str, float], digits: int) -> str:
    return f"{side['median']:,.{digits}f} ({side['min']:,.{digits}f} to {side['max']:,.{digits}f})"
