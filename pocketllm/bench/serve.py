"""`pocketllm bench serve`: a server under load, point by point."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from pocketllm.bench.args import ServeBenchArgs, command_line
from pocketllm.bench.endpoint import Endpoint, first_model
from pocketllm.bench.load import run_client, run_load
from pocketllm.bench.load_report import notes, point_report
from pocketllm.bench.report import new_report, table
from pocketllm.bench.workload import Arrivals, draw_asks, parse_arrivals, parse_goodput
from pocketllm.errors import BackendUnavailableError

Progress = Callable[[str, int, int], None]  # what runs, how much of it is done, how much there is


def measure_serving(args: ServeBenchArgs, progress: Progress) -> dict[str, Any]:
    """The report of all load points.

    Raises:
        BackendUnavailableError: the server can't be reached, or no request of the warm-up came to its end.
    """
    model = args.served_model_name or first_model(args.url, args.api_key)
    endpoint = Endpoint(args.url, args.api, model, args.api_key, args.extra_body)
    goodput = parse_goodput(args.goodput)
    points = []
    if args.warmup:
        warm = _point(endpoint, args, Arrivals(concurrency=min(args.warmup, 8)), args.warmup, -1, goodput, lambda done: progress("warm-up", done, args.warmup))
        if not warm["completed"]:
            causes = ", ".join(warm["errors"])
            raise BackendUnavailableError(f"No request to {args.url} came to its end ({causes}): check --url, --api, --served-model-name and --extra-body.")
    for number, arrivals in enumerate(parse_arrivals(args.request_rate, args.concurrency)):
        point = _point(endpoint, args, arrivals, args.requests, number, goodput, lambda done, name=arrivals.name: progress(name, done, args.requests))  # type: ignore[misc]
        rate = None if arrivals.rate is None else str(arrivals.rate) if arrivals.rate == float("inf") else arrivals.rate
        points.append({"load": arrivals.name, "request_rate": rate, "concurrency": arrivals.concurrency, **point})
    settings = {key: value for key, value in dataclasses.asdict(args).items() if key not in ("api_key", "output", "plot")}
    return {**new_report("serve", command_line("serve", args), settings), "model": model, "points": points}


def serving_table(report: dict[str, Any]) -> str:
    """Markdown: a row a load point, then what a reader has to know of them."""
    head = ("load", "completed", "output tok/s", "TTFT p50, ms", "p99", "TPOT p50, ms", "p99", "ITL p50, ms", "p99", "E2E p50, ms", "p99", "good req/s")
    rows, said = [], []
    for point in report["points"]:
        cells = [point["load"], f"{point['completed']}/{point['requests']}", f"{point['output_tokens_per_s']:,.1f}"]
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            cells += [_digits(point[name], share) for share in ("p50", "p99")]
        good = point["goodput"]
        rows.append((*cells, "-" if good is None else f"{good['requests_per_s']:.2f} ({good['share']:.0%})"))
        said += [f"{point['load']}: {note}." for note in notes(point)]
    return "\n".join([table(head, rows), *(["", *said] if said else [])])


def _point(
    endpoint: Endpoint, args: ServeBenchArgs, arrivals: Arrivals, count: int, number: int, goodput: dict[str, float], on_done: Callable[[int], None]
) -> dict[str, Any]:
    asks = draw_asks(count, args.lengths, args.input_tokens, args.output_tokens, seed=args.seed * 1000 + number + 1)
    done = 0

    def count_one() -> None:
        nonlocal done
        done += 1
        on_done(done)

    load = run_load(endpoint, asks, arrivals, seed=args.seed * 1000 + number + 1, timeout=args.timeout, on_end=count_one)
    exchanges, watch = run_client(load)
    return point_report(exchanges, watch, goodput)


def _digits(found: dict[str, float] | None, share: str) -> str:
    return "-" if found is None else f"{found[share]:,.1f}" if found[share] < 1000 else f"{found[share]:,.0f}"
