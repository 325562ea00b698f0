"""The life of a server process: the port, the load, signals, and the exit code."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fake_serving import chat_body
from tests.server.test_chat import events
from tests.server_process import ServerProcess

CHAT = "/v1/chat/completions"


def wait_until_running(url: str, count: int) -> None:
    end = time.monotonic() + 10
    while httpx.get(f"{url}/health").json()["running"] < count:
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def start() -> Iterator[Any]:
    running: list[ServerProcess] = []

    def begin(**options: Any) -> ServerProcess:
        options["server"] = {"port": 0, **options.get("server", {})}
        running.append(ServerProcess(str(Path(__file__).with_name("fake_server.py")), json.dumps(options)))
        return running[-1]

    yield begin
    for one in running:
        one.kill()


def test_start_says_where_and_how_and_sigterm_exits_0(start: Any) -> None:
    process = start()
    url = process.wait_for(r"Listening on (http://127\.0\.0\.1:\d+)")
    process.wait_for(r"fake-1 is ready at http")
    curl = process.wait_for(r"try: (curl .*)")
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    answered = subprocess.run(["bash", "-c", f"{curl} -s"], capture_output=True, text=True, timeout=20, check=True)
    assert json.loads(answered.stdout)["object"] == "chat.completion"
    process.process.send_signal(signal.SIGTERM)
    assert process.end() == 0
    assert not [line for line in process.lines if "Traceback" in line or "Error" in line]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/alive")


def test_sigint_exits_0(start: Any) -> None:
    process = start()
    process.wait_for("is ready")
    process.process.send_signal(signal.SIGINT)
    assert process.end() == 0
    assert not [line for line in process.lines if "Traceback" in line]


def test_sigterm_lets_a_running_request_finish(start: Any) -> None:
    process = start(fake={"tokens_per_second": 20})
    url = process.wait_for(r"is ready at (http\S+)")
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(httpx.post(url + CHAT, json=chat_body(max_tokens=20), timeout=20)))
    client.start()
    wait_until_running(url, 1)
    process.process.send_signal(signal.SIGTERM)
    client.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 20
    assert process.end() == 0


def test_sigterm_cancels_what_runs_past_the_limit(start: Any) -> None:
    process = start(server={"shutdown_timeout": 0.3}, fake={"tokens_per_second": 20})
    url = process.wait_for(r"is ready at (http\S+)")
    answers: dict[str, httpx.Response] = {}

    def post(name: str, **fields: Any) -> None:
        answers[name] = httpx.post(url + CHAT, json=chat_body(max_tokens=900, **fields), timeout=20)

    clients = [threading.Thread(target=post, args=("whole",)), threading.Thread(target=post, args=("stream",), kwargs={"stream": True})]
    for client in clients:
        client.start()
    wait_until_running(url, 2)
    began = time.monotonic()
    process.process.send_signal(signal.SIGTERM)
    for client in clients:
        client.join()
    assert process.end() == 0
    assert time.monotonic() - began < 5
    assert answers["whole"].status_code == 499
    payloads = events(answers["stream"].text)
    assert payloads[-1] == "[DONE]"
    assert json.loads(payloads[-2])["error"]["type"] == "request_cancelled"
    assert "cancelled 2 requests" in "\n".join(process.lines)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_ends_running_requests_at_once_and_in_order(start: Any, number: signal.Signals) -> None:
    process = start(fake={"tokens_per_second": 20})
    url = process.wait_for(r"is ready at (http\S+)")
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(httpx.post(url + CHAT, json=chat_body(max_tokens=900), timeout=20)))
    client.start()
    wait_until_running(url, 1)
    began = time.monotonic()
    process.process.send_signal(number)
    time.sleep(0.3)
    assert process.process.poll() is None
    process.process.send_signal(number)
    client.join()
    assert process.end() == 0
    assert time.monotonic() - began < 10
    assert answers[0].status_code == 499
    assert process.lines[3:] == ["pocketllm: cancelled 1 requests that were still running"]


def test_sigterm_closes_on_a_client_that_sends_no_more(start: Any) -> None:
    process = start(server={"shutdown_timeout": 0.1})
    url = urlsplit(process.wait_for(r"is ready at (http\S+)"))
    with socket.create_connection((url.hostname, url.port)) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        time.sleep(0.3)
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 0
    assert process.lines[3:] == []


def test_alive_and_not_ready_while_loading_and_sigterm_still_exits(start: Any) -> None:
    process = start(load="forever")
    url = process.wait_for(r"Listening on (http\S+)")
    for _ in range(200):
        try:
            response = httpx.get(f"{url}/alive")
            break
        except httpx.ConnectError:
            time.sleep(0.02)
    assert response.status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 503
    process.process.send_signal(signal.SIGTERM)
    assert process.end() == 0


@pytest.mark.parametrize(
    ("load", "line"),
    [
        ("refused", "pocketllm: error: model.gguf is truncated: download it again."),
        ("broken", "pocketllm: error: The model could not be loaded: KeyError: 'blk.0.attn_q.weight'"),
    ],
)
def test_failed_load_is_one_line_and_exit_2(start: Any, load: str, line: str) -> None:
    process = start(load=load)
    assert process.end() == 2
    assert process.lines[-1] == line
    assert len(process.lines) == 2  # where it listened, and why it stopped


def test_busy_port_is_one_line_and_exit_2(start: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = start(server={"port": port}, load="forever")
        assert process.end() == 2
        assert process.lines == [f"pocketllm: error: port {port} is in use: choose another with --port"]


@pytest.mark.parametrize("host", ["no such host", "192.0.2.1", "two..dots", ""])
def test_host_that_is_not_ours_is_one_line_and_exit_2(start: Any, host: str) -> None:
    process = start(server={"host": host}, load="forever")
    assert process.end() == 2
    (line,) = process.lines
    assert host in line
    assert "--host" in line
