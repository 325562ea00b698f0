"""A real GenerationService over the fake backend: real tokenizer, real template, no model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import tokenizers

from pocketllm.backends.base import ProgressCallback
from pocketllm.backends.fake import FakeBackend
from pocketllm.checkpoint import GenerationDefaults
from pocketllm.config import ServerArgs
from pocketllm.generation import GenerationService
from pocketllm.server.app import create_app
from pocketllm.text.chat_template import ChatTemplate
from pocketllm.text.special_tokens import SpecialTokens
from pocketllm.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
    "{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}"
    "{% if drop_thinking is defined %}[drop {{ drop_thinking }}]{% endif %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
LETTERS = tuple(range(ord("a"), ord("z") + 1))


def byte_tokenizer() -> Tokenizer:
    """One token for each byte; ids are the bytes' values."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, SpecialTokens(), "bytes")


def make_service(backend: FakeBackend, progress: ProgressCallback = lambda _progress: None, *, seed: int | None = None) -> GenerationService:
    """`backend`, loaded, behind a real service."""
    backend.load(progress)
    return GenerationService(backend, byte_tokenizer(), ChatTemplate(TEMPLATE, {}), GenerationDefaults(), model_name="fake-1", seed=seed)


def fake(**options: Any) -> FakeBackend:
    """A fake backend that answers in letters."""
    return FakeBackend(**{"alphabet": LETTERS, **options})


@contextlib.asynccontextmanager
async def in_process(backend: FakeBackend | None = None, *, wait: bool = True, **server_options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application without a socket."""
    engine = backend or fake()
    app = create_app(ServerArgs(**server_options), lambda progress: make_service(engine, progress))
    transport = httpx.ASGITransport(app=app)
    async with app.router.lifespan_context(app), httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        client.headers.pop("user-agent")
        if wait:
            await asyncio.wait_for(app.state.server.loaded.wait(), 10)
        yield client


def call(method: str, path: str, backend: FakeBackend | None = None, *, headers: dict[str, str] | None = None, **options: Any) -> httpx.Response:
    """One request to a fresh application. `json` and `content` are the request's; other options are the server's."""
    sent = {name: options.pop(name) for name in ("json", "content") if name in options}

    async def run() -> httpx.Response:
        async with in_process(backend, **options) as client:
            return await client.request(method, path, headers=headers, **sent)

    return asyncio.run(run())


async def eventually(condition: Callable[[], bool], seconds: float = 10) -> None:
    """Wait until `condition` holds, as long as a busy machine may take."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, **fields}


@dataclass
class LiveServer:
    """A server on a real socket, in a thread of this process."""

    url: str
    backend: FakeBackend
    state: Any


StartServer = Callable[..., LiveServer]
