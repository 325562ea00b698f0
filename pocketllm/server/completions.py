"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.config import ServerArgs
from pocketllm.protocol.chat import prompts_of
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.protocol.sampling import sampling_from
from pocketllm.server.exchange import generate

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    """Complete one prompt, whole or as a stream."""
    return await generate(request, "completions", _build)


def _build(body: dict[str, Any], _args: ServerArgs) -> GenerationRequest:
    prompts = prompts_of(body)
    return GenerationRequest(prompts[0], sampling_from(body, "completions"), new_request_id("cmpl"), DEFAULT_MAX_TOKENS)
