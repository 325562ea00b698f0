"""The one request type that every front end builds."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pocketllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt with its sampling, before any tokenizer has seen it.

    Args:
        prompt: text, or token ids; for a chat, the `role: content` rendering used where the checkpoint has no template.
        sampling: what the caller asked for; None fields take the checkpoint's defaults.
        request_id: the caller's, or a new one.
        default_max_tokens: budget where `sampling` has none, cut to what the context leaves; None is all that it leaves.
        metadata: for a chat, "messages" (normalized) and the template's options; empty for a plain prompt.
    """

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    request_id: str
    default_max_tokens: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)


def new_request_id(prefix: str) -> str:
    """A fresh id such as `chatcmpl-9f…`."""
    return f"{prefix}-{uuid.uuid4().hex}"
