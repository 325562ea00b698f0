"""Prefill, decode and batch throughput of PocketLLM through its public API, side by side with llama.cpp on the same file.

    python benchmarks/offline.py [--peer PATH/llama-bench] [--rounds 5] [--threads N]

Rounds alternate between the two, so that whatever else the machine does meets both. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from arguments import json_object, positive
from limits import measure_limits, token_costs
from peers import LlamaCpp, PeerError, Workload
from pocketllm import LLM, EngineArgs, PocketLLMError, SamplingParams
from pocketllm.bench.hardware import describe_code, describe_hardware, peak_rss, physical_cores, slug
from pocketllm.hub import resolve_model
from tree import ROOT

_DRAWS = 6
_MEASURES = {
    "prefill": "prefill {0.prefill}",
    "decode": "decode {0.decode}",
    "batch": "total at batch {0.batch} ({0.batch_prompt} + {0.batch_decode})",
}


class StoppedEarlyError(Exception):
    """The model ended an answer before its budget, so the sample covers fewer tokens than the peer's."""


class Ours:
    """PocketLLM, measured through LLM's public calls with prompts of token ids.

    Args:
        args: engine options.
        workload: token counts of the measures.
        seed: of the prompts, so that a run can be repeated.
    """

    def __init__(self, args: EngineArgs, workload: Workload, seed: int) -> None:
        start = time.perf_counter()
        self._llm = LLM(args)
        self.load_seconds = time.perf_counter() - start
        self._workload = workload
        self._random = random.Random(seed)
        self.discarded = 0
        # The ends of a vocabulary hold control tokens, which would end the answer or change its course.
        size = self._llm.capabilities.vocab_size
        self._ids = range(size // 20, size - size // 10)

    @property
    def capabilities(self) -> dict[str, Any]:
        return dataclasses.asdict(self._llm.capabilities)

    def measure(self) -> dict[str, float]:
        """One sample of each measure, in tokens a second."""
        return {"prefill": self._prefill(), "decode": self._redraw(self._decode), "batch": self._redraw(self._batch)}

    def close(self) -> None:
        self._llm.close()

    def _prefill(self) -> float:
        prompt = self._fresh(self._workload.prefill)
        start = time.perf_counter()
        self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0))
        return len(prompt) / (time.perf_counter() - start)

    def _decode(self) -> float:
        budget = self._workload.decode
        first, first_tokens, tokens, last = 0.0, 0, 0, 0.0
        with self._llm.generate_stream(self._repeating(16), SamplingParams(max_tokens=budget, temperature=0.0)) as stream:
            for event in stream:
                last = time.perf_counter()
                if tokens == 0:
                    first, first_tokens = last, len(event.token_ids)
                tokens += len(event.token_ids)
        if tokens != budget:
            raise StoppedEarlyError(f"{tokens} of {budget} tokens")
        return (tokens - first_tokens) / (last - first)

    def _batch(self) -> float:
        w = self._workload
        prompts = [self._repeating(w.batch_prompt) for _ in range(w.batch)]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, SamplingParams(max_tokens=w.batch_decode, temperature=0.0))
        seconds = time.perf_counter() - start
        for output in outputs:
            if len(output.token_ids) != w.batch_decode:
                raise StoppedEarlyError(f"{len(output.token_ids)} of {w.batch_decode} tokens")
            if output.usage.cached_tokens:
                raise RuntimeError(f"a prompt drawn afresh hit the prefix cache with {output.usage.cached_tokens} tokens: the sample is not a prefill")
        return w.batch * (w.batch_prompt + w.batch_decode) / seconds

    def _redraw(self, sample: Callable[[], float]) -> float:
        for _ in range(_DRAWS):
            try:
                return sample()
            except StoppedEarlyError as error:
                self.discarded += 1
                reason = str(error)
        raise StoppedEarlyError(f"the model ended its answer early on {_DRAWS} prompts in a row, last after {reason}: it cannot be measured this way")

    def _fresh(self, length: int) -> list[int]:
        """Ids that no earlier prompt began with, so that no prefix is cached."""
        return self._random.choices(self._ids, k=length)

    def _repeating(self, length: int) -> list[int]:
        """One fresh id, repeated: a model mostly goes on with it rather than ending its answer."""
        return self._fresh(1) * length


