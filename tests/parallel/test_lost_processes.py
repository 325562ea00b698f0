"""What `pocketllm serve` over two ranks does when a process of it is killed, asked to stop, or late: clients hear of it, and nothing stays."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server_process import ROOT, ServerProcess, gauge, serve, wait_until_ready

MODEL = ROOT / "tests/models/tiny_qwen3_5_trained"
WITHIN = 10.0  # seconds until clients know
ENDED_WITHIN = 40.0  # seconds until everything has ended: 5 for farewells, and what a busy machine takes
DIGITS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "minItems": 40}
ROWS = {"type": "array", "items": DIGITS, "minItems": 40}
NATIVE = pytest.mark.skipif(importlib.util.find_spec("pocketllm_cpp") is None, reason="the native module is not built: build it with scripts/build_native.sh")
PLANES = ["torch", pytest.param("cpp", marks=NATIVE)]
# An answer that goes on for a long time.
STORY = {
    "messages": [{"role": "user", "content": "12+7="}],
    "max_tokens": 3500,
    "stream": True,
    "response_format": {
        "type": "json_schema",
        "json_schema": {"name": "rows", "schema": {"type": "object", "properties": {"rows": ROWS}, "required": ["rows"], "additionalProperties": False}},
    },
}


class Group:
    """A supervisor and its two ranks.

    Args:
        parent: the rendezvous directory.
        options: further flags.
        plane: the backend.
    """

    def __init__(self, parent: Path, *options: Any, plane: str = "torch") -> None:
        self.parent = parent
        shared = ("--model", MODEL, "--backend", plane, "--device", "cpu", "--tensor-parallel-size", 2, "--tensor-parallel-rendezvous-dir", parent)
        self.server = serve(*shared, *options)
        self.pids: dict[str, int] = {"supervisor": self.server.process.pid}

    def find_ranks(self) -> None:
        """Learn the ranks' process ids, as soon as they are there."""
        end = time.monotonic() + 60
        while len(self.pids) < 3:
            assert time.monotonic() < end
            for child in psutil.Process(self.pids["supervisor"]).children():
                try:
                    self.pids[f"rank {child.environ()['TP_RANK']}"] = child.pid
                except (KeyError, psutil.Error):
                    continue  # it is between fork and exec
            time.sleep(0.01)

    def send(self, who: str, number: signal.Signals) -> None:
        os.kill(self.pids[who], number)

    def end(self) -> int:
        """Wait for the end of all; the supervisor's exit code. Checks what is left."""
        began = time.monotonic()
        code = self.server.end(ENDED_WITHIN)
        processes = [pid for name, pid in self.pids.items() if name != "supervisor"]
        while any(is_running(pid) for pid in processes) or list(self.parent.iterdir()):
            assert time.monotonic() - began < ENDED_WITHIN, [pid for pid in processes if is_running(pid)]
            time.sleep(0.02)
        assert self.parent.is_dir()
        return code

    def error(self) -> str:
        """The supervisor's one line."""
        (line,) = [line for line in self.server.lines if line.startswith("pocketllm: error: ")]
        return line


def is_running(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Group]]:
    groups: list[Group] = []

    def begin(*options: Any, plane: str = "torch") -> Group:
        parent = tmp_path / "rendezvous"
        parent.mkdir()
        groups.append(Group(parent, *options, plane=plane))
        return groups[-1]

    yield begin
    for group in groups:
        for pid in group.pids.values():
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
        group.server.kill()


class Reader:
    """A client in the middle of a stream."""

    def __init__(self, url: str) -> None:
        self.events: list[str] = []
        self.broke = False
        self.began = threading.Event()
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=STORY, timeout=60) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        if len(self.events) > 3:
                            self.began.set()
        except httpx.TransportError:
            self.broke = True

    def end(self) -> str:
        """What its end was: the error's message, "broken", or "done"."""
        self._thread.join(WITHIN)
        assert not self._thread.is_alive()
        if self.broke:
            return "broken"
        assert self.events[-1] == "[DONE]"
        last = json.loads(self.events[-2])
        return str(last["error"]["message"]) if "error" in last else "done"


@pytest.mark.parametrize("plane", PLANES)
@pytest.mark.parametrize("who", ["rank 0", "rank 1", "supervisor"])
def test_killed_while_loading(start: Callable[..., Group], who: str, plane: str) -> None:
    group = start(plane=plane)
    group.find_ranks()
    if who != "rank 1":  # held back, so that the model can't be loaded before
        group.send("rank 1", signal.SIGSTOP)
    group.server.wait_for("Listening", 60)
    group.send(who, signal.SIGKILL)
    if who == "supervisor":
        group.send("rank 1", signal.SIGCONT)
    code = group.end()
    if who == "supervisor":
        assert code == -signal.SIGKILL
    else:
        assert code == 2
        assert f"{who} was ended by SIGKILL" in group.error()
        assert "while the model loaded" in group.error()


