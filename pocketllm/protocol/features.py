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
    "template_options": "the chat template takes variables of the caller's, and an assistant's last message goes on",
    "usage_details": "usage tells cached and reasoning tokens",
    "null_keys": "empty `refusal` and `logprobs` are present as null",
    "keep_alive": "a silent stream carries comments",
    "request_id_header": "answers have an X-Request-Id header",
    "model_by_id": "GET /v1/models/{id}",
}

# What the host does with the help of a grammar, so only where the engine takes one.
GRAMMAR_FEATURES: dict[str, str] = {
    "tool_choice": "calls are enforced or forbidden by a grammar",
    "answer_forms": "an answer is held to a regular expression, to one of several texts, or to a grammar",
    "thinking_budget": "the reasoning of an answer is closed after so many tokens",
    "strict_tools": "arguments are held to a tool's schema",
}

# What the host does with log probabilities, so only where the engine gives them.
RANKING_FEATURES: dict[str, str] = {
    "best_of": "of several candidates those with the highest mean log probability are the choices",
}

# What the host does where the vocabulary has tokens for it.
VOCABULARY_FEATURES: dict[str, str] = {
    "suffix": "a completion fills in the middle",
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


def features(capabilities: Capabilities, surface: Surface, of_vocabulary: frozenset[str] = frozenset()) -> frozenset[str]:
    """Names of everything that is acted on.

    Args:
        capabilities: of the loaded plane; each of its true flags is a feature of the same name.
        of_vocabulary: those of VOCABULARY_FEATURES that there are.
        surface: "guide" masks what is not in the API guide: the host's own features, and flags that the guide does not know.
    """
    declared = frozenset(name for name in _FLAGS if getattr(capabilities, name))
    if surface == "guide":
        return declared & GUIDE_FLAGS
    grammar = frozenset(GRAMMAR_FEATURES) if "structured_outputs" in declared else frozenset()
    ranking = frozenset(RANKING_FEATURES) if "logprobs" in declared else frozenset()
    return declared | _HOST | grammar | ranking | of_vocabulary
