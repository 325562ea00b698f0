"""POST /v1/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.protocol.chat import sampling_from
from pocketllm.protocol.conditions import whole_number
from pocketllm.protocol.fields import checked_text, refusal
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.server.exchange import generate
from pocketllm.server.state import ServerState

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def completions(request: Request) -> Response:
    """Complete one prompt, whole or as a stream."""
    return await generate(request, "completions", _build)


def _build(body: dict[str, Any], _state: ServerState) -> list[GenerationRequest]:
    prompt = body.get("prompt")
    if prompt is None:
        raise refusal("prompt", None, "there is nothing to complete", 'Send "prompt" as a string or an array of token ids', is_shape=True)
    sampling, request_id = sampling_from(body, "completions"), new_request_id("cmpl")
    prompts = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], (str, list)) else [prompt]
    return [GenerationRequest(_text_or_ids(one), sampling, request_id, DEFAULT_MAX_TOKENS) for one in prompts]


def _text_or_ids(prompt: str | list[Any]) -> str | tuple[int, ...]:
    if isinstance(prompt, str):
        return checked_text(prompt, "prompt")
    return tuple(whole_number(token_id) or 0 for token_id in prompt)
