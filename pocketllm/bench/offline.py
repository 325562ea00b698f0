"""`pocketllm bench latency` and `throughput`: one engine, its limits measured in the same run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pocketllm.backends.base import LoadProgress
from pocketllm.bench.args import LatencyBenchArgs, ThroughputBenchArgs, command_line, whole_numbers
from pocketllm.bench.hardware import describe_gpu, physical_cores
from pocketllm.bench.limits import decode_ceiling, measure_limits, prefill_ceiling, token_costs
from pocketllm.bench.report import new_report, table
from pocketllm.bench.sides.base import Spec, Timing
from pocketllm.bench.sides.process import SideProcess
from pocketllm.bench.spread import spread
from pocketllm.checkpoint import Checkpoint, open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.hub import resolve_model

Progress = Callable[[str, int, int], None]  # what is measured, how many samples are done, how many there are
SLACK = 64  # tokens of context beyond prompt and answer: a batch's rows begin one after another
_KV_BYTES = 2  # an element of keys and values in a 16-bit type, the least that any plane keeps


def measure_latency(args: LatencyBenchArgs, engine: EngineArgs, progress: Progress) -> dict[str, Any]:
    """The report of one request at a time, by prompt length. Raises PocketLLMError where the engine can't be loaded, or fails."""
    lengths = whole_numbers(args.input_tokens, "input_tokens")
    bench = _Bench(engine, args.threads, args.seed, 1, max(lengths) + args.output_tokens + SLACK)
    rows = []
    with bench as side:
        for length in lengths:
            measures = (("prefill", 1, length), ("decode", 1, length, args.output_tokens))
            prefill, decode = bench.sample(args.warmup, args.repeats, progress, f"prompt {length}", *measures)
            limits = {"prefill": bench.prefill_limit(), "decode": bench.decode_limit(1, length + args.output_tokens / 2)}
            rates = {"prefill": spread([one.rate for one in prefill]), "decode": spread([one.rate for one in decode])}
            rows.append(
                {
                    "input_tokens": length,
                    "ttft_ms": spread([one.seconds * 1e3 for one in prefill]),
                    "tpot_ms": spread([1e3 / one.rate for one in decode]),
                    "prefill_tokens_per_s": rates["prefill"],
                    "decode_tokens_per_s": rates["decode"],
                    "limits": limits,
                    "share_of_limit": {key: rates[key]["median"] / limits[key] for key in limits},
                }
            )
        facts = side.facts()
    return {**new_report("latency", command_line("latency", args, engine), _settings(args)), **bench.facts(), "engine": facts, "rows": rows}


def measure_throughput(args: ThroughputBenchArgs, engine: EngineArgs, progress: Progress) -> dict[str, Any]:
    """The report of batches, by their size. Raises PocketLLMError where the engine can't be loaded, or fails."""
    sizes = whole_numbers(args.batch_sizes, "batch_sizes")
    bench = _Bench(engine, args.threads, args.seed, max(sizes), args.input_tokens + args.output_tokens + max(sizes) + SLACK)
    rows = []
    with bench as side:
        for size in sizes:
            measures = [(what, size, args.input_tokens, args.output_tokens) for what in ("whole", "decode")]
            whole, decode = bench.sample(args.warmup, args.repeats, progress, f"batch {size}", *measures)
            limit = bench.decode_limit(size, args.input_tokens + args.output_tokens / 2)
            rate = spread([one.rate for one in decode])
            rows.append(
                {
                    "batch": size,
                    "output_tokens_per_s": spread([one.rate for one in whole]),
                    "decode_tokens_per_s": rate,
                    "limits": {"decode": limit},
                    "share_of_limit": {"decode": rate["median"] / limit},
                }
            )
        facts = side.facts()
    return {**new_report("throughput", command_line("throughput", args, engine), _settings(args)), **bench.facts(), "engine": facts, "rows": rows}


def latency_table(report: dict[str, Any]) -> str:
    """Markdown: a row a prompt length, medians with the smallest and the largest sample, then limits and memory."""
    rows = []
    for row in report["rows"]:
        cells = [f"{row['input_tokens']:,}", span(row["ttft_ms"]), span(row["prefill_tokens_per_s"]), *_limit(row, "prefill")]
        rows.append((*cells, span(row["tpot_ms"]), span(row["decode_tokens_per_s"]), *_limit(row, "decode")))
    head = ("prompt", "TTFT, ms", "prefill tok/s", "limit", "of it", "TPOT, ms", "decode tok/s", "limit", "of it")
    return "\n".join([table(head, rows), "", *limit_lines(report), f"Peak memory: {memory(report['engine'])}."])


def throughput_table(report: dict[str, Any]) -> str:
    """Markdown: a row a batch size, medians with the smallest and the largest sample, then limits and memory."""
    rows = [(str(row["batch"]), span(row["output_tokens_per_s"]), span(row["decode_tokens_per_s"]), *_limit(row, "decode")) for row in report["rows"]]
    head = ("batch", "output tok/s, prompts included", "decode tok/s", "limit", "of it")
    return "\n".join([table(head, rows), "", *limit_lines(report), f"Peak memory: {memory(report['engine'])}."])


def span(found: dict[str, float]) -> str:
    """ "median (min to max)"."""
    digits = 0 if found["median"] >= 1000 else 1
    return f"{found['median']:,.{digits}f} ({found['min']:,.{digits}f} to {found['max']:,.{digits}f})"