def test_sigterm_while_loading(start: Callable[..., Group]) -> None:
    group = start()
    group.find_ranks()
    group.server.wait_for("Listening", 60)
    group.send("supervisor", signal.SIGTERM)
    assert group.end() == 0


def test_a_start_that_takes_too_long(start: Callable[..., Group]) -> None:
    group = start("--tensor-parallel-startup-timeout", 1)
    group.find_ranks()
    group.send("rank 1", signal.SIGSTOP)  # it never becomes ready
    assert group.end() == 2
    assert "not ready after 1 seconds" in group.error()
    assert "rank 1 still runs" in group.error()


def test_a_busy_port(start: Callable[..., Group]) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        group = start("--port", port)
        group.find_ranks()
        assert group.end() == 2
    assert f"rank 0 ended with exit code 2; it last said: pocketllm: error: port {port} is in use: choose another with --port" in group.error()


@pytest.fixture(params=PLANES)
def ready(start: Callable[..., Group], request: pytest.FixtureRequest) -> tuple[Group, str]:
    group = start("--shutdown-timeout", 1, plane=request.param)
    url = wait_until_ready(group.server)
    group.find_ranks()
    return group, url


@pytest.mark.parametrize("who", ["rank 0", "rank 1", "supervisor"])
def test_killed_while_it_serves(ready: tuple[Group, str], who: str) -> None:
    group, url = ready
    reader = Reader(url)
    assert reader.began.wait(30)
    group.send(who, signal.SIGKILL)
    said = reader.end()
    code = group.end()
    if who == "supervisor":
        assert "the supervisor of the ranks has died" in said
        assert code == -signal.SIGKILL
        return
    if who == "rank 0":
        assert said == "broken"  # the kernel closed the connection; no process is left that could say more
    else:
        assert "rank 1" in said or "another of the 2 ranks is lost" in said
    assert code == 2
    assert f"{who} was ended by SIGKILL" in group.error()
    assert "while it served" in group.error()


def test_a_rank_killed_while_idle(ready: tuple[Group, str]) -> None:
    """Rank 0 and the supervisor likewise in test_supervisor.py, whose ranks start faster."""
    group, url = ready
    group.send("rank 1", signal.SIGKILL)
    end = time.monotonic() + WITHIN
    while True:  # whoever comes now is answered at once, with 503 or by a closed port
        try:
            answer = httpx.post(f"{url}/v1/chat/completions", json={**STORY, "stream": False, "max_tokens": 2}, timeout=WITHIN)
        except httpx.TransportError:
            break
        assert answer.status_code in (200, 503), answer.text
        assert time.monotonic() < end
    assert group.end() == 2
    assert "rank 1 was ended by SIGKILL" in group.error()


def test_stops_in_good_order_and_serves_what_it_serves_alone(ready: tuple[Group, str]) -> None:
    """One start for what HTTP does over ranks: answers, log probabilities, choices, a schema, a cancelled stream, metrics; then SIGTERM."""
    group, url = ready
    question = {"messages": [{"role": "user", "content": "12+7="}], "temperature": 0, "max_tokens": 8}

    def ask(**fields: Any) -> dict[str, Any]:
        answer = httpx.post(f"{url}/v1/chat/completions", json={**question, **fields}, timeout=60)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    assert ask()["choices"][0]["message"]["content"] == "19"
    (first, *_) = ask(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert first["token"] == first["top_logprobs"][0]["token"] == "1"
    assert [choice["message"]["content"] for choice in ask(n=3)["choices"]] == ["19"] * 3
    schema = {"type": "object", "properties": {"sum": {"type": "integer", "maximum": 99, "minimum": 0}}, "required": ["sum"], "additionalProperties": False}
    held = ask(max_tokens=64, response_format={"type": "json_schema", "json_schema": {"name": "sum", "strict": True, "schema": schema}})
    assert set(json.loads(held["choices"][0]["message"]["content"])) == {"sum"}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json={**STORY, "request_id": "long"}, timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert gauge(url, "num_requests_running") == 1
        assert httpx.delete(f"{url}/v1/requests/long").status_code == 200
        assert "cancelled" in "".join(lines)
    end = time.monotonic() + WITHIN
    while gauge(url, "kv_cache_usage_ratio") > 0 or gauge(url, "num_requests_running") > 0:
        assert time.monotonic() < end
        time.sleep(0.05)
    reader = Reader(url)
    assert reader.began.wait(30)
    group.send("supervisor", signal.SIGTERM)
    assert "cancelled" in reader.end()
    assert group.end() == 0


def test_a_process_of_another_launcher_is_told_to_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    server: ServerProcess = serve("--model", MODEL, "--tensor-parallel-size", 2)
    assert server.end(60) == 2
    assert "--no-tensor-parallel-supervisor" in server.lines[-1]
    server.kill()
