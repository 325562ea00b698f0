"""Connections that stream answers. While the clock runs they only note what came when: reading it costs time that would be missing elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import httptools

from pocketllm.bench.endpoint import Endpoint
from pocketllm.bench.exchange import Exchange


class StreamClient:
    """Sends requests of one endpoint on connections that it keeps open, a new one where all are in use.

    Args:
        endpoint: where to.
        clock: seconds.
        timeout: most seconds that a request may take.
    """

    def __init__(self, endpoint: Endpoint, clock: Callable[[], float], timeout: float) -> None:
        self._endpoint = endpoint
        self._tls = endpoint.tls
        self._clock = clock
        self._timeout = timeout
        self._idle: list[_Connection] = []

    async def send(self, request: bytes, exchange: Exchange) -> None:
        """Send `request` and fill `exchange` until its body has ended. Failures are noted there, not raised."""
        exchange.sent_at = self._clock()
        connection: _Connection | None = None
        try:
            async with asyncio.timeout(self._timeout):
                connection = await self._connection()
                await connection.exchange(request, exchange)
        except TimeoutError:
            exchange.failure = "timed out"
        except (OSError, UnicodeError) as error:  # a host that can be no name is a UnicodeError
            exchange.failure = type(error).__name__
        except httptools.HttpParserError:
            exchange.failure = "an answer that is no HTTP"
        exchange.ended_at = self._clock()
        if connection is None:
            return
        if exchange.failure is None and connection.is_reusable:
            self._idle.append(connection)
        else:
            connection.close()

    def close(self) -> None:
        """Close the idle connections."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection
        loop = asyncio.get_running_loop()
        _, opened = await loop.create_connection(lambda: _Connection(self._clock), self._endpoint.host, self._endpoint.port, ssl=self._tls)
        return opened


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now = 0.0
        self._transport: asyncio.Transport | None = None
        self._exchange: Exchange | None = None
        self._ended: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self.is_reusable = True

    async def exchange(self, request: bytes, exchange: Exchange) -> None:
        """Raises OSError where the connection breaks, HttpParserError where the answer is none."""
        assert self._transport is not None
        self._exchange = exchange
        self._ended = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        try:
            await self._ended
        finally:
            self._exchange = self._ended = None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.close()

    # What the transport calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        self._now = self._clock()
        if self._parser is None or self._ended is None:  # nobody asked for it
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if self._exchange is not None and self._exchange.parts and error is None:
            self._end()  # a body without a length ends so; whether the stream was complete, its events say
        else:
            self._fail(error or ConnectionResetError("closed without an answer"))

    # What the parser calls.

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        assert self._exchange is not None
        self._exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._exchange is not None
        self._exchange.parts.append((self._now, body))

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.is_reusable = self._parser.should_keep_alive()
        self._end()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _fail(self, error: Exception) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_exception(error)
