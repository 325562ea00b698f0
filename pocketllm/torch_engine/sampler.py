"""From logits to token ids, row by row: greedy, temperature, top-k, top-p, each row with its own seeded stream.

A row's n-th draw depends on its seed and n alone, so neither the rest of the batch nor a preemption changes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pocketllm.backends.base import EngineRequest

_NUCLEUS_GUESS = 256  # a nucleus is rarely larger; taking so many largest logits spares a full sort


def uniform(seed: int, draw: int) -> float:
    """Number `draw` of the stream of `seed`, in [0, 1): Philox4x64-10 with the seed as key and `draw` as counter (Salmon et al., 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[draw, 0, 0, 0])).random())


def sample(logits: torch.Tensor, requests: Sequence[EngineRequest], draws: Sequence[int]) -> list[int | None]:
    """One id a row, or None for a row whose logits are not finite.

    Args:
        logits: [num_rows, vocab_size] float32.
        requests: the rows' requests, for their sampling.
        draws: how many tokens each row has drawn before.
    """
    best, greedy_ids = logits.max(dim=-1)  # a NaN anywhere in a row is that row's maximum
    finite = torch.isfinite(best).tolist()
    ids: list[int | None] = list(greedy_ids.tolist())
    for row, request in enumerate(requests):
        if not finite[row]:
            ids[row] = None
        elif request.temperature > 0 and request.top_k != 1:  # which of two equal logits topk takes is not defined: here it is the first
            ids[row] = _draw(logits[row].double() - best[row], request, uniform(request.seed, draws[row]))
    return ids


def _draw(logits: torch.Tensor, request: EngineRequest, u: float) -> int:
    """Inverse-CDF draw at `u` from one row [vocab_size] float64: temperature, then top-k, then top-p over what top-k left.

    The largest logit is 0, so that the smallest temperature does not overflow.
    """
    scaled = logits / request.temperature
    vocab_size = scaled.shape[0]
    if 0 < request.top_k < vocab_size:
        values, ids = scaled.topk(request.top_k)
        probs = values.softmax(dim=-1)
    elif request.top_p < 1:
        total = scaled.logsumexp(dim=-1)
        values, ids = scaled.topk(min(_NUCLEUS_GUESS, vocab_size))
        probs = (values - total).exp()
        if probs.sum() < request.top_p:
            values, ids = scaled.sort(descending=True)
            probs = (values - total).exp()
    else:
        probs, ids = scaled.softmax(dim=-1), None
    cumulative = probs.cumsum(dim=-1)
    size = probs.shape[0]
    if request.top_p < 1:
        size = min(size, int(torch.searchsorted(cumulative, request.top_p)) + 1)  # the id that crosses top_p is kept
    mass = cumulative[size - 1]
    index = min(int(torch.searchsorted(cumulative[:size], u * mass, right=True)), size - 1)
    return index if ids is None else int(ids[index])
