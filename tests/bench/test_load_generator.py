"""The load generator against the server over the fake backend, whose schedule is known exactly."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvicorn

from pocketllm.bench.endpoint import Endpoint
from pocketllm.bench.exchange import Answer, Exchange, read_answer
from pocketllm.bench.load import ClientWatch, run_load
from pocketllm.bench.load_report import notes, point_report
from pocketllm.bench.workload import Arrivals, Ask, draw_asks, parse_goodput
from pocketllm.cli.main import main
from pocketllm.config import ServerArgs
from pocketllm.server.app import create_app
from tests.bench.virtual_clock import ScheduledBackend, VirtualTimeLoop, run_in_virtual_time
from tests.fake_serving import LETTERS, make_service


class _Server(uvicorn.Server):
    """uvicorn, which looks ten times a second whether it should end: too often where seconds are cheap."""

    async def main_loop(self) -> None:
        while not self.should_exit:
            await asyncio.sleep(10)


@contextlib.asynccontextmanager
async def serving(loop: VirtualTimeLoop, backend: ScheduledBackend) -> AsyncIterator[None]:
    """The real server over `backend`, in this event loop."""
    app = create_app(ServerArgs(keep_alive_interval=0, request_timeout=0, max_queued_requests=1024), lambda progress: make_service(backend, progress))
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/server")
        listener.listen(1024)
        loop.listener = listener
        server = _Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_keep_alive=10**9))
        running = asyncio.create_task(server.serve([listener]))
        try:
            while not server.started:
                await asyncio.sleep(1)
            await app.state.server.loaded.wait()
            yield
        finally:
            server.should_exit = True
            await running


def measure(
    asks: list[Ask],
    arrivals: Arrivals,
    period: Callable[[int], float],
    goodput: str | None = None,
    during: Callable[[VirtualTimeLoop], None] = lambda _loop: None,
    **options: Any,
) -> tuple[dict[str, Any], ScheduledBackend, list[Exchange]]:
    """A point's report, the backend with what it really did, and the exchanges."""

    async def main(loop: VirtualTimeLoop) -> tuple[dict[str, Any], ScheduledBackend, list[Exchange]]:
        backend = ScheduledBackend(loop, period, **{"alphabet": LETTERS, "context_length": 4096, "max_slots": 512, **options})
        async with serving(loop, backend):
            during(loop)
            exchanges, watch = await run_load(Endpoint("http://server", model="fake-1"), asks, arrivals, seed=1, timeout=1e9, tick=10.0, clock=loop.time)
        watch.cpu_seconds = 0.0  # the server's is in it, and the clock is not the processor's
        return point_report(exchanges, watch, parse_goodput(goodput)), backend, exchanges

    return run_in_virtual_time(main)


def truth(backend: ScheduledBackend) -> dict[str, np.ndarray[Any, Any]]:
    """Milliseconds, from the backend's own stamps."""
    first, between, each, whole = [], [], [], []
    for key, steps in backend.steps.items():
        times = [at for at, _ in steps]
        first.append(times[0] - backend.submitted[key])
        between += [(after - before) / count for before, (after, count) in zip(times, steps[1:], strict=False) for _ in range(count)]
        later = sum(count for _, count in steps[1:])
        each.append((times[-1] - times[0]) / later)
        whole.append(times[-1] - backend.submitted[key])
    return {name: np.asarray(values) * 1e3 for name, values in (("ttft_ms", first), ("itl_ms", between), ("tpot_ms", each), ("e2e_ms", whole))}


def assert_true(report: dict[str, Any], backend: ScheduledBackend) -> None:
    for name, values in truth(backend).items():
        for share in (50, 90, 95, 99):
            assert report[name][f"p{share}"] == pytest.approx(np.percentile(values, share), rel=0.02), (name, share)


# Virtual seconds: long beside the milliseconds for which the server may hold steps back, and over at once.
def uneven(number: int) -> float:
    return 1.0 + 4.0 * (number % 7 == 3) + 0.5 * (number % 3)


