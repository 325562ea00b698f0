"""A real GenerationService over the fake backend: real tokenizer, real template, no model."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import tokenizers

from pocketllm.backends.base import Backend, ProgressCallback
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
QWEN_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}\n{% endif %}Functions:\n"
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "To call one, write\n<tool_call>\n<function=NAME>\n<parameter=KEY>\nVALUE\n</parameter>\n</function>\n</tool_call>\n<|im_end|>\n"
    "{% elif messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{% if not loop.first %}{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}\n<tool_call>\n<function={{ call.function.name }}>\n"
    "{% for key, value in call.function.arguments | items %}<parameter={{ key }}>\n"
    "{{ value if value is string else value | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """One token for each byte; ids are the bytes' values."""
    return Tokenizer(_byte_backend(), SpecialTokens(), "bytes")


def qwen_tokenizer() -> Tokenizer:
    """Bytes, as above, "é" as one token, and then the added tokens of a Qwen."""
    backend = _byte_backend([("Ã", "©")])
    backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", "<tool_call>", "</tool_call>")])
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return Tokenizer(backend, SpecialTokens(eos_token="<|im_end|>"), "bytes and markers")


def _byte_backend(merges: Sequence[tuple[str, str]] = ()) -> tokenizers.Tokenizer:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}
    vocabulary |= {first + second: 256 + index for index, (first, second) in enumerate(merges)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=list(merges)))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return backend


class QwenLike(FakeBackend):
    """A fake backend that `make_service` serves with a Qwen's markers and template."""


def qwen_like(*answers: str | Sequence[int], **options: Any) -> QwenLike:
    """A fake backend with markers of reasoning and of calls, that gives `answers` in turn, each then ended by the model; letters without any."""
    tokenizer = qwen_tokenizer()
    scripts = [tokenizer.encode(answer, add_special_tokens=False) if isinstance(answer, str) else answer for answer in answers]
    return QwenLike(**{"alphabet": LETTERS, "vocab_size": tokenizer.vocab_size, "answers": scripts or None, "context_length": 4096, **options})


def make_service(backend: FakeBackend, progress: ProgressCallback = lambda _progress: None, *, seed: int | None = None) -> GenerationService:
    """`backend`, loaded, behind a real service."""
    backend.load(progress)
    if isinstance(backend, QwenLike):
        tokenizer = qwen_tokenizer()
        template, defaults = ChatTemplate(QWEN_TEMPLATE, {}), GenerationDefaults(eos_token_ids=(tokenizer.vocab_size - 1,))
        return GenerationService(backend, tokenizer, template, defaults, model_name="fake-qwen", seed=seed)
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
    backend: Backend
    state: Any


StartServer = Callable[..., LiveServer]
