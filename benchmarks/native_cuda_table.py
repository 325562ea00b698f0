"""The tables of a native_cuda report."""

from __future__ import annotations

from typing import Any


def table(report: dict[str, Any]) -> str:
    """Markdown: decode steps with their limits, then prompts."""
    lines = ["| decode step | weights | batch | context | tokens/s | limit | of the limit |", "|---|---|---|---|---|---|---|"]
    for shape in report["steps"]:
        for step in shape["decode_steps"]:
            rate, limit = step["tokens_per_second"], step["limit_tokens_per_second"]
            cells = [
                shape["shape"],
                shape["weights"],
                f"{step['batch_size']}",
                f"{step['context']:,}",
                f"{rate:,.1f}",
                f"{limit:,.1f}",
                f"{step['of_limit']:.0%}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| prompts | weights | rows | tokens each | tokens/s | TFLOP/s of products |", "|---|---|---|---|---|---|"]
    for shape in report["prefill"]:
        for prompt in shape["prompts"]:
            cells = [
                shape["shape"],
                shape["weights"],
                f"{prompt['rows']}",
                f"{prompt['tokens']:,}",
                f"{prompt['tokens_per_second']:,.0f}",
                f"{prompt['flops_per_second'] / 1e12:,.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    if report.get("load"):
        lines += ["", "| load | weights | GB | read into pinned memory | loaded at | of that rate | to the first token |", "|---|---|---|---|---|---|---|"]
    for shape in report.get("load", []):
        cells = [
            shape["shape"],
            shape["weights"],
            f"{shape['bytes'] / 1e9:,.1f}",
            f"{shape['read_bytes_per_second'] / 1e9:,.1f} GB/s",
            f"{shape['weights_bytes_per_second'] / 1e9:,.1f} GB/s",
            f"{shape['of_read_rate']:.0%}",
            f"{shape['first_token_seconds']:.1f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    reads = ", ".join(f"{shape['shape']} {shape['weights']} {shape['read_bytes_per_second'] / 1e12:.2f}" for shape in report["steps"])
    lines += ["", f"Memory was read at, in TB/s: {reads}.", *([report["assembled"]] if "assembled" in report else [])]
    return "\n".join(lines)
