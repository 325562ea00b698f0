"""The table of a torch_cuda report."""

from __future__ import annotations

import statistics
from typing import Any


def table(report: dict[str, Any]) -> str:
    """Markdown: rates of PocketLLM in both formats, of transformers, and what the card allows; then the facts that have no limit beside them."""
    rates = _rates(report)
    limits = {row["measure"]: row for row in report["rows"] if row["section"] == "limits"}
    lines = [
        "| tokens/s, median (min to max) | PocketLLM bf16 | limit | of it | transformers | ratio | PocketLLM FP8 | of its limit | FP8 / bf16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    measures = dict.fromkeys(measure for _, measure in rates)
    for measure in measures:
        bf16, fp8, peer = (rates.get((section, measure)) for section in ("ours-bf16", "ours-fp8", "peer"))
        limit, fp8_limit = (limit_of(limits.get(weights), measure, row) for weights, row in (("bf16", bf16), ("fp8", fp8)))
        lines.append(
            f"| {measure} | {_range(bf16)} | {'-' if limit is None else f'{limit:,.0f}'} | {_share(bf16, limit)} | {_range(peer)} | {_ratio(bf16, peer)} "
            f"| {_range(fp8)} | {_share(fp8, fp8_limit)} | {_ratio(fp8, bf16)} |"
        )
    lines.append("")
    for row in report["rows"]:
        if text := _fact(row):
            lines.append(f"- {row['section']}: {text}")
    if report["failed_sections"]:
        lines.append(f"- FAILED: {', '.join(report['failed_sections'])}")
    return "\n".join(lines)


def _rates(report: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["section"], row["measure"]): row for row in report["rows"] if row.get("unit") == "tokens/s"}


def limit_of(limits: dict[str, Any] | None, measure: str, row: dict[str, Any] | None) -> float | None:
    """Most tokens a second: of prefill by the products, those that were measured in turn with it where there are such, of decode by the weights that each
    step reads."""
    if limits is None:
        return None
    if row is not None and "product_flops_per_s" in row:
        return float(statistics.median(row["product_flops_per_s"]) / limits["prefill_flops_per_token"])
    kind, _, size = measure.partition(" ")
    if kind not in limits:
        return None
    return float(limits[kind] * (int(size.partition("x")[0]) if kind == "decode" else 1))


def _fact(row: dict[str, Any]) -> str | None:
    section, measure = row["section"], row["measure"]
    if section == "limits" and measure == "device":
        return (
            f"reads {row['read_bytes_per_s'] / 1e12:.2f} TB/s, copies {row['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
            f"bf16 GEMM {row['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s one at a time"
            + (f", each after {row['rest_s']:.1f} s of nothing" if "rest_s" in row else ", which prefill's limit is of")
            + (f", and {row['bf16_sustained_flops_per_s'] / 1e12:.0f} over {row['bf16_sustained_s']:.2f} s" if "bf16_sustained_s" in row else "")
        )
    if section == "limits" and "bytes_per_token" in row:
        return f"{measure}: a token reads {row['bytes_per_token'] / 1e9:.2f} GB and takes {row['prefill_flops_per_token'] / 1e9:.2f} GFLOP of prefill"
    if "product_flops_per_s" in row:
        products = [rate / 1e12 for rate in row["product_flops_per_s"]]
        when = f"one product each, and {row['rest_s']:.1f} s of nothing before all of them" if row["rest_s"] else f"{row['products']} products, without a rest"
        return (
            f"{measure}: {len(row['samples'])} samples in turn with {when}: {statistics.median(products):.0f} TFLOP/s ({min(products):.0f} to "
            f"{max(products):.0f}), which its limit is of"
        )
    if measure == "load":
        return f"loaded in {row['seconds']:.1f} s"
    if "sample_steps" in row:
        return f"{measure}: {len(row['sample_steps'])} samples of {min(row['sample_steps'])} to {max(row['sample_steps'])} steps"
    if measure == "compiled after loading":
        return f"kernels compiled after loading: {', '.join(row['kernels']) or 'none'}"
    if measure == "intervals":
        return f"inter-token p50 {row['p50_ms']:.2f} ms, p99 {row['p99_ms']:.2f} ms"
    if measure == "agreement":
        return (
            f"first log probabilities after {row['prompt_tokens']} tokens differ by at most {row['largest_difference']:.3f}, "
            f"where one row's spread is {row['spread']:.2f}"
        )
    if measure == "memory" and row.get("peak_allocated_bytes"):
        return f"peak {row['peak_allocated_bytes'] / 2**30:.1f} GiB allocated, {row['device_used_bytes'] / 2**30:.1f} GiB of the device in use"
    if section == "long" and "memory" in row:
        return _long(row)
    if section.startswith("profile") and "kernels_ms" in row:
        steps = max(row["steps"], 1.0)
        return (
            f"{measure}: {row['wall_ms']:.2f} ms wall, {row['kernels_ms']:.2f} ms of {row['kernels']:.0f} kernels; "
            f"a step {row['wall_ms'] / steps:.3f} ms, {row['kernels_ms'] / steps:.3f} ms of {row['kernels'] / steps:.0f}"
        )
    if measure == "section":
        return f"took {row['seconds']:.0f} s" + ("" if row["code"] == 0 else f", ended with {row['code']}")
    return None


def _long(row: dict[str, Any]) -> str:
    text = (
        f"{row['prompt_tokens']:,} tokens in {row['seconds']:.2f} s ({row['tokens_per_s']:,.0f} tokens/s); {row['appended_tokens']} more computed "
        f"{row['append_computed_tokens']:,} tokens in {row['append_seconds']:.3f} s, with a snapshot every {row['snapshot_interval']}"
    )
    slices = row["memory"]
    if slices:
        least = min(one["before_bytes"] for one in slices)
        peaks = [(one["peak_bytes"] - least) / 2**20 for one in slices]
        of_chunk = max((one["peak_bytes"] - least) / 2**20 for one in row["memory_of_chunk"])
        text += (
            f"; memory beside weights and caches at its peak: {of_chunk:.0f} MiB for a prompt of {row['chunk_tokens']:,} tokens, "
            f"{peaks[0]:.0f}, {statistics.median(peaks):.0f} and {peaks[-1]:.0f} MiB in the first, the median and the last half second of this one"
        )
    return text


def _range(row: dict[str, Any] | None) -> str:
    if row is None:
        return "-"
    digits = 1 if row["median"] < 1000 else 0
    return f"{row['median']:,.{digits}f} ({row['min']:,.{digits}f} to {row['max']:,.{digits}f})"


def _share(row: dict[str, Any] | None, limit: float | None) -> str:
    return "-" if row is None or limit is None else f"{row['median'] / limit:.0%}"


def _ratio(row: dict[str, Any] | None, other: dict[str, Any] | None) -> str:
    return "-" if row is None or other is None else f"{row['median'] / other['median']:.2f}x"
