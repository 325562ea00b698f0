"""The table of a native_cpu report, and the sizes that it speaks of."""

from __future__ import annotations

from typing import Any

PREFILL, CONTEXT, STEPS, BATCH = 512, 128, 32, 8  # tokens, but for the last: rows
_MEASURES = {
    "prefill": f"prefill {PREFILL}",
    "decode": f"decode, batch 1, after {CONTEXT}",
    "decode_batch": f"decode, batch {BATCH}, after {CONTEXT}",
}


def table(report: dict[str, Any]) -> str:
    """Markdown: medians, ratios, and the limit where there is one."""
    medians, ceilings = report["medians"], report["ceilings"]
    lines = ["| tokens/s, median | PocketLLM | llama.cpp | ratio | transformers | ratio | limit | of the limit |", "|---|---|---|---|---|---|---|---|"]
    for key, title in _MEASURES.items():
        ours, limit = medians["pocketllm"][key], ceilings.get(key)
        cells = [title, f"{ours:,.1f}"]
        for name in ("llama.cpp", "transformers"):
            peer = medians[name].get(key)
            cells += ["-", "-"] if peer is None else [f"{peer:,.1f}", f"{ours / peer:.2f}x"]
        cells += ["-", "-"] if limit is None else [f"{limit:,.1f}", f"{ours / limit:.0%}"]
        lines.append(f"| {' | '.join(cells)} |")
    batch = medians["pocketllm"]["decode_batch"] / medians["pocketllm"]["decode"]
    read, multiplied = report["limits"]["read_bytes_per_s"] / 1e9, report["limits"]["bf16_flops_per_s"] / 1e9
    lines += ["", f"Decoding {BATCH} rows gives {batch:.2f} times as many tokens as one. Reads {read:.1f} GB/s, bf16 products {multiplied:,.0f} GFLOP/s."]
    return "\n".join(lines)
