"""What is acted on: the features that lift the rules of fields.py, and that decide on the form of answers."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from pocketllm.backends.base import Capabilities

Surface = Literal["full", "guide"]
SURFACES: tuple[Surface, ...] = get_args(Surface)

# What the host does by itself, with the words of the documentation. `guide` has none of it.
HOST_FEATURES: dict[str, str] = {
    "include_usage": "a stream's last chunk carries the token counts when asked for",
    "streamed_tool_calls": "tool calls are streamed as tool calls",
    "single_tool_call": "an answer is held to one tool call",
    "token_id_prompts": "a prompt may be token ids",
    "streamed_logprobs": "log probabilities are streamed with their tokens",
    "usage_details": "usage tells cached and reasoning tokens",
    "null_keys": "empty `refusal` and `logprobs` are present as null",
    "keep_alive": "a silent stream carries comments",
    "request_id_header": "answers have an X-Request-Id header",
    "model_by_id": "GET /v1/models/{id}",
}

# What the host does with the help of a grammar, so only where the engine takes one.
GRAMMAR_FEATURES: dict[str, str] = {
    "tool_choice": "calls are enforced or forbidden by a grammar",
    "strict_tools": "arguments are held to a tool's schema",
}

# The engine's declarations that `guide` knows; those it does not know are masked there, whatever the engine declares.
GUIDE_FLAGS = frozenset(
    {
        "per_request_sampling",
        "per_request_top_k",
        "continuous_batching",
        "chunked_prefill",
        "paged_kv",
        "prefix_caching",
        "logprobs",
        "structured_outputs",
    }
)

_FLAGS = tuple(field.name for field in dataclasses.fields(Capabilities) if field.type in (bool, "bool"))
_HOST = frozenset(HOST_FEATURES)
_WITH_GRAMMAR = _HOST | frozenset(GRAMMAR_FEATURES)


def features(capabilities: Capabilities, surface: Surface) -> frozenset[str]:
    """Names of everything that is acted on.

    Args:
        capabilities: of the loaded plane; each of its true flags is a feature of the same name.
        surface: "guide" masks what is not in the API guide: the host's own features, and flags that the guide does not know.
    """
    declared = frozenset(name for name in _FLAGS if getattr(capabilities, name))
    if surface == "guide":
        return declared & GUIDE_FLAGS
    return declared | (_WITH_GRAMMAR if "structured_outputs" in declared else _HOST)
