"""Reasoning: the part of an answer that a model writes for itself, between two control tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pocketllm.text.tokenizer import Tokenizer

_MARKERS = (("<think>", "</think>"),)
_TAIL = 8  # tokens of white space, and more, that a template may put after the opening one


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """Ids of the tokens around the reasoning. They are found by id, so that text which merely spells them is no marker."""

    start_id: int
    end_id: int

    def is_open(self, prompt_ids: Sequence[int], tokenizer: Tokenizer) -> bool:
        """Whether the prompt ends within the reasoning: with the opening token, and white space at most after it."""
        for token_id in reversed(prompt_ids[-_TAIL:]):
            if token_id == self.start_id:
                return True
            spelled = tokenizer.token_bytes(token_id)
            if token_id == self.end_id or not spelled or spelled.strip():  # a control token, with no bytes, ends a turn, such as one that spells the marker
                return False
        return False


def find_markers(tokenizer: Tokenizer) -> ReasoningMarkers | None:
    """The markers of a vocabulary in which each is one token, or None."""
    for start, end in _MARKERS:
        start_id, end_id = tokenizer.backend.token_to_id(start), tokenizer.backend.token_to_id(end)
        if start_id is not None and end_id is not None:
            return ReasoningMarkers(start_id, end_id)
    return None
