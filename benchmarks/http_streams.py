"""Streaming completions of given prompts over raw sockets: when each event came, by request."""

from __future__ import annotations

import json
import re
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from load_generator import LoadError

_TEXT = re.compile(rb'"text":"(?:[^"\\]|\\.)+"')
_USAGE = re.compile(rb'"completion_tokens":(\d+)')
_END = b"\r\n0\r\n\r\n"  # the last chunk of a body


@dataclass
class Stream:
    """One request and what came back.

    Args:
        sent_at: clock when it was sent, in seconds.
        event_times: clock at each event with text.
        ended_at: clock at the end of the body.
        tokens: that the server says it generated.
    """

    sent_at: float
    event_times: list[float] = field(default_factory=list)
    ended_at: float = 0.0
    tokens: int = 0


class HttpStreams:
    """Clients that send `prompts` in their order, so many at a time, each on a connection that it keeps.

    Args:
        url: of the server.
        prompts: token ids of each.
        max_tokens: budget of each; greedy.
        concurrency: requests in flight.
        patience: seconds that all may take.
    """

    def __init__(self, url: str, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int, patience: float = 300) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "", parts.port or 80)
        self._requests = [_request(parts.netloc, prompt, max_tokens) for prompt in prompts]
        self._concurrency = min(concurrency, len(prompts))
        self._patience = patience
        self.streams: list[Stream] = []
        self._rest: dict[int, bytes] = {}
        self._of: dict[int, Stream] = {}

    def run(self) -> list[Stream]:
        """All streams, in the order of the prompts.

        Raises:
            LoadError: an answer is not a 200, a connection closed early, or patience ended.
        """
        poll = select.epoll()
        sockets = {connection.fileno(): connection for connection in (socket.create_connection(self._address) for _ in range(self._concurrency))}
        end = time.perf_counter() + self._patience
        try:
            for number, connection in sockets.items():
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                poll.register(number, select.EPOLLIN)
                self._send(number, connection)
            while self._of:
                if time.perf_counter() > end:
                    raise LoadError(f"{len(self._of)} requests did not end within {self._patience:.0f} s")
                for number, _ in poll.poll(1):
                    self._read(number, sockets[number])
        finally:
            poll.close()
            for connection in sockets.values():
                connection.close()
        return self.streams

    def _send(self, number: int, connection: socket.socket) -> None:
        if len(self.streams) == len(self._requests):
            self._of.pop(number, None)
            return
        data = self._requests[len(self.streams)]
        stream = Stream(time.perf_counter())
        self.streams.append(stream)
        self._of[number], self._rest[number] = stream, b""
        connection.sendall(data)

    def _read(self, number: int, connection: socket.socket) -> None:
        data = connection.recv(1 << 18)
        now = time.perf_counter()
        if number not in self._of:
            raise LoadError(f"the server sent what nobody asked for: {data[:200]!r}")
        stream, pending = self._of[number], self._rest[number] + data
        if not data:
            raise LoadError(f"the server closed a connection in mid-stream: {pending[-200:]!r}")
        if not stream.event_times and not pending.startswith(b"HTTP/1.1 200"[: len(pending)]):
            raise LoadError(f"the server answered {pending[:400].decode(errors='replace')}")
        events = list(_TEXT.finditer(pending))
        if events:
            stream.event_times.extend([now] * len(events))
            pending = b"HTTP/1.1 200" + pending[events[-1].end() :]  # what is left can not match again
        if pending.endswith(_END):
            if (usage := _USAGE.search(pending)) is None:
                raise LoadError(f"a stream ended without its usage: {pending[-400:]!r}")
            stream.tokens, stream.ended_at = int(usage[1]), now
            self._send(number, connection)
            return
        self._rest[number] = pending


def _request(host: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    body = json.dumps(
        {"prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}, separators=(",", ":")
    )
    return f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
