"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.config import ServerArgs
from pocketllm.protocol.chat import TEMPLATE_FIELDS, build_chat_request, sampling_from
from pocketllm.protocol.request import GenerationRequest
from pocketllm.server.exchange import generate


async def chat_completions(request: Request) -> Response:
    """Answer one conversation, whole or as a stream."""
    return await generate(request, "chat", _build)


def _build(body: dict[str, Any], args: ServerArgs) -> GenerationRequest:
    options = {name: body[name] for name in TEMPLATE_FIELDS if name in body}
    return build_chat_request(
        body.get("messages", ()), sampling_from(body), request_id=body.get("request_id"), default_max_tokens=args.default_max_tokens, **options
    )