def test_percentiles_are_the_schedules() -> None:
    asks = draw_asks(24, "fixed", 8, 16, seed=3)
    report, backend, _ = measure(asks, Arrivals(rate=0.1), uneven)
    assert report["completed"] == 24
    assert report["errors"] == {}
    assert report["token_counts"] == "usage"
    assert report["completion_tokens"]["mean"] == 16
    assert_true(report, backend)
    assert not report["client"]["is_bottleneck"], report["client"]
    assert notes(report) == []


def test_256_streams_do_not_distort_it() -> None:
    asks = draw_asks(256, "fixed", 4, 5, seed=4)
    report, backend, exchanges = measure(asks, Arrivals(concurrency=256), uneven)
    assert report["completed"] == 256
    assert max(exchange.sent_at for exchange in exchanges) < min(exchange.ended_at for exchange in exchanges)  # all at the same time
    assert_true(report, backend)
    assert not report["client"]["is_bottleneck"], report["client"]


def test_chunks_with_several_tokens_are_spread_and_said() -> None:
    asks = draw_asks(5, "fixed", 8, 32, seed=5)
    report, backend, _ = measure(asks, Arrivals(concurrency=5), lambda _number: 4.0, tokens_per_step=4)
    assert_true(report, backend)
    assert report["itl_ms"]["p50"] == pytest.approx(1000, rel=0.02)
    assert report["event_gap_ms"]["p50"] == pytest.approx(4000, rel=0.02)
    assert report["tokens_per_event"] == 4
    assert report["spread_share"] == 1
    assert any("several tokens" in note for note in notes(report))


def test_waiting_for_a_slot_counts() -> None:
    report, backend, _ = measure(draw_asks(6, "fixed", 8, 10, seed=6), Arrivals(concurrency=6), lambda _number: 1.0, max_slots=2, goodput="ttft:5000")
    assert_true(report, backend)
    assert report["ttft_ms"]["max"] > 20_000
    assert report["goodput"] == {"limits_ms": {"ttft": 5000.0}, "requests": 2, "requests_per_s": 2 / report["seconds"], "share": 2 / 6}


def test_a_client_that_is_late_says_so() -> None:
    def block(loop: VirtualTimeLoop) -> None:
        loop.now += 1.5  # as a callback that takes so long
        loop.call_later(10, block, loop)

    report, _, _ = measure(draw_asks(3, "fixed", 8, 20, seed=7), Arrivals(concurrency=3), lambda _number: 1.0, during=block)
    assert report["client"]["is_bottleneck"]
    assert report["client"]["loop_lag_ms"]["max"] == pytest.approx(1500)
    assert any("bottleneck" in note for note in notes(report))


def test_a_client_without_a_core_says_so() -> None:
    report = point_report([], ClientWatch(seconds=10.0, cpu_seconds=9.5, lags=[0.0]), {})
    assert report["client"]["is_bottleneck"]
    assert "95% of its core" in notes(report)[0]


