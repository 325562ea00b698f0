"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.protocol.chat import chat_request
from pocketllm.protocol.request import GenerationRequest
from pocketllm.server.exchange import generate
from pocketllm.server.state import ServerState


async def chat_completions(request: Request) -> Response:
    """Answer one conversation, whole or as a stream."""
    return await generate(request, "chat", _build)


def _build(body: dict[str, Any], state: ServerState) -> list[GenerationRequest]:
    request = chat_request(body, state.args.default_max_tokens)
    reports_calls = not body.get("stream") or "streamed_tool_calls" in state.features
    return [replace(request, reports_calls=reports_calls, is_streamed=body.get("stream") is True)]
