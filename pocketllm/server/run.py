"""Serving: the socket first, then the model, then requests until a signal."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import uvicorn
from starlette.applications import Starlette

from pocketllm.config import ServerArgs
from pocketllm.errors import ConfigurationError, PocketLLMError
from pocketllm.server.app import create_app
from pocketllm.server.state import Load, ServerState

_CLOSING_SECONDS = 3  # for cancelled requests to say so to their clients


def serve(args: ServerArgs, load: Load) -> int:
    """Serve until SIGINT or SIGTERM; the exit code of the process.

    Args:
        args: the server's options.
        load: opens the model; called once the socket is bound.

    Raises:
        ConfigurationError: the address can't be listened on.
        PocketLLMError: the model can't be loaded.
    """
    listener = bind(args.host, args.port)
    say(f"Listening on {url_of(listener)} while the model loads")
    app = create_app(args, load)
    server = _Server(app, args, listener)
    server.run(sockets=[listener])
    error = server.state.load_error
    if isinstance(error, PocketLLMError):
        raise error
    if error is not None:
        raise PocketLLMError(f"The model could not be loaded: {type(error).__name__}: {error}") from error
    return 0


def bind(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        ConfigurationError: the port is in use or not permitted, or the host is no address of this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:  # UnicodeError: no such name can be asked for
        reason = getattr(error, "strerror", None) or "it is no host name"
        raise ConfigurationError(f'host "{host}" can not be resolved ({reason}): choose another with --host', param="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1024)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigurationError(f"port {port} is in use: choose another with --port", param="port") from None
        if error.errno == errno.EACCES:
            raise ConfigurationError(f"port {port} needs more rights than this process has: choose one above 1023 with --port", param="port") from None
        raise ConfigurationError(f"can not listen on {host} ({error.strerror}): choose another address with --host", param="host") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL at which this machine reaches `listener`."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def say(line: str) -> None:
    """One line for the person at the terminal."""
    print(f"pocketllm: {line}", file=sys.stderr, flush=True)


class _Server(uvicorn.Server):
    """uvicorn, with a load that may fail, requests that end in good order, and exit code 0 after a signal."""

    def __init__(self, app: Starlette, args: ServerArgs, listener: socket.socket) -> None:
        grace = int(args.shutdown_timeout) + 2 * _CLOSING_SECONDS  # never reached: _end_late_requests comes before, and makes no noise
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, server_header=False, ws="none", timeout_graceful_shutdown=grace))
        self.state: ServerState = app.state.server
        self._args = args
        self._url = url_of(listener)
        self._is_urgent = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._loading = asyncio.ensure_future(self._announce())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._loading.cancel()
        limit = asyncio.ensure_future(self._end_late_requests())
        try:
            await super().shutdown(sockets=sockets)
        finally:
            limit.cancel()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal asks for the shutdown. Another one does not wait for running requests, and is as orderly."""
        self._is_urgent = self.should_exit
        self.should_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn's, but the signal is not raised again: a server that was asked to stop and did exits with 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    async def _announce(self) -> None:
        await self.state.loaded.wait()
        if self.state.load_error is not None:
            self.should_exit = True
            return
        # What stands now, 200,000 objects with torch, stays until the end: each full collection would stop every stream for 0.1 s to look through it again.
        gc.collect()
        gc.freeze()
        body = '{"messages": [{"role": "user", "content": "Hello!"}]}'
        key = ' -H "Authorization: Bearer $POCKETLLM_API_KEY"' if self._args.api_key else ""
        running = self.state.service.capabilities
        say(f"{self.state.model_name} is ready at {self._url} (backend {running.backend}, device {running.device})")
        say(f"try: curl {self._url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d {shlex.quote(body)}")

    async def _end_late_requests(self) -> None:
        """Cancel what runs past the limit; then close on clients that neither send the rest of a request nor read their answer."""
        began = asyncio.get_running_loop().time()
        while not self._is_urgent and (waited := asyncio.get_running_loop().time() - began) < self._args.shutdown_timeout:
            await asyncio.sleep(min(0.1, self._args.shutdown_timeout - waited))
        if count := self.state.cancel_all():
            say(f"cancelled {count} requests that were still running")
        await asyncio.sleep(_CLOSING_SECONDS)
        for connection in list(self.server_state.connections):
            connection.transport.abort()
