"""What only a real socket shows: disconnects, kept connections, and the openai client."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from tests.fake_serving import LiveServer, StartServer, chat_body, fake

CHAT = "/v1/chat/completions"


def until(condition: Callable[[], bool], seconds: float = 5) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to pass"
        time.sleep(0.01)


def raw_post(server: LiveServer, body: dict[str, Any]) -> socket.socket:
    address = urlsplit(server.url)
    connection = socket.create_connection((address.hostname, address.port), timeout=5)
    content = json.dumps(body).encode()
    connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (CHAT.encode(), len(content), content))
    return connection


def read_until(connection: socket.socket, end: bytes) -> bytes:
    """What comes until `end`; the headers of an answer may come alone."""
    seen = b""
    while end not in seen:
        part = connection.recv(100_000)
        assert part, seen
        seen += part
    return seen


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_cancels_the_request(start_server: StartServer, stream: bool) -> None:
    server = start_server(fake(tokens_per_second=50))
    connection = raw_post(server, chat_body(max_tokens=900, stream=stream))
    until(lambda: server.backend.stats().running == 1)
    if stream:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
    connection.close()
    until(lambda: server.backend.stats().running == 0)
    assert server.backend.stats().generated_tokens < 800
    until(lambda: 'pocketllm_requests_total{outcome="cancelled"} 1.0' in httpx.get(f"{server.url}/metrics").text)


def test_disconnect_of_a_waiting_request_leaves_the_running_one(start_server: StartServer) -> None:
    server = start_server(fake(tokens_per_second=50, max_slots=1))
    first = raw_post(server, chat_body(max_tokens=30))
    until(lambda: server.backend.stats().running == 1)
    second = raw_post(server, chat_body(max_tokens=30))
    until(lambda: server.backend.stats().waiting == 1)
    second.close()
    until(lambda: server.backend.stats().waiting == 0)
    assert b'"completion_tokens":30' in read_until(first, b"}}}")
    first.close()


def test_half_a_body_and_gone(start_server: StartServer) -> None:
    server = start_server()
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{" % CHAT.encode())
    until(lambda: 'pocketllm_requests_total{outcome="cancelled"} 1.0' in httpx.get(f"{server.url}/metrics").text)


def test_a_body_that_does_not_come_is_408(start_server: StartServer) -> None:
    server = start_server(request_timeout=0.3)
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=5) as connection:
        connection.sendall(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{" % CHAT.encode())
        answer = read_until(connection, b"}}")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"type":"timeout_error"' in answer
        assert connection.recv(1000) == b""  # closed: what still comes would be read as another request
    assert 'pocketllm_requests_total{outcome="refused"} 1.0' in httpx.get(f"{server.url}/metrics").text


def test_connection_is_kept_through_answers_streams_and_errors(start_server: StartServer) -> None:
    server = start_server()
    address = urlsplit(server.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=5)
    connection.connect()
    socket_before = connection.sock
    for body, status in ((chat_body(), 200), (chat_body(stream=True), 200), (chat_body(n=0), 400), (chat_body(), 200)):
        connection.request("POST", CHAT, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.status == status
        response.read()
        assert connection.sock is socket_before
    connection.close()


def test_a_client_that_sends_on_reads_its_413(start_server: StartServer) -> None:
    """As most clients do: they read the answer once the whole body is out, which a closed connection would not let them."""
    server = start_server(fake(), max_body_bytes=2**20)
    address = httpx.URL(server.url)
    with socket.create_connection((address.host, address.port or 80), timeout=20) as connection:
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n\r\n")
        connection.sendall(b" " * 8_000_000)
        assert connection.recv(12) == b"HTTP/1.1 413"


def test_large_upload_is_413(start_server: StartServer) -> None:
    server = start_server(max_body_bytes=4096)
    response = httpx.post(server.url + CHAT, content=b"x" * 4_000_000)
    assert response.status_code == 413
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert httpx.post(server.url + CHAT, json=chat_body()).status_code == 200


def test_cancelled_status_reaches_the_client(start_server: StartServer) -> None:
    server = start_server(fake(tokens_per_second=50))
    connection = raw_post(server, chat_body(max_tokens=900, request_id="a"))
    until(lambda: server.backend.stats().running == 1)
    assert httpx.delete(f"{server.url}/v1/requests/a").status_code == 200
    assert connection.recv(1000).startswith(b"HTTP/1.1 499")
    connection.close()


def test_stream_comes_token_by_token(start_server: StartServer) -> None:
    server = start_server(fake(tokens_per_second=20))
    arrivals = []
    with httpx.stream("POST", server.url + CHAT, json=chat_body(max_tokens=8, stream=True)) as response:
        for _ in response.iter_raw():
            arrivals.append(time.monotonic())
    assert arrivals[-1] - arrivals[0] > 0.2
    assert len(arrivals) >= 6


def test_openai_client(start_server: StartServer) -> None:
    server = start_server(api_key="secret")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0)
    messages: list[Any] = [{"role": "system", "content": "Be short."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=6, temperature=0)
    text = answer.choices[0].message.content
    assert text is not None
    assert len(text) == 6
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6

    chunks = list(
        client.chat.completions.create(model="any", messages=messages, max_tokens=6, temperature=0, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage == answer.usage

    replayed = client.chat.completions.create(model="any", messages=[*messages, answer.choices[0].message, messages[1]], max_tokens=2)
    assert replayed.usage is not None
    assert replayed.usage.prompt_tokens > answer.usage.prompt_tokens

    completion = client.completions.create(model="any", prompt="Hello", temperature=0)
    assert len(completion.choices[0].text) == 16
    streamed = client.completions.create(model="any", prompt="Hello", temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == completion.choices[0].text

    assert [model.id for model in client.models.list()] == ["fake-1"]
    assert client.models.retrieve("fake-1").id == "fake-1"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="any", messages=messages, frequency_penalty=1)
    assert caught.value.param == "frequency_penalty"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="Hi")
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_openai_client_reports_a_failure_in_mid_stream(start_server: StartServer) -> None:
    server = start_server(fake(fail_after=3))
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(model="any", messages=[{"role": "user", "content": "Hi"}], stream=True)
    with pytest.raises(openai.APIError, match="a fault was asked for"):
        list(stream)


def test_async_openai_client(start_server: StartServer) -> None:
    server = start_server(fake(tokens_per_second=200))

    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "Hi"}]
            answer = await client.chat.completions.create(model="any", messages=messages, max_tokens=6, temperature=0)

            async def streamed() -> str:
                stream = await client.chat.completions.create(model="any", messages=messages, max_tokens=6, temperature=0, stream=True)
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            assert set(await asyncio.gather(*(streamed() for _ in range(8)))) == {answer.choices[0].message.content}
            stream = await client.chat.completions.create(model="any", messages=messages, max_tokens=900, stream=True)
            async for _ in stream:
                break
            await stream.close()
            for _ in range(200):
                if server.backend.stats().running == 0:
                    return
                await asyncio.sleep(0.01)
            pytest.fail("the closed stream still runs")

    asyncio.run(run())
