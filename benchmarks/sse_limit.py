"""The limit of a streaming server: uvicorn and a bare SSE loop. It checks nothing, generates nothing, and sends one ready-made event a token.

    python benchmarks/sse_limit.py --tokens-per-second 1000

A clock stands for the engine: while streams run it ticks at the given rate, and each tick is one token for every stream, so that a new
stream waits for the next tick as it would for the next step of an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import queue
import socket
import sys
import threading
import time
from typing import Any

import uvicorn

_HEAD = {"id": "chatcmpl-00000000000000000000000000000000", "object": "chat.completion.chunk", "created": 1700000000, "model": "fake-1"}
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


def _event(delta: dict[str, Any], finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
    return b"data: " + json.dumps({**_HEAD, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


_OPENING = _event({"role": "assistant", "content": "", "refusal": None})
_TOKEN = _event({"content": "a"})
_END = _event({}, "length") + b"data: [DONE]\n\n"


class _Clock:
    """Ticks while anybody waits for it, on a thread of its own, as an engine does: an event loop's timers are too coarse for it."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._tick: asyncio.Future[None] | None = None
        self._wanted: queue.SimpleQueue[tuple[asyncio.AbstractEventLoop, asyncio.Future[None]]] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    async def tick(self) -> None:
        """Until the next tick."""
        if self._tick is None or self._tick.done():
            loop = asyncio.get_running_loop()
            self._tick = loop.create_future()
            self._wanted.put((loop, self._tick))
        await self._tick  # shared, which is safe while no task is cancelled: uvicorn cancels none

    def _run(self) -> None:
        due = 0.0
        while True:
            loop, tick = self._wanted.get()
            now = time.perf_counter()
            due = max(due, now - self._interval)
            if due > now:
                time.sleep(due - now)
            due += self._interval
            loop.call_soon_threadsafe(tick.set_result, None)


class _App:
    def __init__(self, clock: _Clock) -> None:
        self._clock = clock

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message.get("more_body"):
                break
        tokens = json.loads(body)["max_tokens"]
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await send({"type": "http.response.body", "body": _OPENING, "more_body": True})
        for _ in range(tokens):
            await self._clock.tick()
            await send({"type": "http.response.body", "body": _TOKEN, "more_body": True})
        await send({"type": "http.response.body", "body": _END})


def main() -> int:
    parser = argparse.ArgumentParser(description="uvicorn with a bare SSE loop.")
    parser.add_argument("--tokens-per-second", type=float, required=True, help="rate of each stream")
    parser.add_argument("--loop", default="auto", help="event loop of uvicorn [auto]")
    parser.add_argument("--http", default="auto", help="HTTP parser of uvicorn [auto]")
    options = parser.parse_args()
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # a protocol of 0 would leave asyncio's connections with Nagle's delay
    listener.bind(("127.0.0.1", 0))
    listener.listen(1024)
    print(f"sse_limit is ready at http://127.0.0.1:{listener.getsockname()[1]}", file=sys.stderr, flush=True)
    app: Any = _App(_Clock(1 / options.tokens_per_second))
    config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", loop=options.loop, http=options.http, server_header=False)
    uvicorn.Server(config).run(sockets=[listener])
    return 0


if __name__ == "__main__":
    sys.exit(main())
