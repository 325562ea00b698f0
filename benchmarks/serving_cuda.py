"""Serving on a GPU: concurrent streams over HTTP against the offline rate of the same checkpoint, and the time between tokens.

    python benchmarks/serving_cuda.py --shape qwen3.5-9b --out DIR [--streams 64] [--prompt 512] [--answer 128] [--samples 2] [--waves 2]

`pocketllm serve` is a process of its own; so is the offline measure, before it. What is measured is on the disk when the next load begins. See
benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import random
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from arguments import json_object, positive
from load_generator import LoadError
from pocketllm.bench.endpoint import Endpoint
from pocketllm.bench.exchange import Answer, read_answer
from pocketllm.bench.hardware import describe_code, describe_gpu, describe_hardware
from pocketllm.bench.load import run_client, run_load
from pocketllm.bench.workload import Arrivals, Ask
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from serving_cuda_table import table
from serving_process import ServingProcess
from tree import ROOT


class Report:
    """What is known so far, in a file that is written anew with each part: a run that is cut short leaves it behind.

    Args:
        options: of the run.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._path: Path = options.out / "serving_cuda.json"
        self._began = time.perf_counter()
        self._facts: dict[str, Any] = {
            "benchmark": "serving_cuda",
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": shlex.join(["python", "benchmarks/serving_cuda.py", *_sizes(options)]),
            "code": describe_code() | ({"commit": options.commit} if options.commit else {}),
            "engine_args": _engine_args(options),
            "is_complete": False,
            "at_s": {},  # when each part had ended
        }

    def add(self, part: str, **facts: Any) -> None:
        """`part` has ended, with `facts` for the top level of the report."""
        seconds = self._facts["at_s"][part] = round(time.perf_counter() - self._began, 1)
        self._facts |= facts
        self._path.write_text(json.dumps(self._facts, indent=1) + "\n", encoding="utf-8")
        print(f"{seconds:6.1f} s: {part}", flush=True)


def main() -> int:
    options = _parse(sys.argv[1:])
    if options.offline:
        print(json.dumps(_offline(options)))
        return 0
    options.out.mkdir(parents=True, exist_ok=True)
    report = Report(options)
    options.model, gpu = _model_and_gpu(options)
    report.add("checkpoint", model=options.model.name, hardware={**describe_hardware(), "gpu": gpu})
    try:
        offline = _offline_process(options)
        report.add("offline", offline=offline)
        print(f"          {_short(offline)}", flush=True)
        served = _served(options, report)
    except LoadError as error:
        print(f"serving_cuda: {error}", file=sys.stderr)
        return 2
    report.add("end", is_complete=True)
    print("\n" + table(options.streams, options.prompt, options.answer, offline, served))
    print(f"\nWritten to {options.out / 'serving_cuda.json'}")
    return 0


def _model_and_gpu(options: argparse.Namespace) -> tuple[Path, dict[str, Any] | None]:
    """The checkpoint, written if need be, and the GPU's description, by a process of its own, which leaves nothing on the GPU."""
    from random_checkpoint import random_model

    with multiprocessing.get_context("spawn").Pool(1) as pool:
        model = options.model or pool.apply(random_model, (options.shape, "bf16", options.device, options.scratch))
        return model, pool.apply(describe_gpu)


def _engine_args(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "device": options.device,
        "max_batch_size": options.streams,
        "max_model_len": options.prompt + options.answer + 32,
        **options.engine_args,
    }


