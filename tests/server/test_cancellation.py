"""Requests that are given up early, in every way, leave nothing behind: no row, no KV block, no memory."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from tests.fake_serving import LiveServer, StartServer, chat_body, fake
from tests.server_process import serve, wait_until_ready

CHAT = "/v1/chat/completions"
REQUESTS, WARM_UP, AT_ONCE = 300, 100, 6
WAYS = ("delete", "disconnect", "both")
TOPICS = ("rivers", "bread", "the moon", "trains", "bees")


def gauge(url: str, name: str) -> float:
    """A value of /metrics."""
    (line,) = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(f"pocketllm_{name} ")]
    return float(line.split()[1])


def wait_until_idle(url: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while gauge(url, "num_requests_running") or gauge(url, "num_requests_waiting") or gauge(url, "kv_cache_usage_ratio"):
        assert time.monotonic() < end, httpx.get(f"{url}/metrics").text
        time.sleep(0.02)


def http_post(body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    return b"POST %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(content), content)


def connect(url: str, body: dict[str, Any]) -> socket.socket:
    """A connection on which `body` was sent."""
    address = urlsplit(url)
    connection = socket.create_connection((address.hostname, address.port), timeout=30)
    connection.sendall(http_post(body))
    return connection


async def give_up(url: str, client: httpx.AsyncClient, number: int, after: float) -> None:
    """Send request `number`, and end it `after` seconds in its own way."""
    way, stream, choices = WAYS[number % 3], number // 3 % 2 == 1, (1, 2)[number // 6 % 2]
    request_id = f"given-up-{number}"
    content = f"Tell me a very long story about {TOPICS[number % len(TOPICS)]}."
    body: dict[str, Any] = {"messages": [{"role": "user", "content": content}], "max_tokens": 1000, "request_id": request_id, "seed": number, "stream": stream}
    if choices > 1:
        body["n"] = choices
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(http_post(body))
    await asyncio.sleep(after)
    if way == "delete":
        reading = asyncio.ensure_future(reader.read())
        while (await client.delete(f"/v1/requests/{request_id}")).status_code != 200:  # it may come before its request does
            await asyncio.sleep(0.001)
            assert not reading.done(), reading.result()[:500]
        head, _, answer = (await reading).partition(b"\r\n\r\n")
        assert head.startswith((b"HTTP/1.1 499", b"HTTP/1.1 200" if stream else b"HTTP/1.1 499")), head + answer[:500]
        assert b'"type":"request_cancelled"' in answer, answer[:500]
        assert not head.startswith(b"HTTP/1.1 200") or b"data: [DONE]\n\n" in answer
    elif way == "both":
        await asyncio.gather(client.delete(f"/v1/requests/{request_id}"), asyncio.to_thread(writer.transport.abort))
    writer.close()


async def give_up_many(url: str, numbers: range, seed: int) -> None:
    source = random.Random(seed)
    waiting = iter([(number, source.uniform(0, 0.02)) for number in numbers])

    async def work(client: httpx.AsyncClient) -> None:
        for number, after in waiting:
            await give_up(url, client, number, after)

    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))


@pytest.fixture(scope="module")
def server(default_model: Path) -> Iterator[tuple[str, psutil.Process]]:
    """The real model in a process of its own. Its KV cache is so small that the warm-up uses every block of it, which only then counts as memory."""
    running = serve("--model", default_model, "--max-batch-size", 8, "--max-model-len", 2048, "--kv-cache-memory", "64MiB")
    try:
        yield wait_until_ready(running), psutil.Process(running.process.pid)
        assert not [line for line in running.lines if "Traceback" in line or "ERROR" in line]
    finally:
        running.kill()


@pytest.mark.slow
def test_300_requests_given_up_leave_nothing_behind(server: tuple[str, psutil.Process]) -> None:
    url, process = server
    asyncio.run(give_up_many(url, range(WARM_UP), seed=1))
    wait_until_idle(url)
    warm = process.memory_info().rss
    descriptors = process.num_fds()
    asyncio.run(give_up_many(url, range(WARM_UP, WARM_UP + REQUESTS), seed=2))
    wait_until_idle(url)
    cold = process.memory_info().rss
    print(f"RSS {warm / 2**20:.1f} MiB after {WARM_UP} requests, {cold / 2**20:.1f} MiB after {REQUESTS} more")
    assert cold < warm * 1.05
    assert process.num_fds() <= descriptors + 4
    answer = httpx.post(url + CHAT, json={"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}, timeout=60)
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]
    ended = gauge(url, 'requests_total{outcome="cancelled"}')
    assert ended >= REQUESTS  # all but those whose client had gone before their body was read are counted so


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_real_engine_stops_soon_after_a_disconnect(server: tuple[str, psutil.Process], stream: bool, choices: int) -> None:
    url, _ = server
    before = gauge(url, "generation_tokens_total")
    body = chat_body(max_tokens=1500, stream=stream, n=choices, messages=[{"role": "user", "content": "Tell me a very long story. Do not stop early."}])
    connection = connect(url, body)
    end = time.monotonic() + 30
    while gauge(url, "generation_tokens_total") < before + 10 * choices:
        assert time.monotonic() < end
        time.sleep(0.01)
    at_close = gauge(url, "generation_tokens_total")
    connection.close()
    wait_until_idle(url)
    assert gauge(url, "generation_tokens_total") - at_close < 60 * choices  # a step takes a few milliseconds; the whole answer would be 1,500


@pytest.mark.parametrize("choices", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_stops_within_one_step(start_server: StartServer, stream: bool, choices: int) -> None:
    server: LiveServer = start_server(fake(tokens_per_second=5, max_slots=4))  # a step is 200 ms
    connection = connect(server.url, chat_body(max_tokens=900, stream=stream, n=choices))
    end = time.monotonic() + 20
    while server.backend.stats().generated_tokens < 2 * choices:
        assert time.monotonic() < end
        time.sleep(0.001)
    at_close = server.backend.stats().generated_tokens
    connection.close()
    while server.backend.stats().running:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert server.backend.stats().generated_tokens - at_close <= choices  # one step
