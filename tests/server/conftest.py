"""Live servers over the fake backend."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import uvicorn

from pocketllm.backends.fake import FakeBackend
from pocketllm.config import ServerArgs
from pocketllm.server.app import create_app
from pocketllm.server.run import bind, url_of
from pocketllm.server.state import Load
from tests.fake_serving import LiveServer, StartServer, fake, make_service


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """Starts live servers, and stops them after the test."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(backend: FakeBackend | None = None, load: Load | None = None, **options: Any) -> LiveServer:
        engine = backend or fake()
        args = ServerArgs(port=0, **options)
        listener = bind(args.host, args.port)
        app = create_app(args, load or (lambda progress: make_service(engine, progress)))
        server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        running.append((server, thread))
        url = url_of(listener)
        for _ in range(200):
            if httpx.get(f"{url}/ready").status_code == 200:
                break
        else:
            pytest.fail("the server did not become ready")
        return LiveServer(url, app.state.server.service.backend, app.state.server)

    yield start
    for server, thread in running:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()
