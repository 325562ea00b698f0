"""The native engine on a CUDA GPU: random weights in public models' shapes, and what the card allows, measured in the same run.

    python benchmarks/native_cuda.py BUILD [--steps 9b,9b-fp8] [--engine qwen3.5-9b] [--output FILE]

BUILD is a CMake build folder with POCKET_BACKEND=cuda and the target pocket_cuda_bench. Steps are decode steps as recorded graphs, without the host's
share; what the engine answers, the host's share included, comes from its launcher. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from hardware import ROOT, describe_code, describe_gpu, describe_hardware, gpu_slug

_ENGINE = shlex.split("--device cuda --context 2048 --batch-sizes 1 --decode-tokens 128 --prefill 512,8192 --prefill-chunk-tokens 8192 --json")
_STEPS = "9b,9b-fp8,27b,27b-fp8,0.8b"


def main() -> int:
    options = _parse()
    gpu = describe_gpu()
    if gpu is None:
        print("native_cuda: there is no CUDA GPU, or PyTorch does not see it", file=sys.stderr)
        return 2
    report: dict[str, Any] = {
        "benchmark": "native_cuda",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/native_cuda.py", "BUILD", "--steps", ",".join(options.steps), "--engine", ",".join(options.engine)]),
        "code": describe_code(),
        "hardware": {**describe_hardware(), "gpu": gpu},
        "steps": [],
        "engine": [],
        "failed": [],
    }
    output = options.output or ROOT / "benchmarks" / "results" / gpu_slug(gpu) / "native_cuda.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    for name in options.steps:
        _add(report, output, "steps", name, lambda name=name: _steps(options.build, name))
    for name in options.engine:
        _add(report, output, "engine", name, lambda name=name: _engine(options.build, name))
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
        subprocess.run([build / "pocket_cuda_bench", shape, *(["--float8"] if kind == "fp8" else []), "--table", table], check=True, timeout=150)
        return json.loads(table.read_text(encoding="utf-8"))


def _engine(build: Path, shape: str) -> Any:
    command = [build / "launcher" / "pocketllm_engine", "bench", "--shape", shape, *_ENGINE]
    return json.loads(subprocess.run(command, check=True, timeout=300, stdout=subprocess.PIPE, text=True).stdout)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the native engine on a CUDA GPU, on random weights of public shapes.")
    parser.add_argument("build", type=Path, metavar="BUILD", help="build folder with pocket_cuda_bench and the launcher")
    parser.add_argument("--steps", type=_names, default=_names(_STEPS), metavar="NAMES", help=f"shapes of decode steps [{_STEPS}]")
    parser.add_argument("--engine", type=_names, default=["qwen3.5-9b"], metavar="NAMES", help="shapes that the engine answers with [qwen3.5-9b]")
    parser.add_argument("--output", type=Path, help="[benchmarks/results/<GPU>/native_cuda.json]")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


if __name__ == "__main__":
    sys.exit(main())
