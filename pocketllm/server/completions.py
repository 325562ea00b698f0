"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.protocol.chat import prompts_of
from pocketllm.protocol.refusals import checked_text
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.protocol.sampling import sampling_from
from pocketllm.server.exchange import generate
from pocketllm.server.state import ServerState

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    """Complete each prompt, whole or as a stream."""
    return await generate(request, "completions", _build)


def _build(body: dict[str, Any], _state: ServerState) -> list[GenerationRequest]:
    sampling, request_id = sampling_from(body, "completions"), new_request_id("cmpl")
    suffix = checked_text(body.get("suffix") or "", "suffix")
    echo, is_streamed = body.get("echo") is True, body.get("stream") is True
    return [
        GenerationRequest(prompt, sampling, request_id, DEFAULT_MAX_TOKENS, echo=echo, is_streamed=is_streamed, suffix=suffix) for prompt in prompts_of(body)
    ]