def memory(facts: dict[str, Any]) -> str:
    """Peak memory of a side, in words."""
    found = [f"{facts[key] / 2**20:,.0f} MiB {where}" for key, where in (("peak_rss_bytes", "resident"), ("peak_gpu_bytes", "on the GPU")) if facts.get(key)]
    return ", ".join(found) or "not known"


def limit_lines(report: dict[str, Any]) -> list[str]:
    """What the limits of a report stand on."""
    limits, model = report["limits"], report["model"]
    return [
        f"{report['hardware']['cpu']}{_gpu(report)}, {model['name']} ({model['bytes'] / 1e6:,.1f} MB), commit {report['code']['commit']}.",
        f"Limits of this run: memory reads {limits['read_bytes_per_s'] / 1e9:,.1f} GB/s and copies {limits['copy_bytes_per_s'] / 1e9:,.1f} GB/s; products "
        f"{limits['bf16_flops_per_s'] / 1e12:,.2f} TFLOP/s in bf16, {limits['f32_flops_per_s'] / 1e12:,.2f} in float32. A token reads "
        f"{model['bytes_per_token'] / 1e6:,.1f} MB of weights; a prompt token takes {model['prefill_flops_per_token'] / 1e9:,.3f} GFLOP.",
    ]


class _Bench:
    """An engine to be measured, and the limits of its device, measured before it is loaded."""

    def __init__(self, engine: EngineArgs, threads: int | None, seed: int, rows: int, context: int) -> None:
        path, self._checkpoint, self._device, self._threads = open_model(engine, threads)
        self._costs = token_costs(self._checkpoint)
        self._spec = Spec(path, self._device, self._threads, context, rows, seed, engine_options(engine))
        self._limits: dict[str, float] = {}
        self._side: SideProcess | None = None

    def __enter__(self) -> SideProcess:
        self._limits = measure_limits(self._device, self._threads)
        self._side = SideProcess("pocketllm", self._spec)
        return self._side

    def __exit__(self, *_error: object) -> None:
        assert self._side is not None
        self._side.close()

    def sample(self, warmup: int, repeats: int, progress: Progress, name: str, *measures: tuple[Any, ...]) -> list[list[Timing]]:
        """`repeats` samples of each of `measures`, in turn, after `warmup` that are left out."""
        assert self._side is not None
        samples: list[list[Timing]] = [[] for _ in measures]
        for number in range(warmup + repeats):
            for found, (what, *sizes) in zip(samples, measures, strict=True):
                timing = self._side.measure(what, *sizes)
                if number >= warmup:
                    found.append(timing)
            progress(name, number + 1, warmup + repeats)
        return samples

    def prefill_limit(self) -> float:
        return prefill_ceiling(self._limits, self._costs)

    def decode_limit(self, rows: int, context: float) -> float:
        return decode_ceiling(self._limits, self._costs, rows, context * (self._checkpoint.kv_bytes_per_token(_KV_BYTES) or 0))

    def facts(self) -> dict[str, Any]:
        """Of a report: the device, the model and the limits."""
        gpu = describe_gpu() if self._device != "cpu" else None
        return {"gpu": gpu, "threads": self._threads, "model": model_facts(self._checkpoint), "limits": self._limits}


def open_model(engine: EngineArgs, threads: int | None) -> tuple[Path, Checkpoint, str, int]:
    """The checkpoint's path and headers, the device and the threads that "auto" and None mean.

    Raises:
        UnsupportedFeatureError: the device is a GPU that PyTorch, which measures its limits, does not see.
    """
    path = resolve_model(engine.model, _quietly, engine.backend)
    checkpoint = open_checkpoint(path, engine.model_format)
    device = engine.device
    if device != "cpu":
        import torch

        sees_gpu = torch.cuda.is_available()
        if device != "auto" and not sees_gpu:
            raise UnsupportedFeatureError(
                f'"device" = {device!r} can\'t be measured: PyTorch measures what the GPU allows, and this one sees none. Install a CUDA build of torch, or '
                'send "cpu".',
                param="device",
            )
        if device == "auto":
            from pocketllm.backends.cpp import import_native

            has_code = engine.backend != "cpp" or "cuda" in import_native().linked_devices()
            device = "cuda" if sees_gpu and has_code else "cpu"
    return checkpoint.path, checkpoint, device, threads or physical_cores()


def engine_options(engine: EngineArgs) -> dict[str, Any]:
    """What of `engine` differs from the defaults, beside the model and the device."""
    plain = EngineArgs()
    names = [knob.name for knob in dataclasses.fields(EngineArgs) if knob.name not in ("model", "device")]
    return {name: getattr(engine, name) for name in names if getattr(engine, name) != getattr(plain, name)}


def model_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    """Of a report: what was run, and what a token of it costs."""
    facts = {"name": checkpoint.path.name, "format": checkpoint.model_format, "architecture": checkpoint.architecture, "bytes": checkpoint.num_bytes}
    return {**facts, "parameters": checkpoint.num_parameters, **token_costs(checkpoint)}


def _settings(args: Any) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(args).items() if key not in ("output", "plot")}


def _limit(row: dict[str, Any], key: str) -> Sequence[str]:
    return f"{row['limits'][key]:,.0f}", f"{row['share_of_limit'][key]:.0%}"


def _gpu(report: dict[str, Any]) -> str:
    return f", {report['gpu']['gpu']}" if report.get("gpu") else f", {report['threads']} thread{'s' if report['threads'] != 1 else ''}"


def _quietly(_progress: LoadProgress) -> None:
    """The command's own progress says what runs."""
