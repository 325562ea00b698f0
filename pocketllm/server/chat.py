"""POST /v1/chat/completions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.protocol.chat import CHAT_OPTIONS, build_chat_request, sampling_from
from pocketllm.protocol.request import GenerationRequest
from pocketllm.server.exchange import generate
from pocketllm.server.state import ServerState


async def chat_completions(request: Request) -> Response:
    """Answer one conversation, whole or as a stream."""
    return await generate(request, "chat", _build)


def _build(body: dict[str, Any], state: ServerState) -> list[GenerationRequest]:
    options = {name: body[name] for name in CHAT_OPTIONS if name in body}
    request = build_chat_request(
        body.get("messages"),
        sampling_from(body, "chat"),
        request_id=body.get("request_id"),
        default_max_tokens=state.args.default_max_tokens,
        **options,
    )
    if body.get("stream") and request.tools is not None and "streamed_tool_calls" not in state.features:
        request = replace(request, tools=replace(request.tools, is_reported=False))
    return [request]