def main() -> int:
    options = _parse(sys.argv[1:])
    try:
        return _run(options)
    except (PocketLLMError, PeerError, StoppedEarlyError) as error:
        print(f"offline: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    workload, threads, rounds = Workload(), options.threads, options.rounds
    hardware = describe_hardware()
    output = options.output or ROOT / "benchmarks" / "results" / slug(hardware) / "offline.json"
    model = _gguf_file(resolve_model(options.model, lambda _: None))
    bench = options.peer or _built_peer()
    peer = LlamaCpp(bench, model, threads) if bench else None
    if peer is None:
        print("offline: no peer: run scripts/build_llama_cpp.sh first, or pass --peer PATH/llama-bench. Measuring PocketLLM alone.", file=sys.stderr)
    limits = [measure_limits(threads)]

    backend_options = {"num_threads": threads, **options.engine_args.get("backend_options", {})}
    args = {"model": str(model), "max_batch_size": workload.batch, **options.engine_args, "backend_options": backend_options}
    ours = Ours(EngineArgs(**args), workload, options.seed)
    samples: dict[str, list[dict[str, float]]] = {"ours": [], "peer": []}
    try:
        ours.measure()  # warm-up; the peer's programs have their own
        for number in range(rounds):
            sides: list[tuple[str, Callable[[], dict[str, float]]]] = [("ours", ours.measure)]
            if peer is not None:
                sides.insert(number % 2, ("peer", lambda measured=peer: measured.measure(workload)))  # type: ignore[misc]
            for side, measure in sides:
                samples[side].append(measure())
                print(f"round {number + 1}/{rounds} {side}: " + ", ".join(f"{key} {value:.1f}" for key, value in samples[side][-1].items()), file=sys.stderr)
    finally:
        ours.close()
    limits.append(measure_limits(threads))

    best = {key: max(one[key] for one in limits) for key in limits[0]}
    costs = token_costs(model)
    ceilings = {"prefill": best["bf16_flops_per_s"] / costs["prefill_flops_per_token"], "decode": best["read_bytes_per_s"] / costs["file_bytes_per_token"]}
    report = {
        "benchmark": "offline",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/offline.py", *map(_without_folders, sys.argv[1:])]),
        "code": describe_code(),
        "hardware": hardware,
        "model": {"file": model.name, "bytes": model.stat().st_size, **costs},
        "settings": {"rounds": rounds, "threads": threads, "engine_args": _plain(options.engine_args), "seed": options.seed, **dataclasses.asdict(workload)},
        "limits": best,
        "pocketllm": {
            "load_seconds": ours.load_seconds,
            "peak_rss_bytes": peak_rss(),
            "discarded_samples": ours.discarded,
            "capabilities": _plain(ours.capabilities),
        },
        "peer": None if peer is None else {"name": peer.name, "peak_rss_bytes": peer.peak_rss or None, **peer.facts},
        "samples": samples,
        "summary": {key: _summary(key, samples, ceilings.get(key)) for key in _MEASURES},
    }
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps(report, indent=2) + "\n")
    except OSError as error:
        raise PeerError(f"cannot write {output}: {error.strerror}. Pass --output PATH.") from None
    print(_table(report, workload))
    print(f"\nWritten to {output}")
    return 0


def _summary(key: str, samples: dict[str, list[dict[str, float]]], ceiling: float | None) -> dict[str, Any]:
    sides: dict[str, Any] = {}
    for side, rows in samples.items():
        values = [row[key] for row in rows]
        sides[side] = {"median": statistics.median(values), "min": min(values), "max": max(values)} if values else None
    ours, peer = sides["ours"]["median"], sides["peer"]
    return {
        "unit": "tokens/s",
        **sides,
        "ratio": ours / peer["median"] if peer else None,
        "limit": ceiling,
        "share_of_limit": ours / ceiling if ceiling else None,
    }