@pytest.mark.parametrize("api", ["chat", "completions"])
def test_the_command_in_real_time(
    api: str, fake_url: str, read_report: Callable[[Path], dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "load.json", tmp_path / "load.png"
    command = ["bench", "serve", "--url", f"{fake_url}/v1", "--api", api, "--concurrency", "1,3", "--request-rate", "inf", "--requests", "4"]
    began = time.perf_counter()
    assert main([*command, "--input-tokens", "5", "--output-tokens", "20", "--output", str(output), "--plot", str(plot)]) == 0
    seconds = time.perf_counter() - began
    report = read_report(output)
    assert [(point["load"], point["completed"], point["errors"]) for point in report["points"]] == [
        ("all at once", 4, {}),
        ("1 client", 4, {}),
        ("3 clients", 4, {}),
    ]
    assert sum(point["seconds"] for point in report["points"]) < seconds
    for point in report["points"]:
        assert point["completion_tokens"]["mean"] == 20
        assert point["e2e_ms"]["max"] >= point["ttft_ms"]["max"] > 0
    assert report["command"].startswith(f"pocketllm bench serve --url {fake_url}/v1 ")
    assert str(tmp_path) not in report["command"]
    assert "3 clients" in capsys.readouterr().out
    assert plot.read_bytes()[16:24] == struct.pack(">II", 800, 500)  # of PNG's header: width and height


def test_refusals_are_errors_by_kind(fake_url: str, read_report: Callable[[Path], dict[str, Any]], tmp_path: Path) -> None:
    output = tmp_path / "load.json"
    options = ["--warmup", "0", "--requests", "3", "--concurrency", "3", "--output", str(output)]
    assert main(["bench", "serve", "--url", fake_url, "--output-tokens", "9999", *options]) == 0
    (point,) = read_report(output)["points"]
    assert (point["completed"], point["errors"], point["ttft_ms"]) == (0, {"HTTP 400": 3}, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9/v1/models did not name a model"),
        (["--url", "ftp://here"], "\"url\" = 'ftp://here' is not a URL"),
        (["--concurrency", "1,x"], "\"concurrency\" = 'x' is not valid"),
        (["--request-rate", "-1"], "\"request_rate\" = '-1' is not valid"),
        (["--goodput", "speed:3"], "\"goodput\" = 'speed:3' is not valid"),
        (["--output", "/nowhere/load.json"], "/nowhere/load.json can't be written"),
        (["--served-model-name", "x", "--url", "http://127.0.0.1:9"], "No request to http://127.0.0.1:9 came to its end (ConnectionRefusedError)"),
    ],
)
def test_what_can_not_be_measured_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", *options]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


def body(*chunks: Any, end: bytes = b"data: [DONE]\n\n") -> Exchange:
    """An exchange that brought `chunks`, one a second, each in two parts."""
    parts = []
    for number, chunk in enumerate(chunks):
        data = chunk if isinstance(chunk, bytes) else b"data: " + json.dumps(chunk).encode() + b"\r\n\r\n"
        parts += [(number + 0.5, data[:7]), (number + 1.0, data[7:])]
    return Exchange(0.0, 0.0, 200, [*parts, (float(len(chunks)), end)])


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}, "finish_reason": more.pop("finish_reason", None)}], **more}


def test_tokens_of_a_chunk_follow_its_characters() -> None:
    usage = {"choices": [], "usage": {"completion_tokens": 10, "prompt_tokens": 3}}
    answer = read_answer(body(said("ab"), said("abcdefghijkl"), b": a comment\n\n", said("ab"), said("", finish_reason="stop"), usage))
    assert isinstance(answer, Answer)
    assert answer.events == (1.0, 2.0, 4.0)  # of their last bytes
    assert answer.tokens == (1, 7, 1)  # the tenth is the step that ended it
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (3, 10, "stop")
    uncounted = read_answer(body(said("ab"), said("abcdefghijkl", finish_reason="length")))
    assert isinstance(uncounted, Answer)
    assert (uncounted.tokens, uncounted.is_counted) == ((1, 1), False)


@pytest.mark.parametrize(
    ("exchange", "reason"),
    [
        (Exchange(0.0, status=503), "HTTP 503"),
        (Exchange(0.0, failure="timed out"), "timed out"),
        (body(said("a"), end=b""), "the stream broke off"),
        (body({"error": {"message": "gone"}}), "an error event in the stream"),
        (body(b"data: {\n\n"), "an event that is no JSON"),
        (body([1]), "an event that is no JSON object"),
        (body({"choices": [1]}), "a choice that is no JSON object"),
        (body({"choices": [{"delta": "x"}]}), "a choice that is no JSON object"),
        (body({"choices": 5}), "an event of another form"),
        (body({"choices": [], "usage": [1]}), "an event of another form"),
        (body(said("", finish_reason="stop")), "no text"),
    ],
)
def test_what_is_no_answer_says_why(exchange: Exchange, reason: str) -> None:
    assert read_answer(exchange) == reason
