"""The load generator held to a known schedule in real time: a server over the fake backend notes when it made each token, on a core of its own.

    python benchmarks/load_schedule.py [--case 256x5] [--case 256x40] [--seconds 12]

What `pocketllm bench serve` reports of it stands beside the truth. See benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from pocketllm.backends.base import EngineRequest, StepCallback, StepOutput
from pocketllm.backends.fake import FakeBackend
from pocketllm.bench.endpoint import Endpoint
from pocketllm.bench.hardware import describe_code, describe_hardware, slug
from pocketllm.bench.load import run_client, run_load
from pocketllm.bench.load_report import point_report
from pocketllm.bench.spread import PERCENTILES
from pocketllm.bench.workload import Arrivals, draw_asks
from tree import ROOT

_FIGURES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


class StampedBackend(FakeBackend):
    """The fake backend, with the clock at each request's submission and at each of its steps, in seconds of this machine's monotonic clock."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.stamps: dict[str, list[float]] = {}

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        stamps = self.stamps[request.request_id] = [time.perf_counter()]

        def stamped(step: StepOutput) -> None:
            stamps.extend([time.perf_counter()] * len(step.token_ids))
            on_step(step)

        super().submit(request, stamped)


def main() -> int:
    options = _parse()
    if options.serve is not None:
        return _serve(options.serve, options.stamps)
    from load_generator import LoadError

    try:
        return _run(options)
    except LoadError as error:
        print(f"load_schedule: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    cores = psutil.Process().cpu_affinity()
    load_before = psutil.getloadavg()
    psutil.Process().cpu_affinity([cores[-1]])
    cases = [_case(name, options.seconds, cores[0]) for name in options.case or ("256x5", "256x40")]
    report: dict[str, Any] = {
        "benchmark": "load_generator",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/load_schedule.py", *sys.argv[1:]]),
        "code": describe_code(),
        "hardware": describe_hardware(),
        "load_average": {"before": load_before, "after": psutil.getloadavg()},
        "settings": {"seconds": options.seconds, "ramp_seconds": options.seconds / 3, "server_core": cores[0], "client_core": cores[-1]},
        "cases": cases,
    }
    for case in cases:
        print(f"{case['name']}: client {case['client']['cpu_share']:.0%} of its core, bottleneck: {case['is_bottleneck']}")
        for name, found in case["figures"].items():
            print(f"  {name}: " + ", ".join(f"{share} {found['reported'][share]:.2f} of {found['true'][share]:.2f}" for share in found["true"]))
    output = options.output or ROOT / "benchmarks" / "results" / slug(report["hardware"]) / "load_generator.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"Written to {output}")
    return 0


def _case(name: str, seconds: float, server_core: int) -> dict[str, Any]:
    """What was reported of so many streams of so many tokens a second each, and what was true.

    Streams begin within the first third of `seconds`, as a Poisson process, and each lasts two thirds of it: for a third all of them are under way.
    A burst would measure how the server queues it, which is no part of the schedule.
    """
    from serving_process import ServingProcess

    streams, rate = map(int, name.split("x"))
    tokens = max(3, round(rate * seconds * 2 / 3))
    with tempfile.TemporaryDirectory() as folder:
        stamps = Path(folder) / "stamps.json"
        server = ServingProcess([sys.executable, str(Path(__file__).resolve()), "--serve", str(rate), "--stamps", str(stamps)], server_core)
        try:
            load = run_load(Endpoint(server.url), draw_asks(streams, "fixed", 16, tokens, seed=1), Arrivals(rate=streams * 3 / seconds))
            exchanges, watch = run_client(load)
        finally:
            server.close()
        rows: list[list[float]] = list(json.loads(stamps.read_text(encoding="utf-8")).values())
    report = point_report(exchanges, watch, {})
    truth = {
        "ttft_ms": [row[1] - row[0] for row in rows],
        "tpot_ms": [(row[-1] - row[1]) / (len(row) - 2) for row in rows],
        "itl_ms": [after - before for row in rows for before, after in pairwise(row[1:])],
        "e2e_ms": [row[-1] - row[0] for row in rows],
    }
    figures = {}
    for figure in _FIGURES:
        true = {f"p{share}": float(np.percentile(truth[figure], share)) * 1e3 for share in PERCENTILES}
        reported = {share: report[figure][share] for share in true}
        figures[figure] = {"true": true, "reported": reported, "error": {share: reported[share] / true[share] - 1 for share in true}}
    facts = {key: report[key] for key in ("completed", "errors", "output_tokens_per_s", "tokens_per_event", "spread_share", "client")}
    return {"name": f"{streams} streams of {rate} tokens/s", **facts, "is_bottleneck": report["client"]["is_bottleneck"], "figures": figures}


def _serve(rate: int, stamps: Path) -> int:
    sys.path.insert(0, str(ROOT))
    from pocketllm.config import ServerArgs
    from pocketllm.server.run import serve
    from tests.fake_serving import LETTERS, make_service

    backend = StampedBackend(alphabet=LETTERS, tokens_per_second=rate, max_slots=1024, context_length=4096)
    code = serve(ServerArgs(port=0, max_queued_requests=2048), lambda progress: make_service(backend, progress))
    stamps.write_text(json.dumps(backend.stamps), encoding="utf-8")
    return code


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Hold the load generator to a known schedule.")
    parser.add_argument("--case", action="append", metavar="STREAMSxRATE", help="streams, and tokens a second of each; may be repeated [256x5 and 256x40]")
    parser.add_argument("--seconds", type=float, default=12.0, help="of a case [12]")
    parser.add_argument("--output", type=Path, help="result file [benchmarks/results/<hardware>/load_generator.json]")
    parser.add_argument("--serve", type=int, metavar="RATE", help=argparse.SUPPRESS)
    parser.add_argument("--stamps", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
