"""What the sampler's terms cost: the decode rate of rows that have none, beside that of rows with every one of them.

    python benchmarks/sampler_terms.py                                   # the default model on the CPU
    python benchmarks/sampler_terms.py --shape qwen3.5-0.8b --device cuda --kinds greedy,drawn,terms

Kinds take turns in each round, so that whatever else the machine does meets all of them. `--kinds greedy,drawn` runs at commits without terms too: rows that
have none are held to what they were. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from arguments import json_object, positive
from pocketllm import LLM, EngineArgs, SamplingParams
from pocketllm.bench.hardware import describe_code, describe_gpu, describe_hardware, gpu_slug, slug
from pocketllm.bench.sides.pocketllm_side import SETTLING, rounds, steps_of_answer
from random_checkpoint import SHAPES, random_model
from sampler_terms_table import table
from tree import ROOT

KINDS = ("greedy", "drawn", "terms")
_DRAWN: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "top_p": 0.95}


def main() -> int:
    options = _parse()
    device, hardware = options.device, describe_hardware()
    model = None if options.shape is None else str(random_model(options.shape, "bf16", device, options.scratch))
    args = {"max_batch_size": options.rows, "max_model_len": 1024, "enable_prefix_caching": False, **options.engine_args}
    llm = LLM(EngineArgs(model=model, device=device, **args))
    samples: dict[str, list[dict[str, float]]] = {kind: [] for kind in options.kinds}
    chooser = random.Random(options.seed)
    try:
        vocab_size = llm.capabilities.vocab_size
        for number in range(-1, options.rounds):  # the first compiles and is left out
            for kind in options.kinds[:: 1 if number % 2 == 0 else -1]:
                sample = _measure(llm, kind, options, vocab_size, chooser)
                if number >= 0:
                    samples[kind].append(sample)
                    print(f"round {number + 1}/{options.rounds} {kind}: {sample['rate']:.1f} tokens/s", file=sys.stderr, flush=True)
        details = {key: str(value) for key, value in llm.capabilities.details.items()}
    finally:
        llm.close()
    gpu = describe_gpu() if device.startswith("cuda") else None
    report = {
        "benchmark": "sampler_terms",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/sampler_terms.py", *_asked(options)]),
        "code": describe_code() | ({"commit": options.commit} if options.commit else {}),
        "hardware": {**hardware, **({"gpu": gpu} if gpu else {})},
        "model": {"shape": options.shape, "weights": "random, bf16"} if options.shape else {"name": "the default model"},
        "plane": {"backend": args.get("backend", "auto"), "details": details},
        "rows": options.rows,
        "prompt_tokens": options.prompt,
        "samples": samples,
    }
    output = options.output or ROOT / "benchmarks" / "results" / (gpu_slug(gpu) if gpu else slug(hardware)) / "sampler_terms.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(table(report))
    print(f"Written to {output}")
    return 0


def _measure(llm: LLM, kind: str, options: argparse.Namespace, vocab_size: int, chooser: random.Random) -> dict[str, float]:
    """Tokens of all rows a second, and a second of this process's processors, while all decode, after prompts drawn afresh."""
    budget = steps_of_answer(options.rows, options.steps)
    sampling = [_sampling(kind, budget, vocab_size, row) for row in range(options.rows)]
    prompts = [chooser.choices(range(vocab_size // 20, vocab_size - vocab_size // 10), k=options.prompt) for _ in sampling]
    with ExitStack() as stack:
        streams = [stack.enter_context(llm.generate_stream(prompt, one)) for prompt, one in zip(prompts, sampling, strict=True)]
        marks = [(clock, time.process_time(), total) for clock, total in rounds(streams)][SETTLING:]
    if len(marks) < 2:
        raise SystemExit(f"an answer ended before all {options.rows} rows had been decoding for {SETTLING + 1} steps: take more --steps")
    (began, cpu_began, before), (ended, cpu_ended, after) = marks[0], marks[-1]
    return {"rate": (after - before) / (ended - began), "cpu_rate": (after - before) / (cpu_ended - cpu_began), "steps": (after - before) / options.rows}


def _sampling(kind: str, budget: int, vocab_size: int, seed: int) -> SamplingParams:
    if kind == "greedy":
        return SamplingParams(max_tokens=budget, temperature=0.0)
    if kind == "drawn":
        return SamplingParams(max_tokens=budget, seed=seed, **_DRAWN)
    chooser = random.Random(seed)
    return SamplingParams(
        max_tokens=budget,
        seed=seed,
        **_DRAWN,
        frequency_penalty=0.2,
        presence_penalty=0.2,
        repetition_penalty=1.1,
        logit_bias={token_id: chooser.uniform(-5, 5) for token_id in chooser.sample(range(vocab_size), 20)},
        min_p=0.02,
        min_tokens=budget,
        stop_token_ids=[seed],
        allowed_token_ids=list(range(seed % 2, vocab_size, 2)),
        bad_words=["apple", "a b", "the the the", "in a way"],
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure what the sampler's terms cost.")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of a shape [the default model]")
    parser.add_argument("--device", default="cpu", help="cpu or cuda [cpu]")
    parser.add_argument("--kinds", type=_kinds, default=KINDS, help="some of greedy, drawn, terms, by commas [all]")
    parser.add_argument("--rows", type=positive, default=32, help="that decode together [32]")
    parser.add_argument("--prompt", type=positive, default=128, help="tokens of each prompt [128]")
    parser.add_argument("--steps", type=positive, default=64, help="at least, in which all rows decode [64]")
    parser.add_argument("--rounds", type=positive, default=5, help="[5]")
    parser.add_argument("--engine-args", type=json_object, default={}, help="more of EngineArgs, as JSON")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts [0]")
    parser.add_argument("--scratch", type=Path, help="where random weights are written [the disk, or memory where it has the room]")
    parser.add_argument("--commit", help="that is measured, where the tree is no clone")
    parser.add_argument("--output", type=Path, help="result file [benchmarks/results/<hardware>/sampler_terms.json]")
    return parser.parse_args()


def _asked(options: argparse.Namespace) -> list[str]:
    """The arguments that say what is measured."""
    shape = [] if options.shape is None else ["--shape", options.shape]
    numbers = [word for name in ("rows", "prompt", "steps", "rounds") for word in (f"--{name}", str(getattr(options, name)))]
    more = ["--engine-args", json.dumps(options.engine_args)] if options.engine_args else []
    return [*shape, "--device", options.device, "--kinds", ",".join(options.kinds), *numbers, *more]


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if unknown := set(kinds) - set(KINDS):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))} is none of {', '.join(KINDS)}")
    return kinds


if __name__ == "__main__":
    sys.exit(main())
