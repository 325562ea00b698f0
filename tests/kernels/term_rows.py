"""Rows with every term of LogitTerms, and logits for them to draw from."""

from __future__ import annotations

from typing import Any

import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.torch_engine.scheduler import Row

VOCAB = 200  # as many as the CPU's sampler gives noise of their own
PROMPT = (3, 7, 7, 11, 150, 199)
ENDS = frozenset({0, 7})

# Each feature alone, at both ends of what it takes.
ALONE: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.7},
    "repetition_below_one": {"repetition_penalty": 0.4},
    "frequency": {"frequency_penalty": 1.1},
    "frequency_below_zero": {"frequency_penalty": -2.0},
    "presence": {"presence_penalty": 2.0},
    "bias": {"logit_bias": ((5, 4.5), (7, -100.0), (180, 3.25))},
    "min_p": {"min_p": 0.2},
    "min_p_of_one": {"min_p": 1.0},
    "min_tokens": {"min_tokens": 3},
    "allowed": {"allowed_token_ids": (0, 5, 7, 90, 91, 92, 93, 199)},
    "bad_words": {"bad_words": ((12,), (5, 6), (6, 5), (8, 9, 10), (9, 9, 9, 9))},
}
ALL = LogitTerms(1.3, 0.7, 0.4, ((5, 4.0), (9, 5.0), (0, 20.0)), 0.05, 4, (*range(0, VOCAB, 2), 5, 7, 9), ((12,), (5, 6), (9, 9, 9)))
EVERY = [*(LogitTerms(**terms) for terms in ALONE.values()), ALL]


def request(terms: LogitTerms | None, seed: int = 1, temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0) -> EngineRequest:
    return EngineRequest("r", PROMPT, 64, temperature, top_p, top_k, seed, eos_token_ids=ENDS, terms=terms)


def requests_of(terms: LogitTerms | None, seed: int) -> list[EngineRequest]:
    """Greedy, from all, and with both cuts."""
    return [request(terms, seed, 0.0), request(terms, seed + 1), request(terms, seed + 2, 1.2, 30, 0.8)]


def row_of(one: EngineRequest, answer: list[int]) -> Row:
    row = Row(one)
    row.token_ids += answer
    return row


def logits_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
