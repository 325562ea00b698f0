"""Every error that is not about a field: one form, the right status, and never a traceback."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from pocketllm.config import ServerArgs
from pocketllm.errors import ConfigurationError
from pocketllm.generation import GenerationService
from pocketllm.server import exchange
from pocketllm.server.app import create_app
from tests.fake_serving import call, chat_body, eventually, fake, in_process, make_service
from tests.server.test_chat import events

CHAT = "/v1/chat/completions"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object, after a look at its form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in response.text
    assert "\n" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/v1", "/v1/embeddings", "/v1/chat/completions/", "/v1/requests/", "/v1/requests/a/b"])
def test_other_paths_are_404(path: str) -> None:
    error = error_of(call("GET", path), 404)
    assert path in error["message"]


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", CHAT, "POST"),
        ("PUT", "/v1/completions", "POST"),
        ("POST", "/v1/models", "GET"),
        ("GET", "/v1/requests/a", "DELETE"),
        ("DELETE", "/metrics", "GET"),
    ],
)
def test_wrong_method_is_405_and_says_the_right_one(method: str, path: str, allowed: str) -> None:
    response = call(method, path)
    error_of(response, 405)
    assert allowed in response.headers["allow"]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"a"',
        b"5",
        b"{'a': 1}",
        b'{"messages": NaN}',
        b'{"temperature": Infinity}',
        b'{"temperature": -Infinity}',
        b'\xff\xfe{"a": 1}',
        b'{"user": "\xc3("}',
        b'{"user": "\x00"}',
        b"\x00",
        b'\xef\xbb\xbf{"user": 1}',
        b"[" * 100_000,
        b'{"user": ' + b"[" * 65 + b"]" * 65 + b"}",
        b'{"user": ' + b'{"a":' * 500 + b"1" + b"}" * 500 + b"}",
        b'{"seed": ' + b"9" * 5000 + b"}",
        '{"user": 1}'.encode("utf-16"),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_bodies_that_are_no_json_object_are_400(content: bytes) -> None:
    error = error_of(call("POST", CHAT, content=content), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None


def test_infinity_spelled_as_a_number_is_400() -> None:
    error = error_of(call("POST", CHAT, content=b'{"messages": [{"role": "user", "content": "Hi"}], "temperature": 1e999}'), 400)
    assert error["param"] == "temperature"


def test_escaped_nul_is_text() -> None:
    assert call("POST", CHAT, json=chat_body(messages=[{"role": "user", "content": "a\0b"}])).status_code == 200


def test_body_over_the_limit_is_413_and_little_of_the_rest_is_read() -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1024
            yield b" " * 1024

    async def run() -> None:
        async with in_process(max_body_bytes=4096) as client:
            error_of(await client.post(CHAT, content=endless()), 413)
            error_of(await client.post(CHAT, content=b" " * 4097), 413)
            error_of(await client.post(CHAT, content=b" " * 4096), 400)  # as long as allowed, and no JSON

    asyncio.run(run())
    assert sent <= 2**25


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer ", "secret", "Basic secret", "Bearer secret2", "Bearer s\xe9cret"])
def test_wrong_key_is_401(key: str | None) -> None:
    headers = {} if key is None else {"authorization": key.encode("latin-1")}

    async def run() -> None:
        async with in_process(api_key="secret") as client:
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("GET", "/metrics"), ("DELETE", "/v1/requests/a"), ("GET", "/nothing")):
                response = await client.request(method, path, headers=headers)
                error_of(response, 401)
                assert response.headers["www-authenticate"] == "Bearer"
            for path in ("/alive", "/ready", "/health"):
                assert (await client.get(path, headers=headers)).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("key", ["Bearer secret", "bearer secret"])
def test_right_key_passes(key: str) -> None:
    assert call("POST", CHAT, json=chat_body(), headers={"authorization": key}, api_key="secret").status_code == 200


def test_cors_is_off_unless_asked_for() -> None:
    origin = {"origin": "https://app.example"}
    ask = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert "access-control-allow-origin" not in call("POST", CHAT, json=chat_body(), headers=origin).headers
    error_of(call("OPTIONS", CHAT, headers=ask), 405)
    allowed = call("POST", CHAT, json=chat_body(), headers=origin, allow_origin="https://app.example")
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    preflight = call("OPTIONS", CHAT, headers=ask, allow_origin="https://app.example", api_key="secret")  # browsers send it without the key
    assert preflight.status_code == 200
    assert "authorization" in preflight.headers["access-control-allow-headers"].lower()
    refused = call("OPTIONS", CHAT, headers=ask, allow_origin="https://other.example")
    assert error_of(refused, 400)["type"] == "invalid_request_error"
    other = call("POST", CHAT, json=chat_body(), headers=origin, allow_origin="https://other.example")
    assert other.headers.get("access-control-allow-origin") != "https://app.example"


def test_browsers_may_read_errors_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_self: GenerationService, _request: object) -> object:
        raise KeyError("x")

    origin = {"origin": "https://app.example"}
    options: dict[str, Any] = {"headers": origin, "allow_origin": "*", "api_key": "secret"}
    monkeypatch.setattr(GenerationService, "prepare", broken)
    for status, headers in ((401, origin), (500, {**origin, "authorization": "Bearer secret"})):
        response = call("POST", CHAT, json=chat_body(), **{**options, "headers": headers})
        error_of(response, status)
        assert response.headers["access-control-allow-origin"] == "*"


def test_full_queue_is_429_with_retry_after() -> None:
    async def run() -> None:
        backend = fake(tokens_per_second=20)
        async with in_process(backend, max_queued_requests=1) as client:
            first = asyncio.ensure_future(client.post(CHAT, json=chat_body(max_tokens=20)))
            await eventually(lambda: backend.stats().running == 1)
            refused = await client.post(CHAT, json=chat_body())
            assert error_of(refused, 429)["type"] == "rate_limit_error"
            assert int(refused.headers["retry-after"]) >= 1
            assert (await first).status_code == 200
            assert (await client.post(CHAT, json=chat_body())).status_code == 200

    asyncio.run(run())


def test_loading_is_503_with_progress() -> None:
    gate = threading.Event()

    async def run() -> None:
        async with in_process(fake(load_gate=gate), wait=False) as client:
            async with asyncio.timeout(10):
                while "50%" not in (await client.get("/ready")).json()["detail"]:
                    await asyncio.sleep(0.01)
            for method, path in (("POST", CHAT), ("POST", "/v1/completions"), ("GET", "/v1/models"), ("DELETE", "/v1/requests/a")):
                response = await client.request(method, path, json=chat_body() if method == "POST" else None)
                assert "weights 1/2 (50%)" in error_of(response, 503)["message"]
                assert "retry-after" in response.headers
            assert (await client.get("/alive")).status_code == 200
            ready = await client.get("/ready")
            assert ready.status_code == 503
            assert ready.json()["status"] == "loading"
            assert "50%" in ready.json()["detail"]
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/metrics")).status_code == 200
            gate.set()
            for _ in range(100):
                if (await client.get("/ready")).status_code == 200:
                    break
                await asyncio.sleep(0.02)
            assert (await client.post(CHAT, json=chat_body())).status_code == 200

    asyncio.run(run())


def test_failed_load_is_503_and_dead() -> None:
    async def run() -> None:
        async with in_process(fake(load_error=ConfigurationError("weights.gguf is truncated"))) as client:
            error_of(await client.post(CHAT, json=chat_body()), 503)
            assert (await client.get("/alive")).status_code == 503
            assert (await client.get("/ready")).json()["status"] == "dead"

    asyncio.run(run())


def test_deadline_is_504_and_cancels() -> None:
    async def run() -> None:
        backend = fake(tokens_per_second=20)
        async with in_process(backend, request_timeout=0.2) as client:
            assert error_of(await client.post(CHAT, json=chat_body(max_tokens=500)), 504)["type"] == "timeout_error"
            payloads = events((await client.post(CHAT, json=chat_body(max_tokens=500, stream=True))).text)
            assert payloads[-1] == "[DONE]"
            assert json.loads(payloads[-2])["error"]["type"] == "timeout_error"
            await eventually(lambda: backend.stats().running == 0)

    asyncio.run(run())


def test_cancelled_is_499_and_one_event_on_a_stream() -> None:
    async def run() -> None:
        backend = fake(tokens_per_second=50)
        async with in_process(backend) as client:
            whole = asyncio.ensure_future(client.post(CHAT, json=chat_body(max_tokens=500, request_id="whole")))
            stream = asyncio.ensure_future(client.post(CHAT, json=chat_body(max_tokens=500, request_id="stream", stream=True)))
            await eventually(lambda: backend.stats().running == 2 and backend.stats().generated_tokens > 10)
            for request_id in ("whole", "stream"):
                deleted = await client.delete(f"/v1/requests/{request_id}")
                assert deleted.status_code == 200
                assert deleted.json()["id"] == request_id
            assert error_of(await whole, 499)["type"] == "request_cancelled"
            payloads = events((await stream).text)
            assert payloads[-1] == "[DONE]"
            assert json.loads(payloads[-2])["error"]["type"] == "request_cancelled"
            assert len(payloads) > 3
            error_of(await client.delete("/v1/requests/whole"), 404)
            error_of(await client.delete("/v1/requests/never"), 404)

    asyncio.run(run())


def test_duplicate_of_an_active_id_is_400_and_leaves_the_first_alone() -> None:
    async def run() -> None:
        backend = fake(tokens_per_second=20)
        async with in_process(backend) as client:
            first = asyncio.ensure_future(client.post(CHAT, json=chat_body(max_tokens=20, request_id="a")))
            await eventually(lambda: backend.stats().running == 1)
            assert error_of(await client.post(CHAT, json=chat_body(request_id="a")), 400)["param"] == "request_id"
            assert (await first).json()["usage"]["completion_tokens"] == 20
            assert (await client.post(CHAT, json=chat_body(request_id="a"))).status_code == 200

    asyncio.run(run())


def test_failing_request_is_500_and_one_event_on_a_stream() -> None:
    async def run() -> None:
        async with in_process(fake(fail_after=2)) as client:
            assert "a fault was asked for" in error_of(await client.post(CHAT, json=chat_body()), 500)["message"]
            payloads = events((await client.post(CHAT, json=chat_body(stream=True))).text)
            assert payloads[-1] == "[DONE]"
            assert json.loads(payloads[-2])["error"]["type"] == "server_error"
            assert sum("error" in json.loads(payload) for payload in payloads[:-1]) == 1
            assert (await client.get("/ready")).status_code == 200
            assert (await client.post(CHAT, json=chat_body(max_tokens=1))).status_code == 200

    asyncio.run(run())


def test_dead_engine_fails_all_and_refuses_more() -> None:
    async def run() -> None:
        async with in_process(fake(die_after=3, tokens_per_second=20)) as client:
            answers = await asyncio.gather(*(client.post(CHAT, json=chat_body(max_tokens=50)) for _ in range(6)))
            for answer in answers:
                error_of(answer, 503)
            error_of(await client.post(CHAT, json=chat_body()), 503)
            assert (await client.get("/alive")).status_code == 503
            assert (await client.get("/health")).json()["status"] == "dead"

    asyncio.run(run())


def test_fault_of_the_program_is_500_without_its_text(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def broken(_self: GenerationService, _request: object) -> object:
        raise KeyError("a secret of the program")

    monkeypatch.setattr(GenerationService, "prepare", broken)
    response = call("POST", CHAT, json=chat_body())
    assert error_of(response, 500)["type"] == "server_error"
    assert "secret" not in response.text
    assert "a secret of the program" in caplog.text


async def post_with(app: Starlette, receive_then: asyncio.Event, send: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
    """A streaming request whose client disconnects once `receive_then` is set."""
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        if received == 1:
            return {"type": "http.request", "body": json.dumps(chat_body(max_tokens=900, stream=True)).encode(), "more_body": False}
        await receive_then.wait()
        return {"type": "http.disconnect"}

    scope = {"type": "http", "method": "POST", "path": CHAT, "raw_path": CHAT.encode(), "query_string": b"", "headers": [], "http_version": "1.1"}
    async with app.router.lifespan_context(app):
        await asyncio.wait_for(app.state.server.loaded.wait(), 10)
        await asyncio.wait_for(app(scope, receive, send), 10)  # type: ignore[arg-type]
        await eventually(lambda: app.state.server._stats().running == 0)
        assert app.state.server.cancel_all() == 0
        assert 'pocketllm_requests_total{outcome="cancelled"} 1.0' in app.state.server.metrics.render().decode()


@pytest.mark.parametrize("message", ["http.response.start", "http.response.body"])
def test_disconnect_while_something_is_being_sent_cancels(message: str) -> None:
    """A client that stopped reading: the server hangs in `send`, not in the wait for a token, when the connection ends."""
    backend = fake(tokens_per_second=50)
    blocked = asyncio.Event()

    async def send(sent: dict[str, Any]) -> None:
        if sent["type"] == message and b"assistant" not in sent.get("body", b""):
            blocked.set()
            await asyncio.Event().wait()

    asyncio.run(post_with(create_app(ServerArgs(), lambda progress: make_service(backend, progress)), blocked, send))


def test_a_client_that_does_not_read_is_given_up_after_the_deadline(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(exchange, "_UNREAD_SECONDS", 0.1)
    backend = fake()

    async def send(sent: dict[str, Any]) -> None:
        if sent["type"] == "http.response.body":
            await asyncio.Event().wait()

    asyncio.run(post_with(create_app(ServerArgs(request_timeout=0.2), lambda progress: make_service(backend, progress)), asyncio.Event(), send))
    assert "did not read" in caplog.text
