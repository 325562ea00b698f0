"""The native engine on the CPU beside llama.cpp and transformers: random weights in the shape of Qwen3.5-0.8B, in bfloat16.

    python benchmarks/native_cpu.py [--peer PATH/llama-bench] [--rounds 3] [--threads N] [--shape qwen3.5-0.8b]

Rounds alternate between the three, so that whatever else the machine does meets all of them. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from llm_measures import MeasuredLLM
from random_gguf import write_random_gguf

from arguments import positive
from native_cpu_table import BATCH, CONTEXT, PREFILL, STEPS, table
from pocketllm import PocketLLMError
from pocketllm.bench.hardware import describe_code, describe_hardware, physical_cores, slug
from pocketllm.bench.limits import best_of, decode_ceiling, measure_limits, prefill_ceiling, token_costs
from pocketllm.bench.sides.base import Spec
from pocketllm.bench.sides.llama_bench_side import LlamaBenchSide
from pocketllm.checkpoint import open_checkpoint
from random_checkpoint import SHAPES, random_model
from transformers_peer import TransformersPeer
from tree import ROOT


def main() -> int:
    options = _parse()
    try:
        return _run(options)
    except PocketLLMError as error:
        print(f"native_cpu: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    hardware, threads = describe_hardware(), options.threads
    torch.set_num_threads(threads)
    directory = random_model(options.shape, "bf16", "cpu", options.scratch)
    with tempfile.TemporaryDirectory(prefix="pocketllm-gguf-", dir=options.scratch) as folder:
        gguf = Path(folder) / f"{options.shape}-bf16.gguf"
        write_random_gguf(gguf, options.shape)
        costs = token_costs(open_checkpoint(directory))
        limits = [measure_limits("cpu", threads)]
        peer = LlamaBenchSide(Spec(gguf, threads=threads), options.peer)
        args = {"backend": "cpp", "max_batch_size": BATCH, "max_model_len": 1024, "enable_prefix_caching": False, "backend_options": {"num_threads": threads}}
        ours = MeasuredLLM(directory, "cpu", args, options.seed)
        theirs = TransformersPeer(directory, "cpu", options.seed)
        sides: dict[str, Callable[[], dict[str, float]]] = {
            "pocketllm": lambda: _ours(ours),
            "llama.cpp": lambda: _llama_cpp(peer),
            "transformers": lambda: {"prefill": theirs.prefill(1, PREFILL, 1)[0]},
        }
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
        for number in range(options.rounds):
            for name, measure in list(sides.items())[:: 1 if number % 2 == 0 else -1]:
                samples[name].append(measure())
                text = ", ".join(f"{key} {value:.1f}" for key, value in samples[name][-1].items())
                print(f"round {number + 1}/{options.rounds} {name}: {text}", file=sys.stderr, flush=True)
        limits.append(measure_limits("cpu", threads))
        capabilities = ours.capabilities
        ours.close()
    best = best_of(limits)
    ceilings = {"prefill": prefill_ceiling(best, costs), "decode": decode_ceiling(best, costs)}
    report = {
        "benchmark": "native_cpu",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/native_cpu.py", "--rounds", str(options.rounds), "--threads", str(threads), "--shape", options.shape]),
        "code": describe_code(),
        "hardware": hardware,
        "model": {"shape": options.shape, "weights": "random, bf16", **costs},
        "limits": best,
        "ceilings": ceilings,
        "pocketllm": {"load_seconds": ours.load_seconds, "details": {key: str(value) for key, value in capabilities["details"].items()}},
        "llama.cpp": peer.facts,
        "transformers": theirs.facts,
        "samples": samples,
        "medians": {name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in samples.items()},
    }
    output = options.output or ROOT / "benchmarks" / "results" / slug(hardware) / "native_cpu.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(report))
    print(f"\nWritten to {output}")
    return 0


def _ours(llm: MeasuredLLM) -> dict[str, float]:
    return {
        "prefill": llm.prefill(1, PREFILL, 1)[0],
        "decode": llm.decode(1, CONTEXT, STEPS, 1)[0].rate,
        "decode_batch": llm.decode(BATCH, CONTEXT, STEPS, 1)[0].rate,
    }


def _llama_cpp(peer: LlamaBenchSide) -> dict[str, float]:
    return {"prefill": peer.prefill(1, PREFILL).rate, "decode": peer.decode(1, 0, STEPS).rate}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the native engine on the CPU beside llama.cpp and transformers, on random weights of one shape.")
    built = ROOT / "build" / "llama.cpp" / "llama-bench"
    parser.add_argument("--peer", type=Path, default=built, metavar="PATH", help="llama-bench [what scripts/build_llama_cpp.sh made]")
    shapes = [name for name in SHAPES if name.startswith("qwen3.5")]
    parser.add_argument("--shape", choices=shapes, default="qwen3.5-0.8b", help="of the weights [qwen3.5-0.8b]")
    parser.add_argument("--rounds", type=positive, default=3, help="alternating rounds [3]")
    parser.add_argument("--threads", type=positive, default=physical_cores(), help="of each side [physical cores]")
    parser.add_argument("--scratch", type=Path, help="where random weights are written [the disk, or memory where it has the room]")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts [0]")
    parser.add_argument("--output", type=Path, help="result file [benchmarks/results/<hardware>/native_cpu.json]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