def _table(report: dict[str, Any], workload: Workload) -> str:
    peer = report["peer"]
    lines = [
        f"| tokens/s, median (min to max) | PocketLLM | {peer['name'] if peer else 'no peer'} | ratio | limit | of the limit |",
        "|---|---|---|---|---|---|",
    ]
    for key, title in _MEASURES.items():
        row = report["summary"][key]
        ratio = f"{row['ratio']:.2f}x" if row["ratio"] else "-"
        limit, share = (f"{row['limit']:,.0f}", f"{row['share_of_limit']:.0%}") if row["limit"] else ("-", "-")
        lines.append(f"| {title.format(workload)} | {_range(row['ours'])} | {_range(row['peer'])} | {ratio} | {limit} | {share} |")
    details = report["pocketllm"]["capabilities"]["details"]
    ours, limits, model = report["pocketllm"], report["limits"], report["model"]
    lines += [
        f"| peak memory, MiB | {_mib(ours['peak_rss_bytes'])} | {_mib(peer['peak_rss_bytes'] if peer else None)} | | | |",
        "",
        f"{report['hardware']['cpu']}, {report['settings']['threads']} threads, {model['file']}, {report['settings']['rounds']} alternating rounds, "
        f"commit {report['code']['commit']}. Loading took {ours['load_seconds']:.1f} s and is not counted.",
        f"PocketLLM keeps {details['weight_bytes'] / 1e6:.1f} MB of weights in memory, computing in {details['compute_dtype']}.",
        f"Limits of this run: memory reads {limits['read_bytes_per_s'] / 1e9:.1f} GB/s, a token reads {model['file_bytes_per_token'] / 1e6:.1f} MB of the file;"
        f" bf16 GEMM {limits['bf16_flops_per_s'] / 1e12:.2f} TFLOP/s, a prompt token takes {model['prefill_flops_per_token'] / 1e9:.3f} GFLOP.",
    ]
    return "\n".join(lines)


def _range(side: dict[str, float] | None) -> str:
    return "-" if side is None else f"{side['median']:.1f} ({side['min']:.1f} to {side['max']:.1f})"


def _mib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:,.0f}"


def _gguf_file(path: Path) -> Path:
    if path.is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) != 1:
        raise PeerError(f"{path} holds {len(files)} GGUF files: this benchmark gives one and the same file to both sides. Name it with --model.")
    return files[0]


def _built_peer() -> Path | None:
    path = ROOT / "build" / "llama.cpp" / "llama-bench"
    return path if path.is_file() else None


def _plain(value: Any) -> Any:
    """`value` as JSON can hold it, without the folders of this machine."""
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(entry) for entry in value]
    return value if isinstance(value, (int, float, bool, type(None))) else _without_folders(str(value))


def _without_folders(text: str) -> str:
    flag, equals, value = text.rpartition("=") if text.startswith("--") else ("", "", text)
    return flag + equals + (Path(value).name if Path(value).is_absolute() else value)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure PocketLLM, and llama.cpp beside it, on one GGUF file.")
    parser.add_argument("--model", help="GGUF file, or what --model of the CLI takes [the embedded model]")
    parser.add_argument("--peer", type=Path, metavar="PATH", help="llama-bench, with llama-batched-bench beside it [build/llama.cpp/llama-bench if built]")
    parser.add_argument("--rounds", type=positive, default=5, help="alternating rounds [5]")
    parser.add_argument("--threads", type=positive, default=physical_cores(), help="threads of each side [physical cores]")
    parser.add_argument("--seed", type=int, default=0, help="seed of the prompts [0]")
    parser.add_argument("--engine-args", type=json_object, default={}, metavar="JSON", help='more EngineArgs, such as \'{"dtype": "float32"}\'')
    parser.add_argument("--output", type=Path, help="result file [benchmarks/results/<hardware>/offline.json]")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
