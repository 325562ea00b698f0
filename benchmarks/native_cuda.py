"""The native engine on a CUDA GPU: random weights in public models' shapes, and what the card allows, measured in the same run.

    python benchmarks/native_cuda.py BUILD [--steps 9b,9b-fp8] [--prefill 9b] [--engine qwen3.5-9b] [--load 27b] [--output FILE]

BUILD is a CMake build folder with POCKET_BACKEND=cuda and the target pocket_cuda_bench. Steps are decode steps as recorded graphs, without the host's
share; what the engine answers, the host's share included, comes from its launcher. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pocketllm.bench.hardware import describe_code, describe_gpu, describe_hardware, gpu_slug
from random_checkpoint import random_model
from tree import ROOT

_ENGINE = shlex.split("--device cuda --context 2048 --batch-sizes 1 --decode-tokens 128 --prefill 512,8192 --prefill-chunk-tokens 8192 --json")
_STEPS = "9b,9b-fp8,27b,27b-fp8,0.8b"
_READ_RATE = re.compile(r"^read rate ([\d.]+) TB/s", re.MULTILINE)
_PROMPTS = re.compile(r"^prefill +(\d+) x +(\d+): +([\d.]+) ms, +\d+ tok/s, +([\d.]+) TFLOP/s", re.MULTILINE)


def main() -> int:
    options = _parse()
    gpu = describe_gpu()
    if gpu is None:
        print("native_cuda: there is no CUDA GPU, or PyTorch does not see it", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "benchmark": "native_cuda",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/native_cuda.py", "BUILD", *_choices(options)]),
        "code": describe_code(),
        "hardware": {**describe_hardware(), "gpu": gpu},
        "steps": [],
        "prefill": [],
        "engine": [],
        "load": [],
        "failed": [],
    }
    output = options.output or ROOT / "benchmarks" / "results" / gpu_slug(gpu) / "native_cuda.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    for name in options.steps:
        _add(report, output, "steps", name, lambda name=name: _steps(options.build, name))
    for name in options.prefill:
        _add(report, output, "prefill", name, lambda name=name: _prefill(options.build, name))
    for name in options.engine:
        _add(report, output, "engine", name, lambda name=name: _engine(options.build, name))
    for name in options.load:
        _add(report, output, "load", name, lambda name=name: _load(options.build, name, options.scratch))
    print(f"Written to {output}")
    return 1 if report["failed"] else 0


def _add(report: dict[str, Any], output: Path, part: str, name: str, measure: Any) -> None:
    """What was measured is written at once: a part that fails takes no other with it."""
    try:
        report[part].append(measure())
    except subprocess.SubprocessError as error:
        print(f"native_cuda: {part} of {name}: {error}", file=sys.stderr)
        report["failed"].append(f"{part} {name}")
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _steps(build: Path, name: str) -> Any:
    shape, _, kind = name.partition("-")
    with tempfile.TemporaryDirectory(prefix="pocketllm-steps-") as folder:
        table = Path(folder) / "table.json"
        command: list[str | Path] = [build / "pocket_cuda_bench", shape, "--table", table]
        if kind == "fp8":
            command.append("--float8")
        subprocess.run(command, check=True, timeout=150)
        return json.loads(table.read_text(encoding="utf-8"))


def _prefill(build: Path, name: str) -> Any:
    shape, _, kind = name.partition("-")
    command: list[str | Path] = [build / "pocket_cuda_bench", shape, "--only-prefill"]
    if kind == "fp8":
        command.append("--float8")
    return prompts_of(name, subprocess.run(command, check=True, timeout=150, stdout=subprocess.PIPE, text=True).stdout)


def prompts_of(name: str, text: str) -> dict[str, Any]:
    """What `pocket_cuda_bench --only-prefill` printed of the shape `name`: the read rate, and each step's seconds, tokens and operations a second."""
    shape, _, kind = name.partition("-")
    rate = _READ_RATE.search(text)
    prompts = []
    for rows, tokens, milliseconds, teraflops in _PROMPTS.findall(text):
        count, seconds = int(rows) * int(tokens), float(milliseconds) / 1e3
        prompts.append(
            {"rows": int(rows), "tokens": int(tokens), "seconds": seconds, "tokens_per_second": count / seconds, "flops_per_second": float(teraflops) * 1e12}
        )
    if rate is None or not prompts:
        raise subprocess.SubprocessError(f"pocket_cuda_bench printed no prompts: {text[-200:]!r}")
    return {"shape": shape, "weights": "float8_e4m3" if kind == "fp8" else "bfloat16", "read_bytes_per_second": float(rate.group(1)) * 1e12, "prompts": prompts}


def _engine(build: Path, shape: str) -> Any:
    command: list[str | Path] = [build / "launcher" / "pocketllm_engine", "bench", "--shape", shape, *_ENGINE]
    return json.loads(subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True).stdout)


def _load(build: Path, name: str, scratch: Path | None) -> Any:
    """Files that were just written, or read, are in the system's memory: what is measured is the way from there."""
    shape, _, kind = name.partition("-")
    folder = random_model(f"qwen3.5-{shape}", kind or "bf16", "cuda", scratch)
    text = subprocess.run([build / "pocket_cuda_bench", "--load", folder], check=True, timeout=300, stdout=subprocess.PIPE, text=True).stdout
    return {"shape": shape, "weights": "float8_e4m3" if kind == "fp8" else "bfloat16", **json.loads(text.splitlines()[-1])}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the native engine on a CUDA GPU, on random weights of public shapes.")
    parser.add_argument("build", type=Path, metavar="BUILD", help="build folder with pocket_cuda_bench and the launcher")
    parser.add_argument("--steps", type=_names, default=_names(_STEPS), metavar="NAMES", help=f"shapes of decode steps [{_STEPS}]")
    parser.add_argument("--prefill", type=_names, default=["9b", "9b-fp8"], metavar="NAMES", help="shapes of prompts [9b,9b-fp8]")
    parser.add_argument("--engine", type=_names, default=["qwen3.5-9b"], metavar="NAMES", help="shapes that the engine answers with [qwen3.5-9b]")
    parser.add_argument("--load", type=_names, default=["27b"], metavar="NAMES", help="shapes that are written and loaded [27b]")
    parser.add_argument("--scratch", type=Path, metavar="DIR", help="where these checkpoints lie, and stay [memory, or the disk for temporary files]")
    parser.add_argument("--output", type=Path, help="[benchmarks/results/<GPU>/native_cuda.json]")
    return parser.parse_args()


def _choices(options: argparse.Namespace) -> list[str]:
    return ["--steps", ",".join(options.steps), "--prefill", ",".join(options.prefill), "--engine", ",".join(options.engine), "--load", ",".join(options.load)]


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
