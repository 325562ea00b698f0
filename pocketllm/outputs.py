"""What generation hands back: a finished answer, or one event of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Args:
        prompt_tokens: tokens of the prompt, the chat template's included.
        completion_tokens: tokens that the engine generated, the EOS step included.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, int]:
        """The three counts of OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """One finished answer.

    Args:
        request_id: id of the request, as accepted by `cancel`.
        text: decoded answer, special tokens left out.
        token_ids: generated ids, the EOS id left out.
        finish_reason: "stop" at an EOS id, "length" when the token budget or the context ended first.
        usage: token counts.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One step of a stream. The texts of a stream's events, joined, are the finished answer's text.

    Args:
        request_id: id of the request.
        text: text that this event adds; may be empty while a multi-byte character is incomplete.
        token_ids: ids that this event adds, the EOS id left out.
        finish_reason: set on the last event only.
        usage: set on the last event only.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