def _prompts(options: argparse.Namespace, count: int, seed: int) -> list[list[int]]:
    size = open_checkpoint(options.model).config["vocab_size"]
    chooser = random.Random(f"{options.seed} {seed}")
    return [chooser.choices(range(size // 20, size - size // 10), k=options.prompt) for _ in range(count)]


def _offline(options: argparse.Namespace) -> dict[str, Any]:
    """Generated tokens a second of whole calls of LLM.generate: one batch, and as many prompts as the longer load has."""
    from pocketllm import LLM, SamplingParams

    rates: dict[str, Any] = {}
    with LLM(EngineArgs(model=str(options.model), **_engine_args(options))) as llm:

        def rate(count: int, budget: int, seed: int) -> float:
            prompts = _prompts(options, count, seed)
            start = time.perf_counter()
            outputs = llm.generate(prompts, SamplingParams(max_tokens=budget, temperature=0.0))
            seconds = time.perf_counter() - start
            assert all(len(output.token_ids) == budget for output in outputs), "an answer ended early"
            return count * budget / seconds

        rate(options.streams, options.answer, 0)  # warms up
        rates["burst_samples"] = [rate(options.streams, options.answer, 1 + number) for number in range(options.samples)]
        rates["burst"] = statistics.median(rates["burst_samples"])
        if options.waves:
            rates["waves"] = rate(options.streams * options.waves, options.answer, 50)
    return rates


def _offline_process(options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:], "--model", str(options.model), "--offline"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=options.patience)
    if done.returncode:
        raise LoadError(f"the offline measure ended with {done.returncode}")
    rates: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return rates


def _served(options: argparse.Namespace, report: Report) -> dict[str, Any]:
    command = [sys.executable, "-m", "pocketllm", "serve", "--model", str(options.model), "--port", "0", *_flags(_engine_args(options))]
    server = ServingProcess(command, patience=options.patience)
    served: dict[str, Any] = {}
    try:

        def load(name: str, count: int, seed: int) -> None:
            cpu = server.cpu_seconds()
            answers = _answers(server.url, _prompts(options, count, seed), options)
            served[name] = {**_summary(answers), "server_cpu_s": server.cpu_seconds() - cpu}
            report.add(f"served: {name}", served=served)
            print(f"          {_short(served[name])}", flush=True)

        report.add("server is ready")
        load("warm-up", options.streams, 100)
        for number in range(options.samples):
            load(f"burst {number + 1}", options.streams, 101 + number)
        if options.waves:
            load("waves", options.streams * options.waves, 150)
    finally:
        server.close()
    return served


def _answers(url: str, prompts: Sequence[list[int]], options: argparse.Namespace) -> list[Answer]:
    """What came back for each prompt. Raises LoadError where one did not end well."""
    asks = [Ask(prompt, len(prompt), options.answer) for prompt in prompts]
    exchanges, _ = run_client(run_load(Endpoint(url, "completions"), asks, Arrivals(concurrency=options.streams), timeout=options.patience))
    answers = []
    for exchange in exchanges:
        answer = read_answer(exchange)
        if isinstance(answer, str):
            raise LoadError(f"a request ended with: {answer}")
        answers.append(answer)
    return answers


def _summary(answers: Sequence[Answer]) -> dict[str, float]:
    tokens, events = sum(answer.completion_tokens or 0 for answer in answers), sum(len(answer.events) for answer in answers)
    seconds = max(answer.ended_at for answer in answers) - min(answer.sent_at for answer in answers)
    first = sorted(answer.events[0] - answer.sent_at for answer in answers)
    gaps = sorted(after - before for answer in answers for before, after in pairwise(answer.events))
    return {
        "tokens_per_s": tokens / seconds,
        "tokens": float(tokens),
        "tokens_per_event": tokens / events,
        "first_token_p50_ms": 1e3 * _quantile(first, 0.5),
        "first_token_p99_ms": 1e3 * _quantile(first, 0.99),
        "inter_token_p50_ms": 1e3 * _quantile(gaps, 0.5),
        "inter_token_p90_ms": 1e3 * _quantile(gaps, 0.9),
        "inter_token_p99_ms": 1e3 * _quantile(gaps, 0.99),
        "inter_token_max_ms": 1e3 * gaps[-1],
    }


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def _flags(values: dict[str, Any]) -> list[str]:
    names = {field.name for field in fields(EngineArgs)}
    flags: list[str] = []
    for name, value in values.items():
        if name not in names:
            raise LoadError(f"{name!r} is not an option of EngineArgs")
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _sizes(options: argparse.Namespace) -> list[str]:
    source = ["--shape", options.shape] if options.model is None else ["--model", options.model.name]
    return source + [word for name in ("streams", "prompt", "answer", "samples", "waves") for word in (f"--{name}", str(getattr(options, name)))]


def _short(facts: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:,.4g}" for key, value in facts.items() if isinstance(value, float))


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure `pocketllm serve` on a GPU against the offline rate of the same checkpoint.")
    parser.add_argument("--shape", default="qwen3.5-9b", help="of the random checkpoint, as random_checkpoint.py knows it [qwen3.5-9b]")
    parser.add_argument("--model", type=Path, help="checkpoint without EOS to measure in its place")
    parser.add_argument("--scratch", type=Path, help="where the random checkpoint is written and looked for [/dev/shm if it has the room, else the disk]")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu only tries the program [cuda]")
    parser.add_argument("--streams", type=positive, default=64, help="concurrent requests [64]")
    parser.add_argument("--prompt", type=positive, default=512, help="tokens of each prompt [512]")
    parser.add_argument("--answer", type=positive, default=128, help="tokens of each answer [128]")
    parser.add_argument("--samples", type=positive, default=2, help="bursts, on each side [2]")
    parser.add_argument("--waves", type=int, default=2, help="requests a stream of the longer load, on each side; 0 leaves it out [2]")
    parser.add_argument("--tiny", action="store_true", help="a small load that only tries the program, whatever else is said of its sizes")
    parser.add_argument("--patience", type=float, default=240, help="seconds that each part may take [240]")
    parser.add_argument("--engine-args", type=json_object, default={}, metavar="JSON", help="more EngineArgs, of both sides")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts [0]")
    parser.add_argument("--commit", help="of this tree, where it is no git checkout")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "serving_cuda", help="directory of the result [build/serving_cuda]")
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.waves < 0:
        parser.error(f"argument --waves: {options.waves} is below 0")
    if options.tiny:
        options.streams, options.prompt, options.answer, options.samples, options.waves = 3, 24, 8, 2, 2
    return options


if __name__ == "__main__":
    sys.exit(main())
