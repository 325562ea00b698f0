"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.config import ServerArgs
from pocketllm.protocol.chat import sampling_from
from pocketllm.protocol.conditions import whole_number
from pocketllm.protocol.fields import checked_text, refusal
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.server.exchange import generate

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    """Complete one prompt, whole or as a stream."""
    return await generate(request, "completions", _build)


def _build(body: dict[str, Any], _args: ServerArgs) -> GenerationRequest:
    prompt = body.get("prompt")
    if prompt is None:
        raise refusal("prompt", None, "there is nothing to complete", 'Send "prompt" as a string or an array of token ids', is_shape=True)
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    text_or_ids = checked_text(prompt, "prompt") if isinstance(prompt, str) else tuple(whole_number(token_id) or 0 for token_id in prompt)
    return GenerationRequest(text_or_ids, sampling_from(body), new_request_id("cmpl"), DEFAULT_MAX_TOKENS)
