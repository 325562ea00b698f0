"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.config import ServerArgs
from pocketllm.protocol.chat import chat_request
from pocketllm.protocol.request import GenerationRequest
from pocketllm.server.exchange import generate


async def chat_completions(request: Request) -> Response:
    """Answer one conversation, whole or as a stream."""
    return await generate(request, "chat", _build)


def _build(body: dict[str, Any], args: ServerArgs) -> GenerationRequest:
    return chat_request(body, args.default_max_tokens)
