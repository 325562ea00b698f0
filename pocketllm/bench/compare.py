"""`pocketllm bench compare`: the same checkpoint on PocketLLM and on its peers, in alternating rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from pocketllm.bench.args import CompareBenchArgs, command_line
from pocketllm.bench.hardware import describe_gpu
from pocketllm.bench.limits import best_of, decode_ceiling, measure_limits, prefill_ceiling, token_costs
from pocketllm.bench.offline import SLACK, Progress, engine_options, limit_lines, memory, model_facts, open_model, span
from pocketllm.bench.report import new_report, table
from pocketllm.bench.sides.base import Spec
from pocketllm.bench.sides.process import SideProcess
from pocketllm.bench.sides.select import check_peer, installed_peers
from pocketllm.bench.spread import spread
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError

OURS = "pocketllm"
_BATCH = (128, 64)  # tokens of the prompt and of the answer of each request of a batch


def measure_comparison(args: CompareBenchArgs, engine: EngineArgs, peers: Sequence[str], progress: Progress) -> dict[str, Any]:
    """The report of all sides.

    Args:
        args: what is measured.
        engine: PocketLLM's options; the peers get the model, the device and the threads.
        peers: as `select.load_side` takes them; none means all that are installed. Without one PocketLLM is measured alone.
        progress: told of each round.

    Raises:
        ConfigurationError: a peer is not installed, or can't read the checkpoint.
        PocketLLMError: a side can't be loaded, or fails.
    """
    path, checkpoint, device, threads = open_model(engine, args.threads)
    names = list(dict.fromkeys(peers)) or installed_peers(path)
    for peer in names:
        check_peer(peer, path)
    context = max(args.input_tokens + 1, args.context + args.output_tokens, sum(_BATCH)) + args.batch + SLACK
    spec = Spec(path, device, threads, context, args.batch, args.seed)
    measures = _measures(args)
    wanted = {OURS: OURS, **{label(peer): peer for peer in names}}
    if len(wanted) <= len(names):
        raise ConfigurationError('"peer" names one side twice: send each peer once, and one llama-bench at most.', param="peer")
    limits = [measure_limits(device, threads)]
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    sides: dict[str, SideProcess] = {}
    total = len(samples) * (2 + args.rounds)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        progress("load, warm up and measure", done, total)

    with ExitStack() as stack:
        for name in samples:
            its = dataclasses.replace(spec, options=engine_options(engine)) if name == OURS else spec
            its = dataclasses.replace(its, model=name) if name.startswith(("http://", "https://")) else its
            sides[name] = stack.enter_context(SideProcess(wanted[name], its))
            advance()
        facts = {name: side.facts() for name, side in sides.items()}
        for name, side in sides.items():
            _round(side, measures, facts[name])  # compiles, fills caches, and is not counted
            advance()
        for number in range(args.rounds):
            for name in list(samples)[:: 1 if number % 2 == 0 else -1]:
                samples[name].append(_round(sides[name], measures, facts[name]))
                advance()
        facts = {name: side.facts() for name, side in sides.items()}
    limits.append(measure_limits(device, threads))
    best, costs = best_of(limits), token_costs(checkpoint)
    ceilings = {"prefill": prefill_ceiling(best, costs), "decode": decode_ceiling(best, costs)}
    words = [word for peer in names for word in ("--peer", peer)]
    settings = {key: value for key, value in dataclasses.asdict(args).items() if key not in ("output", "plot")}
    return {
        **new_report("compare", command_line("compare", engine, args, more=words), settings),
        "gpu": describe_gpu() if device != "cpu" else None,
        "threads": threads,
        "model": model_facts(checkpoint),
        "limits": best,
        "measures": {name: {"what": what, "sizes": sizes} for name, (what, *sizes) in measures.items()},
        "sides": facts,
        "samples": samples,
        "summary": {name: _summary(name, samples, ceilings.get(what)) for name, (what, *_) in measures.items()},
    }


def comparison_table(report: dict[str, Any]) -> str:
    """Markdown: a row a measure, medians with the smallest and the largest sample, and each peer's ratio."""
    peers = [name for name in report["sides"] if name != OURS]
    rows = []
    for name, row in report["summary"].items():
        cells = [name, span(row["sides"][OURS])]
        for peer in peers:
            found = row["sides"][peer]
            ratio = row["ratios"].get(peer)
            cells += ["-", "-"] if found is None else [span(found), f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f})"]
        limit = row["limit"]
        cells += ["-", "-"] if limit is None else [f"{limit:,.0f}", f"{row['share_of_limit']:.0%}"]
        rows.append(cells)
    head = ["tokens/s", "PocketLLM", *[cell for peer in peers for cell in (peer, "ratio")], "limit", "of it"]
    peaks = [f"{'PocketLLM' if name == OURS else name} {memory(facts)}" for name, facts in report["sides"].items() if facts.get("peak_rss_bytes")]
    rounds = f"Medians (smallest to largest) of {report['settings']['rounds']} alternating rounds; a ratio is PocketLLM's rate over the peer's, by round."
    lines = [table(head, rows), "", rounds]
    own = [_own_counters(name, facts["own_tokens_per_s"]) for name, facts in report["sides"].items() if facts.get("own_tokens_per_s")]
    return "\n".join([*lines, *own, *limit_lines(report), f"Peak memory: {'; '.join(peaks)}."])


def _own_counters(side: str, rates: dict[str, float]) -> str:
    return f"By its own counters {side} made its last samples at {', '.join(f'{rate:,.1f} tokens/s ({measure})' for measure, rate in rates.items())}."


def label(peer: str) -> str:
    """Of a peer: what its figures stand under."""
    return "llama.cpp" if peer.endswith("llama-bench") else peer


def _measures(args: CompareBenchArgs) -> dict[str, tuple[Any, ...]]:
    found: dict[str, tuple[Any, ...]] = {
        f"prefill {args.input_tokens}": ("prefill", 1, args.input_tokens),
        f"decode {args.output_tokens}": ("decode", 1, args.context, args.output_tokens),
    }
    if args.batch > 1:
        found[f"batch {args.batch} ({_BATCH[0]} + {_BATCH[1]})"] = ("whole", args.batch, *_BATCH)
    return found


def _round(side: SideProcess, measures: dict[str, tuple[Any, ...]], facts: dict[str, Any]) -> dict[str, float]:
    """A sample of each measure, in tokens a second; of a side that takes one row at a time, none of a batch."""
    return {name: side.measure(what, *sizes).rate for name, (what, *sizes) in measures.items() if sizes[0] == 1 or facts["is_batching"]}


def _summary(name: str, samples: dict[str, list[dict[str, float]]], limit: float | None) -> dict[str, Any]:
    rates = {side: [row[name] for row in rows if name in row] for side, rows in samples.items()}
    ours = rates[OURS]
    ratios = {side: spread([mine / theirs for mine, theirs in zip(ours, values, strict=True)]) for side, values in rates.items() if side != OURS and values}
    return {
        "unit": "tokens/s",
        "sides": {side: spread(values) if values else None for side, values in rates.items()},
        "ratios": ratios,
        "limit": limit,
        "share_of_limit": spread(ours)["median"] / limit if limit else None,
    }
