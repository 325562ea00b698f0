"""DeepSeek-V4 on the torch plane on a GPU, on random weights in Flash's layer shape: experts resident, and experts that stay in the file on the host.

    python benchmarks/deepseek_cuda.py --shape deepseek-v4-flash-6-layers --out DIR

Beside each figure is its limit: the bytes that a token reads over the rate at which the card reads, and for experts on the host those that had to be brought
over, over the rate of such copies. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from deepseek_cuda_table import table
from llm_measures import MeasuredLLM
from torch_cuda import Rows

from arguments import positive, some_of
from cuda_limits import ceilings, measure_cuda_limits
from pocketllm.bench.hardware import describe_code, describe_gpu, describe_hardware
from pocketllm.bench.limits import token_costs
from pocketllm.checkpoint import open_checkpoint
from random_checkpoint import random_model
from tree import ROOT

PARTS = ("limits", "resident", "profile", "host")
_SHORT = 16  # tokens of a prompt that hardly counts
_COPY_BYTES = 2**28
_TRIES = 5
_REST = 0.2  # seconds of nothing before each product


def main() -> int:
    options = _parse(sys.argv[1:])
    options.out.mkdir(parents=True, exist_ok=True)
    rows = Rows(options.out / "deepseek_cuda.jsonl")
    rows.path.unlink(missing_ok=True)
    begin = time.perf_counter()
    directory = random_model(options.shape, "fp4", options.device, options.scratch)
    rows.add("checkpoint", options.shape, seconds=time.perf_counter() - begin)
    checkpoint = open_checkpoint(directory)
    costs = token_costs(checkpoint)
    experts = sum(tensor.num_bytes for tensor in checkpoint.tensors if ".ffn.experts." in tensor.name)
    share = checkpoint.config["num_experts_per_tok"] / checkpoint.config["n_routed_experts"]
    rows.add("limits", "token", **costs, expert_bytes_per_token=experts * share)
    if "limits" in options.parts:
        limits = measure_cuda_limits(options.device, _REST)
        rows.add("limits", "device", **limits, **_copy_rates(options.device))
        rows.add("limits", "ceilings", **ceilings(limits, costs))
        torch.cuda.empty_cache()
    if "resident" in options.parts or "profile" in options.parts:
        _resident(directory, options, rows)
    _write(options, rows)  # what there is, should time run out
    if "host" in options.parts:
        _host(directory, options, rows)
    print("\n" + table(_write(options, rows)))
    return 0


def _write(options: argparse.Namespace, rows: Rows) -> dict[str, Any]:
    report = {
        "benchmark": "deepseek_cuda",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/deepseek_cuda.py", *_shown(sys.argv[1:])]),
        "code": describe_code() | ({"commit": options.commit} if options.commit else {}),
        "hardware": {**describe_hardware(), "gpu": describe_gpu()},
        "shape": options.shape,
        "rows": list(rows),
    }
    (options.out / "deepseek_cuda.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _shown(arguments: list[str]) -> list[str]:
    """Without where files lie."""
    hidden = {place + skip for place, one in enumerate(arguments) if one in ("--out", "--scratch", "--commit") for skip in (0, 1)}
    return [one for place, one in enumerate(arguments) if place not in hidden]


def _resident(directory: Path, options: argparse.Namespace, rows: Rows) -> None:
    ours = _open(directory, options, routed_experts_device="gpu" if options.device != "cpu" else "auto")
    rows.add("resident", "load", seconds=ours.load_seconds, capabilities=json.loads(json.dumps(ours.capabilities, default=str)))
    if "resident" in options.parts:
        _decode("resident", ours, (_SHORT, options.context), options.steps, options.samples, rows)
        for tokens in options.prompts:
            _rate(rows, "resident", f"prefill 1x{tokens}", ours.prefill(1, tokens, options.samples))
    if "profile" in options.parts:
        text, sums = ours.profile(1, 16, 33)
        (options.out / "profile.txt").write_text(f"33 steps after 16 tokens: {sums}\n{text}\n", encoding="utf-8")
        rows.add("profile", "1x16+33", **sums)
    rows.add("resident", "memory", allocated_bytes=torch.cuda.memory_allocated() if torch.cuda.is_available() else 0)
    ours.close()


def _host(directory: Path, options: argparse.Namespace, rows: Rows) -> None:
    length = options.host_prompt + options.host_steps + 32  # each longer step that is tried while it loads reads all experts
    ours = _open(directory, options, routed_experts_device="cpu", routed_experts_memory=options.expert_memory, max_model_len=length)
    rows.add("host", "load", seconds=ours.load_seconds, capabilities=json.loads(json.dumps(ours.capabilities, default=str)))
    before = ours.expert_stats()
    _decode("host", ours, (_SHORT,), options.host_steps, 1, rows)
    after = ours.expert_stats()  # its prompts have few tokens beside the answers'
    rows.add("host", "experts", **{name: float(after[name] - before[name]) for name in ("lookups", "hits")}, cached_bytes=float(after["bytes"]))
    _write(options, rows)
    tokens = options.host_prompt
    _rate(rows, "host", f"prefill 1x{tokens}", [tokens * rate for rate in ours.batch_total(1, tokens, 1, 1)])
    ours.close()


def _open(directory: Path, options: argparse.Namespace, **more: Any) -> MeasuredLLM:
    args = {
        "max_batch_size": 1,
        "max_model_len": max(*options.prompts, options.context + options.steps) + 128,
        "prefill_chunk_tokens": options.chunk,
        "enable_prefix_caching": False,
        **more,
    }
    return MeasuredLLM(directory, options.device, args, options.seed)


def _decode(section: str, ours: MeasuredLLM, contexts: tuple[int, ...], steps: int, samples: int, rows: Rows) -> None:
    for context in contexts:
        found = ours.decode(1, context, steps, samples)
        _rate(rows, section, f"decode 1x{context}", [sample.rate for sample in found], steps=min(sample.steps for sample in found))


def _copy_rates(device: str) -> dict[str, float]:
    """Bytes a second from the host's memory to the GPU's, pinned and not; and at which one processor reads the host's memory."""
    data = torch.zeros(_COPY_BYTES, dtype=torch.uint8)
    found = {"host_read_bytes_per_s": _COPY_BYTES / _seconds(lambda: data.view(torch.int64).sum())}
    if device != "cpu":
        target, pinned = torch.empty_like(data, device=device), data.pin_memory()
        found["host_to_device_bytes_per_s"] = _COPY_BYTES / _seconds(lambda: target.copy_(data))
        found["pinned_to_device_bytes_per_s"] = _COPY_BYTES / _seconds(lambda: target.copy_(pinned))
    return found


