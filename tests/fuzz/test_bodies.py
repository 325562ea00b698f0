"""5,000 damaged requests: each is answered or refused in the one form, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any, NoReturn

import httpx
import pytest

from tests.fake_serving import LiveServer, StartServer
from tests.fuzz.bodies import CHAT, VALID
from tests.fuzz.conftest import NEIGHBOUR
from tests.fuzz.mutator import Mutator

AT_ONCE = 8
ERROR_KEYS = {"message", "type", "param", "code"}


def strict_json(text: str) -> Any:
    """JSON as the standard has it: Python alone would take NaN and Infinity."""

    def refuse(name: str) -> NoReturn:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


def check_error(body: Any) -> None:
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == ERROR_KEYS
    message = error["message"]
    assert isinstance(message, str)
    assert message
    assert "\n" not in message
    assert "\r" not in message
    assert len(message) < 1500
    for trace in ("Traceback", "object at 0x", 'File "', "Error("):
        assert trace not in message
    assert isinstance(error["type"], str)
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)


def check_stream(text: str) -> None:
    events = text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith(("data: ", ":"))
        if event.startswith("data: "):
            body = strict_json(event.removeprefix("data: "))
            if "error" in body:  # what the engine finds out on the way, such as a grammar that asks for too much work
                check_error(body)
                assert body["error"]["type"] == "invalid_request_error"


def check_answer(response: httpx.Response) -> None:
    assert 200 <= response.status_code < 500
    kind = response.headers["content-type"]
    if kind.startswith("text/event-stream"):
        assert response.status_code == 200
        check_stream(response.text)
        return
    assert kind == "application/json"
    body = strict_json(response.content.decode())
    if response.status_code >= 400:
        check_error(body)
    else:
        assert body["choices"]
        assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info or record.levelno >= logging.ERROR] == []


async def neighbour(client: httpx.AsyncClient, done: asyncio.Event) -> tuple[int, set[str]]:
    """How many streams ran meanwhile, and their different texts."""
    texts = set()
    count = 0
    body = {"messages": [{"role": "user", "content": NEIGHBOUR}], "temperature": 0, "max_tokens": 100, "stream": True}
    while not done.is_set():
        response = await client.post(CHAT, json=body)
        chunks = [json.loads(event.removeprefix("data: ")) for event in response.text.split("\n\n")[:-2] if event.startswith("data: ")]
        texts.add("".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks))
        count += 1
        await asyncio.sleep(0.05)
    return count, texts


@pytest.mark.slow
@pytest.mark.parametrize(("surface", "count", "seed"), [("full", 4_000, 1), ("guide", 1_000, 2)])
def test_damaged_bodies_are_answered_or_refused(start_any: StartServer, surface: str, count: int, seed: int) -> None:
    server = start_any(surface=surface)
    mutator = Mutator(seed)
    requests = [mutator.request() for _ in range(count)]
    statuses: Counter[int] = Counter()
    findings: list[str] = []
    waiting = iter(requests)

    async def work(client: httpx.AsyncClient) -> None:
        for path, content in waiting:
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            statuses[response.status_code] += 1
            try:
                check_answer(response)
            except (AssertionError, ValueError, KeyError) as error:
                findings.append(f"{error!r}: {path} {content[:2000]!r} -> {response.status_code} {response.text[:500]!r}")

    async def run() -> tuple[int, set[str]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            done = asyncio.Event()
            beside = asyncio.ensure_future(neighbour(client, done))
            await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))
            done.set()
            return await beside

    streams, texts = asyncio.run(run())
    print(f"{dict(sorted(statuses.items()))}, {streams} streams beside them")
    assert findings == [], f"{len(findings)} findings; the first: {findings[0]}"
    assert statuses[200] > count // 20
    assert statuses[400] > count // 4
    assert set(statuses) <= {200, 400, 413}
    assert streams > 3
    assert [len(text) for text in texts] == [100]
    assert httpx.post(server.url + CHAT, json=VALID[0][1]).status_code == 200
    stats = server.backend.stats()
    assert (stats.running, stats.waiting) == (0, 0)


def test_valid_bodies_are_valid(server: LiveServer) -> None:
    """The bodies that the damage begins from. A refusal would make the test above one of the parser alone."""
    refused = []
    for path, body in VALID:
        response = httpx.post(server.url + path, json=body, timeout=30)
        check_answer(response)
        if response.status_code != 200:
            refused.append((body, response.json()["error"]["message"]))
    assert refused == []
