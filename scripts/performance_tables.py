"""What docs/performance.md and README.md say of speed: made of benchmarks/results/, so that no figure stands without its report."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path.append(str(ROOT / "benchmarks"))  # its programs import each other by file name

import deepseek_cuda_table  # noqa: E402

import cuda_table  # noqa: E402
import native_cpu_table  # noqa: E402
import native_cuda_table  # noqa: E402
import sampler_terms_table  # noqa: E402
import serving_cuda_table  # noqa: E402
import serving_table  # noqa: E402
from pocketllm.bench.compare import comparison_table  # noqa: E402
from pocketllm.bench.offline import latency_table, throughput_table  # noqa: E402
from pocketllm.bench.serve import serving_table as load_table  # noqa: E402

_TITLES = {
    "offline": "Beside llama.cpp on one GGUF file",
    "native_cpu": "The native engine beside llama.cpp and transformers",
    "native_cuda": "The native engine on a GPU",
    "serving": "The HTTP front end, no model",
    "torch_cuda": "The torch plane on a GPU",
    "deepseek_cuda": "DeepSeek-V4's layers on the torch plane on a GPU",
    "serving_cuda": "Over HTTP on a GPU",
    "sampler_terms": "What the sampler's terms cost",
    "load_generator": "The load generator against a known schedule",
    "compare": "`pocketllm bench compare`",
    "latency": "`pocketllm bench latency`",
    "throughput": "`pocketllm bench throughput`",
    "serve": "`pocketllm bench serve`",
}


def performance_page() -> str:
    """A section a report: what it was made with, its table, and its picture where there is one."""
    parts = []
    for folder in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        parts.append(f"## {folder.name}\n")
        for path in sorted(folder.glob("*.json")):
            report = read(path)
            link = f"../{path.relative_to(ROOT).as_posix()}"
            parts.append(f"### {_TITLES[report['benchmark']]}\n")
            parts.append(f"[{path.name}]({link}): `{report['command']}`, commit {report['code']['commit']}, {report['date'][:10]}, {_machine(report)}.\n")
            parts.append(_RENDERERS[report["benchmark"]](report) + "\n")
            if path.with_suffix(".png").exists():
                parts.append(f"![{_TITLES[report['benchmark']]}]({link.removesuffix('.json')}.png)\n")
    return "\n".join(parts)


def readme_smollm() -> str:
    """README: PocketLLM beside llama.cpp on the embedded model."""
    path, report = _result("intel-xeon-2c/offline.json")
    summary = report["summary"]
    rows = [
        (name, _whole(row["ours"]["median"]), _whole(row["peer"]["median"]), _ratio(row["ratio"]))
        for name, row in ((title, summary[key]) for key, title in _offline_titles(report).items())
    ]
    ours, peer = (report[side]["peak_rss_bytes"] / 2**20 for side in ("pocketllm", "peer"))
    return (
        f"{report['model']['file']} on {report['hardware']['physical_cores']} cores of {_machine(report)}, {report['settings']['threads']} threads each, "
        f"{report['settings']['rounds']} alternating rounds against llama.cpp (built with AVX-512, VNNI and BF16; its AMX kernel crashes on Q4_1):\n\n"
        f"{_markdown(('tokens/s, median', 'PocketLLM', 'llama.cpp', 'ratio'), rows)}\n"
        f"Decoding runs at {summary['decode']['share_of_limit']:.0%} of what the memory of that machine can deliver. Peak memory of the benchmark was "
        f"{ours:,.0f} MiB, of which torch and Python are the larger part, against {peer:,.0f} MiB for llama.cpp. Every sample, the command and the commit are "
        f"in {_link(path)}.\n"
    )


def readme_native() -> str:
    """README: the native engine beside llama.cpp and transformers."""
    path, report = _result("intel-xeon-2c/native_cpu.json")
    medians = report["medians"]
    rows = []
    for key, title in (("prefill", "prefill 512"), ("decode", "decode, batch 1"), ("decode_batch", "decode, batch 8")):
        ours = medians["pocketllm"][key]
        cells = [title, _digits(ours)]
        for peer in ("llama.cpp", "transformers"):
            theirs = medians[peer].get(key)
            cells += ["-", "-"] if theirs is None else [_digits(theirs), _ratio(ours / theirs)]
        rows.append(cells)
    share = medians["pocketllm"]["decode"] / report["ceilings"]["decode"]
    return (
        f"The native engine on the same machine, with random bf16 weights in the shape of {report['model']['shape']}, in one alternating run "
        "(`python benchmarks/native_cpu.py`):\n\n"
        f"{_markdown(('tokens/s, median', 'PocketLLM', 'llama.cpp', 'ratio', 'transformers', 'ratio'), rows)}\n"
        f"At batch 1 that is {share:.0%} of what the memory's measured read rate allows: {_link(path)}.\n"
    )


def readme_gpu() -> str:
    """README: the torch plane on a GPU, beside transformers, and over HTTP."""
    path, report = _result("nvidia-h200/torch_cuda.json")
    earlier_path, earlier = _result("nvidia-h200/torch_cuda_1cedf57.json")
    served_path, served = _result("nvidia-h200/serving_cuda.json")
    rows = []
    for title, measure, weights in (
        ("prefill 8,192", "prefill 1x8192", "bf16"),
        ("prefill 512", "prefill 1x512", "bf16"),
        ("decode, batch 1, after 2,048 tokens", "decode 1x2048", "bf16"),
        ("the same with FP8 weights", "decode 1x2048", "fp8"),
        ("decode, batch 64, after 512 tokens", "decode 64x512", "bf16"),
    ):
        ours, peer = _row(report, f"ours-{weights}", measure), _row(report, "peer", measure)
        assert ours is not None
        most = cuda_table.limit_of(_row(report, "limits", weights), measure, ours)
        assert most is not None
        beside = ("-", "-") if peer is None else (_whole(peer["median"]), _ratio(ours["median"] / peer["median"]))
        rows.append((title, _whole(ours["median"]), *beside, f"{ours['median'] / most:.0%}"))
    decode, long = _row(earlier, "peer", "decode 1x2048"), next(row for row in earlier["rows"] if row["section"] == "long" and "append_seconds" in row)
    assert decode is not None
    shares = [row["tokens_per_s"] / served["offline"][name.partition(" ")[0]] for name, row in served["served"].items() if name != "warm-up"]
    tails = [row["inter_token_p99_ms"] / row["inter_token_p50_ms"] for name, row in served["served"].items() if name != "warm-up"]
    gpu = report["hardware"]["gpu"]["gpu"]
    return (
        f"On one {gpu}, random weights in the shape of {report['shape']} (bf16), beside transformers with flash-linear-attention in the same run (eager, as "
        "`generate` runs it). The limit is the rate of a large bf16 product of that run for prefill; for decode it is what one read of all weights a step "
        "allows, at that run's read bandwidth:\n\n"
        f"{_markdown(('tokens/s, median', 'PocketLLM', 'transformers', 'ratio', 'of the limit'), rows)}\n"
        f"transformers' decoding was not in that run, whose time was up; in an earlier one ({_link(earlier_path)}) it gave {decode['median']:.1f} tokens/s. 64 "
        f"streams of 512 tokens in and 128 out through HTTP get {min(shares):.0%} to {max(shares):.0%} of what the same work gets offline, and the 99th "
        f"percentile of the time between tokens is {min(tails):.1f} to {max(tails):.1f} times its median ({_link(served_path)}). In the earlier run a prompt "
        f"of {long['prompt_tokens']:,} tokens took {long['seconds']:.1f} s in chunks, and {long['appended_tokens']} tokens behind it "
        f"computed {long['append_computed_tokens']}. All other samples: {_link(path)}.\n"
    )


def readme_http() -> str:
    """README: the HTTP front end alone."""
    path, report = _result("intel-xeon-2c/serving.json")
    row = report["summary"]["64x1000"]
    return (
        f"The HTTP front end alone, over an engine that makes {row['tokens_per_s_a_stream']:,} tokens a second for each of {row['streams']} streams, carries "
        f"{row['pocketllm']['tokens_per_s']['median']:,.0f} tokens/s on one core of the first machine, and its first tokens come "
        f"{row['added_first_token_p50_ms']['median']:.1f} ms (median) after those of a bare uvicorn event stream: {_link(path)}.\n"
    )


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "performance": ("docs/performance.md", performance_page),
    "performance-smollm": ("README.md", readme_smollm),
    "performance-native": ("README.md", readme_native),
    "performance-gpu": ("README.md", readme_gpu),
    "performance-http": ("README.md", readme_http),
}


def read(path: Path) -> dict[str, Any]:
    """A report. Raises ValueError naming the file where it lacks what a figure needs behind it."""
    report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    missing = [key for key in ("benchmark", "date", "command", "hardware") if not report.get(key)]
    if missing or not report.get("code", {}).get("commit"):
        raise ValueError(f"{path.relative_to(ROOT)} lacks {', '.join(missing) or 'code.commit'}: make it again with its program")
    if report["benchmark"] not in _TITLES:
        raise ValueError(f"{path.relative_to(ROOT)}: no table is known for {report['benchmark']!r}")
    return report


def _offline_titles(report: dict[str, Any]) -> dict[str, str]:
    s = report["settings"]
    return {
        "prefill": f"prefill {s['prefill']}",
        "decode": f"decode {s['decode']}",
        "batch": f"total at batch {s['batch']} ({s['batch_prompt']} + {s['batch_decode']})",
    }


def _offline_table(report: dict[str, Any]) -> str:
    rows = []
    for key, title in _offline_titles(report).items():
        row = report["summary"][key]
        sides = [f"{row[side]['median']:,.1f} ({row[side]['min']:,.1f} to {row[side]['max']:,.1f})" for side in ("ours", "peer")]
        limit = (f"{row['limit']:,.0f}", f"{row['share_of_limit']:.0%}") if row["limit"] else ("-", "-")
        rows.append((title, *sides, f"{row['ratio']:.2f}x", *limit))
    return _markdown(("tokens/s, median (min to max)", "PocketLLM", report["peer"]["name"], "ratio", "limit", "of the limit"), rows)


def _load_generator_table(report: dict[str, Any]) -> str:
    rows = []
    for case in report["cases"]:
        for name, found in case["figures"].items():
            cells = [f"{found['reported'][share]:,.2f} / {found['true'][share]:,.2f} ({found['error'][share]:+.2%})" for share in ("p50", "p90", "p99")]
            rows.append((case["name"], name.removesuffix("_ms").upper(), *cells, "yes" if case["is_bottleneck"] else "no"))
    return _markdown(("load", "ms, reported / true (error)", "p50", "p90", "p99", "says it is the bottleneck"), rows)


def _serving_cuda_table(report: dict[str, Any]) -> str:
    words = report["command"].split()
    streams, prompt, answer = (int(words[words.index(f"--{name}") + 1]) for name in ("streams", "prompt", "answer"))
    return serving_cuda_table.table(streams, prompt, answer, report["offline"], report["served"])


_RENDERERS: dict[str, Callable[[dict[str, Any]], str]] = {
    "offline": _offline_table,
    "native_cpu": native_cpu_table.table,
    "native_cuda": native_cuda_table.table,
    "serving": serving_table.table,
    "torch_cuda": cuda_table.table,
    "deepseek_cuda": deepseek_cuda_table.table,
    "serving_cuda": _serving_cuda_table,
    "load_generator": _load_generator_table,
    "compare": comparison_table,
    "latency": latency_table,
    "throughput": throughput_table,
    "serve": load_table,
    "sampler_terms": sampler_terms_table.table,
}


def _result(name: str) -> tuple[Path, dict[str, Any]]:
    return RESULTS / name, read(RESULTS / name)


def _row(report: dict[str, Any], section: str, measure: str) -> dict[str, Any] | None:
    return next((row for row in report["rows"] if (row["section"], row["measure"]) == (section, measure)), None)


def _machine(report: dict[str, Any]) -> str:
    gpu = (report["hardware"].get("gpu") or report.get("gpu") or {}).get("gpu")
    cpu = report["hardware"]["cpu"]
    return f"{gpu}, {cpu}" if gpu else f"an {cpu}" if cpu.startswith(("I", "A")) else cpu


def _link(path: Path) -> str:
    return f"[{path.name}]({path.relative_to(ROOT).as_posix()})"


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join("| " + " | ".join(line) + " |\n" for line in (head, ("---",) * len(head), *rows))


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _digits(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _ratio(value: float) -> str:
    return f"{value:.1f}x" if value >= 2 else f"{value:.2f}x"
