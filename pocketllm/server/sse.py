"""Streaming over HTTP: an answer of server-sent events, and the watch for a client that goes away."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
Write = Callable[[bytes], Awaitable[None]]

logger = logging.getLogger("pocketllm.server")

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # a reverse proxy must not hold the events back
}


class ClientDisconnected(Exception):
    """The client has closed its connection before the answer was complete."""


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. The request's body must have been read.

    Raises:
        ClientDisconnected: the client went away first.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnect(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnected
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """A 200 whose body is what `produce` writes. When the client goes away, `produce` is cancelled.

    Args:
        produce: writes encoded events, each awaited, and returns at the end of the stream; it must not fail.
        headers: beside the ones that event streams need.
        on_end: awaited once the answer is complete or the client has gone.
        deadline: time of the event loop at which a client that does not read its answer is given up, or None.
    """

    def __init__(
        self, produce: Callable[[Write], Awaitable[None]], headers: dict[str, str], on_end: Callable[[], Awaitable[None]], deadline: float | None = None
    ) -> None:
        super().__init__(headers={**HEADERS, **headers})
        del self.headers["content-length"]
        self._produce = produce
        self._on_end = on_end
        self._deadline = deadline

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout_at(self._deadline):
                await unless_disconnected(receive, self._send(send))
        except ClientDisconnected:
            pass  # nobody is left to tell
        except TimeoutError:
            logger.warning("A client did not read its stream until the deadline; the connection is closed")
        finally:
            await self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        def write(chunk: bytes) -> Awaitable[None]:
            return send({"type": "http.response.body", "body": chunk, "more_body": True})

        await self._produce(write)
        await send({"type": "http.response.body", "body": b"", "more_body": False})
