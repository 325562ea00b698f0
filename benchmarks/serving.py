"""What the HTTP front end costs: tokens that one core streams, and the delay of the first one, side by side with a bare SSE loop.

    python benchmarks/serving.py [--rounds 5] [--seconds 4]

No model runs: both servers answer at a set rate. Rounds alternate between the two. See benchmarks/README.md.
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

import psutil

from arguments import positive
from load_generator import Load, LoadError, LoadGenerator
from pocketllm.bench.hardware import describe_code, describe_hardware, package_version, slug
from serving_process import ServingProcess
from serving_table import BUSY, SIDES, table
from tree import ROOT

_LOADS = (Load(1, 1000, 50), Load(8, 100, 20), Load(64, 100, 50), Load(64, 320, 320), Load(64, 500, 500), Load(64, 1000, 1000))
_PACKAGES = ("uvicorn", "starlette", "h11", "httptools", "uvloop")


def main() -> int:
    try:
        return _run(_parse(sys.argv[1:]))
    except LoadError as error:
        print(f"serving: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    cores = psutil.Process().cpu_affinity()
    if len(cores) < 2:
        raise LoadError("this process may use one core only: the server and the clients need one each")
    server_core, client_core = cores[0], cores[-1]
    load_before = psutil.getloadavg()  # of other programs, which a machine that measures should not run
    psutil.Process().cpu_affinity([client_core])
    loads = [load for load in _LOADS if not options.load or load.name in options.load]
    servers: dict[tuple[str, int], ServingProcess] = {}
    samples: list[dict[str, Any]] = []
    try:
        for rate in sorted({load.rate for load in loads}):
            for side in SIDES:
                servers[side, rate] = ServingProcess(_command(side, rate), server_core)
        for number in range(options.rounds):
            for load in loads:
                for side in SIDES if number % 2 == 0 else SIDES[::-1]:
                    sample = _measure(servers[side, load.rate], load, options, seed=number)
                    samples.append({"round": number + 1, "load": load.name, "side": side, **sample})
                    print(f"round {number + 1}/{options.rounds} {load.name} {side}: {_line(sample)}", file=sys.stderr)
    finally:
        for server in servers.values():
            server.close()
    report: dict[str, Any] = {
        "benchmark": "serving",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/serving.py", *sys.argv[1:]]),
        "code": describe_code() | {name: package_version(name) for name in _PACKAGES},
        "hardware": describe_hardware(),
        "load_average": {"before": load_before, "after": psutil.getloadavg()},
        "settings": {"rounds": options.rounds, "seconds": options.seconds, "warm_up": options.warm_up, "server_core": server_core, "client_core": client_core},
        "samples": samples,
        "summary": {load.name: _summary(load, samples) for load in loads},
    }
    output = options.output or ROOT / "benchmarks" / "results" / slug(report["hardware"]) / "serving.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(report, indent=2) + "\n")
    print(table(report))
    print(f"\nWritten to {output}")
    return 0


def _command(side: str, rate: int) -> list[str]:
    if side == "bare":
        return [sys.executable, str(ROOT / "benchmarks" / "sse_limit.py"), "--tokens-per-second", str(rate)]
    fake = {"tokens_per_second": rate, "max_slots": max(load.streams for load in _LOADS), "context_length": 4096}
    return [sys.executable, str(ROOT / "tests" / "server" / "fake_server.py"), json.dumps({"server": {"port": 0}, "fake": fake})]


def _measure(server: ServingProcess, load: Load, options: argparse.Namespace, seed: int) -> dict[str, Any]:
    clients = LoadGenerator(server.url, load, seed)
    clients.start(options.warm_up)
    cpu = server.cpu_seconds()
    traffic = clients.measure(options.seconds)
    cpu = server.cpu_seconds() - cpu
    clients.drain()
    time.sleep(0.1)
    if not traffic.tokens or not traffic.first_token:
        raise LoadError(f"nothing was streamed in {traffic.seconds:.1f} s at {load.name}")
    ordered = sorted(traffic.first_token)
    return {
        "tokens_per_s": traffic.tokens / traffic.seconds,
        "tokens_per_event": traffic.tokens / traffic.events,
        "requests": len(ordered),
        "first_token_p50_ms": statistics.median(ordered) * 1e3,
        "first_token_p99_ms": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] * 1e3,
        "server_cpu_us_per_token": cpu / traffic.tokens * 1e6,
        "server_cpu_share": cpu / traffic.seconds,
        "client_cpu_share": traffic.client_cpu / traffic.seconds,
    }


def _summary(load: Load, samples: list[dict[str, Any]]) -> dict[str, Any]:
    rows = {side: [one for one in samples if one["side"] == side and one["load"] == load.name] for side in SIDES}
    keys = ("tokens_per_s", "tokens_per_event", "first_token_p50_ms", "first_token_p99_ms", "server_cpu_us_per_token", "server_cpu_share", "client_cpu_share")
    added = [ours["first_token_p50_ms"] - bare["first_token_p50_ms"] for ours, bare in zip(rows["pocketllm"], rows["bare"], strict=True)]
    return {
        "streams": load.streams,
        "tokens_per_s_a_stream": load.rate,
        "offered_tokens_per_s": load.offered,
        **{side: {key: _spread([one[key] for one in rows[side]]) for key in keys} for side in SIDES},
        "added_first_token_p50_ms": _spread(added),
        "client_may_limit": [side for side in SIDES if any(one["client_cpu_share"] > BUSY for one in rows[side])],
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def _line(sample: dict[str, Any]) -> str:
    return (
        f"{sample['tokens_per_s']:,.0f} tokens/s, {sample['tokens_per_event']:.1f} an event, {sample['server_cpu_us_per_token']:.1f} us/token, "
        f"first token {sample['first_token_p50_ms']:.2f} ms (p99 {sample['first_token_p99_ms']:.2f}), "
        f"CPU server {sample['server_cpu_share']:.0%} client {sample['client_cpu_share']:.0%}"
    )


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure the HTTP front end over the fake backend, and a bare SSE loop beside it.")
    parser.add_argument("--rounds", type=positive, default=5, help="alternating rounds [5]")
    parser.add_argument("--seconds", type=float, default=4.0, help="measured time of each sample [4]")
    parser.add_argument("--warm-up", type=float, default=1.0, help="time under load before it [1]")
    parser.add_argument("--load", action="append", choices=[load.name for load in _LOADS], help="streams x tokens/s, may be repeated [all]")
    parser.add_argument("--output", type=Path, help="result file [benchmarks/results/<hardware>/serving.json]")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
