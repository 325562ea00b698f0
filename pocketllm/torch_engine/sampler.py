"""From logits to token ids, row by row: greedy, temperature, top-k, top-p, each row with its own seeded stream.

A row's n-th draw depends on its seed and n alone, so neither the rest of the batch nor a preemption changes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pocketllm.backends.base import EngineRequest

_NO_MASKS: Mapping[int, npt.NDArray[np.uint32]] = {}
_NUCLEUS_GUESS = 256  # a nucleus is rarely larger; taking so many largest logits spares a full sort

# What a byte of a mask adds to eight logits, [256, 8]: 0 where its bit is set, else minus infinity. Copying rows of it is far faster than where().
_BYTE_BIAS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(np.float32)


def uniform(seed: int, draw: int) -> float:
    """Number `draw` of the stream of `seed`, in [0, 1): Philox4x64-10 with the seed as key and `draw` as counter (Salmon et al., 2011)."""
    return float(np.random.Generator(np.random.Philox(key=seed, counter=[draw, 0, 0, 0])).random())


def sample(
    logits: torch.Tensor, requests: Sequence[EngineRequest], draws: Sequence[int], masks: Mapping[int, npt.NDArray[np.uint32]] = _NO_MASKS
) -> list[int | None]:
    """One id a row, or None for a row whose logits are not finite, or not where its mask allows an id.

    Args:
        logits: [num_rows, vocab_size] float32; they are left as they are.
        requests: the rows' requests, for their sampling.
        draws: how many tokens each row has drawn before.
        masks: by row, words of bits as `TokenConstraint.fill` writes them: ids whose bit is not set can't be drawn.
    """
    best, greedy_ids = logits.max(dim=-1)  # a NaN anywhere in a row is that row's maximum
    finite = torch.isfinite(best).tolist()
    ids: list[int | None] = list(greedy_ids.tolist())
    for row, request in enumerate(requests):
        if not finite[row]:
            ids[row] = None
            continue
        is_greedy = request.temperature == 0 or request.top_k == 1  # which of two equal logits topk takes is not defined: here it is the first
        if is_greedy and row not in masks:
            continue
        own, largest = logits[row], best[row]
        if row in masks:
            own = own + _bias(masks[row], own.shape[0])
            largest, greedy_id = own.max(dim=-1)
            ids[row] = int(greedy_id) if math.isfinite(largest) else None
        if not is_greedy and ids[row] is not None:
            ids[row] = _draw(own.double() - largest, request, uniform(request.seed, draws[row]))
    return ids


def _bias(words: npt.NDArray[np.uint32], vocab_size: int) -> torch.Tensor:
    """[vocab_size] float32: 0 where the id's bit is set, else minus infinity."""
    return torch.from_numpy(_BYTE_BIAS.take(words.astype("<u4", copy=False).view(np.uint8), axis=0)).view(-1)[:vocab_size]


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
    mass = float(cumulative[size - 1])
    # Below the whole mass even where the product rounds up to it: behind the id that completes it lie ids that can't be drawn.
    target = min(u * mass, math.nextafter(mass, 0))
    index = int(torch.searchsorted(cumulative[:size], target, right=True))
    return index if ids is None else int(ids[index])
