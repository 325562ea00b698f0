"""Filling in the middle: the control tokens with which some vocabularies mark what is before and behind a gap (Bavarian et al., arXiv 2207.14255)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pocketllm.text.tokenizer import Tokenizer

# ruff: noqa: RUF001 (the bars of DeepSeek's tokens are full-width ones)
_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
)


@dataclass(frozen=True, slots=True)
class InfillMarkers:
    """Ids of the tokens before the prefix, between prefix and suffix, and after the suffix, where the answer begins."""

    prefix_id: int
    suffix_id: int
    middle_id: int

    def prompt(self, prefix: Sequence[int], suffix: Sequence[int]) -> tuple[int, ...]:
        """The prompt for what is between `prefix` and `suffix`."""
        return (self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id)


def find_infill_markers(tokenizer: Tokenizer) -> InfillMarkers | None:
    """The markers of a vocabulary in which each is one token, or None."""
    for markers in _MARKERS:
        prefix_id, suffix_id, middle_id = (tokenizer.backend.token_to_id(marker) for marker in markers)
        if prefix_id is not None and suffix_id is not None and middle_id is not None:
            return InfillMarkers(prefix_id, suffix_id, middle_id)
    return None
