"""The tables of a native_cuda report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_STEPS = ("decode step", "weights", "batch", "context", "tokens/s", "limit", "of the limit")
_PROMPTS = ("prompts", "weights", "rows", "tokens each", "tokens/s", "TFLOP/s of products")
_LOADS = ("load", "weights", "GB", "read into pinned memory", "loaded at", "of that rate", "to the first token")


def table(report: dict[str, Any]) -> str:
    """Markdown: decode steps with their limits, prompts, loads; what the report has of these."""
    shapes, loads = report["steps"], report.get("load", [])
    parts = [_table(_STEPS, _steps(shapes)), _table(_PROMPTS, _prompts(report["prefill"])), _table(_LOADS, map(_load, loads)), *map(_answers, loads)]
    reads = ", ".join(f"{shape['shape']} {shape['weights']} {shape['read_bytes_per_second'] / 1e12:.2f}" for shape in shapes)
    parts.append("\n".join(filter(None, [f"Memory was read at, in TB/s: {reads}." if reads else "", report.get("assembled", "")])))
    return "\n\n".join(filter(None, parts))


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines]) if lines else ""


def _steps(shapes: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for shape in shapes:
        for step in shape["decode_steps"]:
            rates = (f"{step['tokens_per_second']:,.1f}", f"{step['limit_tokens_per_second']:,.1f}", f"{step['of_limit']:.0%}")
            yield shape["shape"], shape["weights"], f"{step['batch_size']}", f"{step['context']:,}", *rates


def _prompts(shapes: list[dict[str, Any]]) -> Iterator[tuple[str, ...]]:
    for shape in shapes:
        for prompt in shape["prompts"]:
            rates = (f"{prompt['tokens_per_second']:,.0f}", f"{prompt['flops_per_second'] / 1e12:,.0f}")
            yield shape["shape"], shape["weights"], f"{prompt['rows']}", f"{prompt['tokens']:,}", *rates


def _load(shape: dict[str, Any]) -> tuple[str, ...]:
    rates = (f"{shape['read_bytes_per_second'] / 1e9:,.1f} GB/s", f"{shape['weights_bytes_per_second'] / 1e9:,.1f} GB/s", f"{shape['of_read_rate']:.0%}")
    return shape["shape"], shape["weights"], f"{shape['bytes'] / 1e9:,.1f}", *rates, f"{shape['first_token_seconds']:.1f} s"


def _answers(shape: dict[str, Any]) -> str:
    prompt, append = shape["prompt"], shape["append"]
    rate = prompt["tokens"] / prompt["first_token_seconds"]
    asked = f"a prompt of {prompt['tokens']:,} tokens at {rate:,.0f} tokens/s, then {prompt['decode_tokens_per_second']:,.1f} tokens/s"
    first = f"gave its first token after {append['first_token_seconds']:.2f} s, then {append['decode_tokens_per_second']:,.1f} tokens/s"
    longer = f"a prompt of {append['tokens']:,} tokens, all but 512 of which were asked before, computed {append['computed']:,} and {first}"
    return f"The {shape['shape']} engine in {shape['weights']}, asked through its scheduler: {asked}; {longer}."
