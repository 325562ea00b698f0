"""PocketLLM's torch plane on a GPU: prefill, decode and a long prompt, beside transformers on the same checkpoint and what the card allows.

    python benchmarks/torch_cuda.py --shape qwen3.5-9b --out DIR

Each section is a process of its own, whose rows are on the disk when the next one begins. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from arguments import json_object, positive, some_of
from compiled_kernels import CompiledKernels
from cuda_table import table
from pocketllm.bench.hardware import describe_code, describe_gpu, describe_hardware, gpu_slug
from tree import ROOT

SECTIONS = ("checkpoints", "limits", "ours-bf16", "ours-fp8", "peer", "long", "profile-bf16", "profile-fp8")


class Rows:
    """Measured rows in a file of JSON lines, which a section that dies leaves behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, section: str, measure: str, **facts: Any) -> None:
        row = {"section": section, "measure": measure, **facts}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        shown = {key: value for key, value in facts.items() if not isinstance(value, (list, dict, str)) or key == "unit"}
        print(f"{section}: {measure}: {_short(shown)}", flush=True)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self.path.exists():
            yield from (json.loads(line) for line in self.path.read_text(encoding="utf-8").splitlines())


def main() -> int:
    options = _parse(sys.argv[1:])
    rows = Rows(options.out / "torch_cuda.jsonl")
    if options.section:
        _SECTION_CODE[options.section.partition("-")[0]](options, rows)
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.keep:
        rows.path.unlink(missing_ok=True)
    failed = [section for section in options.sections if not _run_section(section, options, rows)]
    report = {
        "benchmark": "torch_cuda",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/torch_cuda.py", *_sizes(options)]),
        "code": describe_code() | ({"commit": options.commit} if options.commit else {}),
        "hardware": {**describe_hardware(), "gpu": describe_gpu()},
        "shape": options.shape,
        "engine_args": options.engine_args,
        "failed_sections": failed,
        "rows": list(rows),
    }
    (options.out / "torch_cuda.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print("\n" + table(report))
    gpu = report["hardware"]["gpu"]
    print(f"\nWritten to {options.out / 'torch_cuda.json'}" + (f"; of {gpu_slug(gpu)}" if gpu else ""))
    return 1 if failed else 0


def _sizes(options: argparse.Namespace) -> list[str]:
    sizes: dict[str, Any] = {"samples": options.samples, "prefills": options.prefills, "rest": options.rest}
    if options.prompts:
        sizes["prompts"] = ",".join(_name(*load) for load in options.prompts)
    if options.decodes:
        sizes["decodes"] = ",".join(f"{_name(batch, tokens)}+{steps}" for batch, tokens, steps in options.decodes)
    given = ["--shape", options.shape, "--sections", ",".join(options.sections)]
    return given + [word for name, value in sizes.items() for word in (f"--{name}", str(value))]


def _run_section(section: str, options: argparse.Namespace, rows: Rows) -> bool:
    start = time.perf_counter()
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--section", section]
    try:
        code: int | str = subprocess.run(command, timeout=options.section_timeout).returncode
    except subprocess.TimeoutExpired:
        code = f"no end after {options.section_timeout} s"
    seconds = time.perf_counter() - start
    rows.add(section, "section", code=code, seconds=seconds)
    return code == 0


def _directory(options: argparse.Namespace, weights: str) -> Path:
    from random_checkpoint import random_model

    given: Path | None = {"bf16": options.model, "fp8": options.fp8_model}[weights]
    return given or random_model(options.shape, weights, options.device, options.scratch)


def _checkpoints(options: argparse.Namespace, rows: Rows) -> None:
    for weights in _weights(options):
        start = time.perf_counter()
        _directory(options, weights)
        rows.add("checkpoints", weights, seconds=time.perf_counter() - start)


def _weights(options: argparse.Namespace) -> list[str]:
    return ["bf16", "fp8"] if any(section.endswith("fp8") for section in options.sections) else ["bf16"]


def _limits(options: argparse.Namespace, rows: Rows) -> None:
    from cuda_limits import ceilings, measure_cuda_limits
    from pocketllm.bench.limits import token_costs
    from pocketllm.checkpoint import open_checkpoint

    limits = measure_cuda_limits(options.device, options.rest)
    rows.add("limits", "device", **limits)
    rows.add("limits", "hardware", **describe_hardware(), gpu=describe_gpu())  # for a run that is cut short
    for weights in _weights(options):
        costs = token_costs(open_checkpoint(_directory(options, weights)))
        rows.add("limits", weights, **costs, **ceilings(limits, costs))


def _ours(options: argparse.Namespace, rows: Rows) -> None:
    from product_rate import Product

    section, weights = options.section, options.section.partition("-")[2]
    kernels = CompiledKernels()
    product = Product(options.device)  # before the engine's thread, which a capture could meet
    ours, workload = _open(options, weights)
    rows.add(section, "load", compiled_kernels=len(kernels.take()), seconds=ours.load_seconds, capabilities=_plain(ours.capabilities))
    for batch, tokens in workload.prompts:
        _prefill(rows, section, f"prefill {_name(batch, tokens)}", ours.rested_prefill(product, batch, tokens, options.prefills, options.rest), options.rest)
        if batch == 1 and tokens >= workload.chunk:
            _prefill(rows, section, f"sustained prefill {_name(batch, tokens)}", ours.sustained_prefill(product, batch, tokens, options.prefills), 0.0)
    del product
    for batch, tokens, steps in workload.decodes:
        found = ours.decode(batch, tokens, steps, workload.samples)
        counts = [sample.steps for sample in found]
        _rate(rows, section, f"decode {_name(batch, tokens)}", [sample.rate for sample in found], steps=min(counts), sample_steps=counts)
    for batch, tokens, steps in workload.decodes:
        _rate(rows, section, f"whole {_name(batch, tokens)}+{steps}", ours.batch_total(batch, tokens, steps, 2))
    batch, tokens, steps = workload.decodes[0]
    gaps = sorted(ours.intervals(tokens, steps))
    rows.add(section, "intervals", p50_ms=1e3 * gaps[len(gaps) // 2], p99_ms=1e3 * gaps[int(0.99 * len(gaps))])
    for length in (7, workload.context // 16):  # the peer is asked for the same
        prompt = ours.fresh(length)
        rows.add(section, "first_logprobs", prompt=prompt, top=ours.first_logprobs(prompt))
    rows.add(section, "compiled after loading", kernels=kernels.take())
    rows.add(section, "memory", **_memory())
    ours.close()


def _peer(options: argparse.Namespace, rows: Rows) -> None:
    from transformers_peer import TransformersPeer

    workload = _workload(options)
    peer = TransformersPeer(_directory(options, "bf16"), options.device, options.seed)
    rows.add("peer", "load", seconds=peer.load_seconds, facts=peer.facts)
    for row in [row for row in rows if row["section"] == "ours-bf16" and row["measure"] == "first_logprobs"]:
        found, spread = peer.logprobs(row["prompt"], [id_ for id_, _ in row["top"]])
        difference = max(abs(theirs - ours) for theirs, (_, ours) in zip(found, row["top"], strict=True))
        rows.add("peer", "agreement", prompt_tokens=len(row["prompt"]), largest_difference=difference, spread=spread)
    for batch, tokens in workload.prompts:
        _rate(rows, "peer", f"prefill {_name(batch, tokens)}", peer.prefill(batch, tokens, workload.samples, options.rest))
    for batch, tokens, _ in workload.decodes[:2]:
        _rate(rows, "peer", f"decode {_name(batch, tokens)}", peer.decode(batch, tokens))
    rows.add("peer", "memory", **_memory())


def _long(options: argparse.Namespace, rows: Rows) -> None:
    from llm_measures import MeasuredLLM

    workload = _workload(options)
    context = workload.long + workload.appended + 64
    args = {"max_batch_size": 2, "max_model_len": context, "prefill_chunk_tokens": workload.chunk, "enable_prefix_caching": True, **options.engine_args}
    ours = MeasuredLLM(_directory(options, "bf16"), options.device, args, options.seed)
    rows.add("long", "load", seconds=ours.load_seconds, capabilities=_plain(ours.capabilities), **_memory())
    found = ours.long_prompt(workload.long, workload.appended, workload.chunk)
    rows.add("long", f"{workload.long} tokens", **found)
    rows.add("long", "memory", **_memory())
    ours.close()


def _profile(options: argparse.Namespace, rows: Rows) -> None:
    section, weights = options.section, options.section.partition("-")[2]
    ours, workload = _open(options, weights)
    cases = [(batch, tokens, 1) for batch, tokens in workload.prompts[-2:]]  # prefill, with one draw
    cases += [(batch, 16, 64) for batch, _, _ in workload.decodes[:2]]  # hardly a prompt, then steps
    with (options.out / "profile.txt").open("a", encoding="utf-8") as file:
        for batch, tokens, steps in cases:
            text, sums = ours.profile(batch, tokens, steps)
            file.write(f"{section}: {batch} x {tokens} tokens, {steps} steps: {_short(sums)}\n{text}\n\n")
            rows.add(section, f"{_name(batch, tokens)}+{steps}", **sums)
    ours.close()


def _open(options: argparse.Namespace, weights: str) -> tuple[Any, Any]:
    from llm_measures import MeasuredLLM

    workload = _workload(options)
    args = {
        "max_batch_size": workload.rows,
        "max_model_len": workload.context,
        "prefill_chunk_tokens": workload.chunk,
        "enable_prefix_caching": False,
        **options.engine_args,
    }
    return MeasuredLLM(_directory(options, weights), options.device, args, options.seed), workload


def _workload(options: argparse.Namespace) -> Any:
    from llm_measures import Workload

    workload = replace(Workload.tiny() if options.tiny else Workload(), samples=options.samples)
    return replace(workload, prompts=options.prompts or workload.prompts, decodes=options.decodes or workload.decodes)


def _rate(rows: Rows, section: str, measure: str, samples: list[float], **facts: Any) -> None:
    rows.add(section, measure, unit="tokens/s", median=statistics.median(samples), min=min(samples), max=max(samples), samples=samples, **facts)


def _prefill(rows: Rows, section: str, measure: str, found: Any, rest: float) -> None:
    _rate(rows, section, measure, found.rates, rest_s=rest, products=found.products, product_flops_per_s=found.product_rates)


def _name(batch: int, tokens: int) -> str:
    return f"{batch}x{tokens}"


def _memory() -> dict[str, int]:
    import torch

    if not torch.cuda.is_available():
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
        "device_used_bytes": total - free,
    }


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(json.dumps(value, default=str))
    return loaded


def _short(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:,.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in facts.items())


_SECTION_CODE: dict[str, Callable[[argparse.Namespace, Rows], None]] = {
    "checkpoints": _checkpoints,
    "limits": _limits,
    "ours": _ours,
    "peer": _peer,
    "long": _long,
    "profile": _profile,
}


def _loads(count: int) -> Callable[[str], tuple[tuple[int, ...], ...]]:
    """Of RxT,.. with 2 numbers a load, of RxT+N,.. with 3."""

    def loads(text: str) -> tuple[tuple[int, ...], ...]:
        found = tuple(tuple(positive(number) for number in load.replace("+", "x").split("x")) for load in text.split(","))
        if any(len(load) != count for load in found):
            raise argparse.ArgumentTypeError(f"{text!r} has not {count} numbers in each load")
        return found

    return loads


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure PocketLLM's torch plane on a GPU, with transformers and the card's limits beside it.")
    parser.add_argument("--shape", default="qwen3.5-9b", help="of the random checkpoints, as random_checkpoint.py knows it [qwen3.5-9b]")
    parser.add_argument("--model", type=Path, help="checkpoint to measure in place of random weights of the shape in bf16")
    parser.add_argument("--fp8-model", type=Path, help="the same of FP8")
    parser.add_argument("--scratch", type=Path, help="where random checkpoints are written and looked for [/dev/shm if it has the room, else the disk]")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tries the program [cuda]")
    parser.add_argument("--tiny", action="store_true", help="a workload that only tries the program")
    parser.add_argument("--sections", type=some_of(SECTIONS), default=list(SECTIONS), metavar="A,B", help=f"which of {', '.join(SECTIONS)} [all]")
    parser.add_argument("--section-timeout", type=float, default=240, help="seconds after which a section is ended [240]")
    parser.add_argument("--engine-args", type=json_object, default={}, metavar="JSON", help="more EngineArgs of PocketLLM")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts [0]")
    parser.add_argument("--samples", type=positive, default=3, help="of each figure [3]")
    parser.add_argument("--prefills", type=positive, default=5, help="samples of each figure of prefill, beside as many of a product [5]")
    parser.add_argument("--rest", type=float, default=0.2, help="seconds of nothing before each prefill and each product that are not sustained ones [0.2]")
    parser.add_argument("--prompts", type=_loads(2), metavar="RxT,..", help="rows and tokens of each prefill, in place of the usual ones")
    parser.add_argument("--decodes", type=_loads(3), metavar="RxT+N,..", help="rows, tokens of their prompts and steps where decoding is measured")
    parser.add_argument("--commit", help="of this tree, where it is no git checkout")
    parser.add_argument("--keep", action="store_true", help="add to the rows that DIR has, in place of those of another run")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "torch_cuda", help="directory of the results [build/torch_cuda]")
    parser.add_argument("--section", choices=SECTIONS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