def _seconds(work: Any) -> float:
    tries = []
    for _ in range(_TRIES):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        tries.append(time.perf_counter() - begin)
    return min(tries)


def _rate(rows: Rows, section: str, measure: str, samples: list[float], **facts: Any) -> None:
    rows.add(section, measure, unit="tokens/s", median=statistics.median(samples), min=min(samples), max=max(samples), samples=samples, **facts)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure PocketLLM's torch plane on DeepSeek-V4's layers, with the card's limits beside it.")
    parser.add_argument("--shape", default="deepseek-v4-flash-6-layers", help="of the random checkpoint [deepseek-v4-flash-6-layers]")
    parser.add_argument("--scratch", type=Path, help="where it is written and looked for [/dev/shm if it has the room, else the disk]")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tries the program [cuda]")
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), metavar="A,B", help=f"which of {', '.join(PARTS)} [all]")
    parser.add_argument("--prompts", type=lambda text: [int(part) for part in text.split(",")], default=[512, 2048, 8192], help="tokens [512,2048,8192]")
    parser.add_argument("--context", type=positive, default=4096, help="tokens before an answer [4096]")
    parser.add_argument("--steps", type=positive, default=128, help="of an answer [128]")
    parser.add_argument("--host-prompt", type=positive, default=512, help="tokens of a prompt with experts on the host [512]")
    parser.add_argument("--host-steps", type=positive, default=32, help="of an answer with experts on the host [32]")
    parser.add_argument("--chunk", type=positive, default=4096, help="most prompt tokens a step [4096]")
    parser.add_argument("--expert-memory", default="8GiB", help="of experts that stay on the host, in the GPU's memory [8GiB]")
    parser.add_argument("--samples", type=positive, default=3, help="of each figure [3]")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts [0]")
    parser.add_argument("--commit", help="of this tree, where it is no git checkout")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "deepseek_cuda", help="directory of the results [build/deepseek_cuda]")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
