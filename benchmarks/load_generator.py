"""Streaming clients on raw sockets: many streams in one thread, cheap enough to keep a server's core busy from another core."""

from __future__ import annotations

import json
import random
import re
import select
import socket
import time
from dataclasses import dataclass, field
from urllib.parse import urlsplit

PROMPT = "Say something that is long enough to be worth a stream."

_TEXT = re.compile(rb'"content":"([a-z]+)"')


class LoadError(Exception):
    """The server answered otherwise than the load needs."""


@dataclass(frozen=True)
class Load:
    """What the clients ask for.

    Args:
        streams: requests in flight, each on a connection of its own.
        rate: tokens a second that the server offers each stream.
        tokens: mean length of an answer; lengths are spread over half to one and a half of it, so that streams don't end together.
    """

    streams: int
    rate: int
    tokens: int

    @property
    def name(self) -> str:
        return f"{self.streams}x{self.rate}"

    @property
    def offered(self) -> int:
        return self.streams * self.rate


@dataclass
class Traffic:
    """What came during the measured time. One token is one character: the servers under test answer in letters.

    Args:
        seconds: how long was measured.
        tokens, events: streamed meanwhile.
        first_token: seconds from sending each request to its first token, of the requests that were sent meanwhile.
        client_cpu: seconds of CPU that this process used meanwhile.
    """

    seconds: float = 0.0
    tokens: int = 0
    events: int = 0
    first_token: list[float] = field(default_factory=list)
    client_cpu: float = 0.0


class LoadGenerator:
    """Clients of one server, whose streams follow each other without a pause.

    Args:
        url: of the server.
        load: what to ask for.
        seed: of the answers' lengths.
    """

    def __init__(self, url: str, load: Load, seed: int = 0) -> None:
        parts = urlsplit(url)
        self._load = load
        self._lengths = random.Random(seed)
        self._head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\nContent-Length: "
        self._address = (parts.hostname or "", parts.port or 80)
        self._poll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self._traffic = Traffic()
        self._is_measuring = self._is_ending = False

    def start(self, warm_up: float) -> None:
        """Open the connections over a tenth of a second, and keep the load up for `warm_up` seconds. Raises as `measure` does."""
        for _ in range(self._load.streams):
            self._open()
            self._run(time.perf_counter() + 0.1 / self._load.streams)
        self._run(time.perf_counter() + warm_up)

    def measure(self, seconds: float) -> Traffic:
        """Keep the load up for `seconds`, and count.

        Raises:
            LoadError: an answer is not a 200, or a connection closed.
        """
        self._is_measuring = True
        began, cpu = time.perf_counter(), time.process_time()
        self._run(began + seconds)
        self._traffic.seconds, self._traffic.client_cpu = time.perf_counter() - began, time.process_time() - cpu
        self._is_measuring = False
        return self._traffic

    def drain(self) -> None:
        """Read the streams that are still open to their end, and close the connections."""
        self._is_ending = True
        end = time.perf_counter() + 60
        while self._streams:
            if time.perf_counter() > end:
                raise LoadError("streams did not end within a minute")
            self._run(time.perf_counter() + 0.05)
        self._poll.close()

    def _open(self) -> None:
        connection = socket.create_connection(self._address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = _Stream(connection)
        self._streams[connection.fileno()] = stream
        self._poll.register(connection.fileno(), select.EPOLLIN)
        self._send(stream)

    def _send(self, stream: _Stream) -> None:
        tokens = self._lengths.randint(max(1, self._load.tokens // 2), self._load.tokens * 3 // 2)
        body = json.dumps({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": tokens, "stream": True})
        stream.begin(f"{self._head}{len(body)}\r\n\r\n{body}".encode(), is_measured=self._is_measuring)

    def _run(self, until: float) -> None:
        while True:
            left = until - time.perf_counter()
            if left <= 0:
                return
            for number, _ in self._poll.poll(left):
                self._read(number, self._streams[number])

    def _read(self, number: int, stream: _Stream) -> None:
        tokens, events = stream.read()
        if tokens and stream.first_at is None:
            stream.first_at = time.perf_counter()
            if stream.is_measured:
                self._traffic.first_token.append(stream.first_at - stream.sent_at)
        if self._is_measuring:
            self._traffic.tokens += tokens
            self._traffic.events += events
        if stream.has_ended:
            if self._is_ending:
                self._poll.unregister(number)
                self._streams.pop(number).connection.close()
            else:
                self._send(stream)


class _Stream:
    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_measured = False
        self.has_ended = False
        self.sent_at = 0.0
        self.first_at: float | None = None
        self._rest = b""
        self._has_status = False

    def begin(self, request: bytes, *, is_measured: bool) -> None:
        self.is_measured, self.has_ended, self.first_at = is_measured, False, None
        self._rest, self._has_status = b"", False
        self.sent_at = time.perf_counter()
        self.connection.sendall(request)

    def read(self) -> tuple[int, int]:
        """Tokens and events with text that are complete now."""
        data = self.connection.recv(1 << 18)
        if not data:
            raise LoadError("the server closed a connection in mid-stream")
        pending = self._rest + data
        if not self._has_status and len(pending) >= 12:
            if not pending.startswith(b"HTTP/1.1 200"):
                raise LoadError(f"the server answered {pending[:400].decode(errors='replace')}")
            self._has_status = True
        texts = _TEXT.findall(pending)
        counted = pending.rfind(b'"content":"%b"' % texts[-1]) + 1 if texts else 0  # what remains can not match again
        self._rest = pending[counted:]
        # The last chunk of the body follows [DONE].
        self.has_ended = self._rest.endswith(b"\r\n0\r\n\r\n")
        return sum(map(len, texts)), len(texts)
