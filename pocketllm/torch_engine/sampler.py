"""From logits to token ids, row by row: greedy, temperature, top-k, top-p, each row with its own seeded stream.

A draw is the id with the largest sum of its log probability and of Gumbel noise (Gumbel, 1954; Maddison, Tarlow and Minka, 2014). The noise of an
id depends on the row's seed, on how many tokens the row has drawn, and on the id alone, so neither the rest of the batch nor a preemption changes
it; and logits that differ in their last digits, as another batch or a cached prefix makes them, change the draw only where two sums are that close.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.splitmix import splitmix64
from pocketllm.torch_engine.logit_edits import LogitEdits

_NO_MASKS: Mapping[int, npt.NDArray[np.uint32]] = {}
_NO_EDITS: Mapping[int, LogitEdits] = {}
CANDIDATES = 256  # ids with noise of their own; a nucleus is rarely larger, and beside them the others are rarely drawn
_REST = -1  # stands for all other ids together

# What a byte of a mask adds to eight logits, [256, 8]: 0 where its bit is set, else minus infinity. Copying rows of it is far faster than where().
_BYTE_BIAS = np.where(np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf).astype(np.float32)


def gumbel(seed: int, draw: int, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Gumbel noise of each of `ids` at draw number `draw` of a row with `seed`: output number id + 1 of a SplitMix64 stream
    whose start is output number `draw` of the one that starts from the mixed seed."""
    start = splitmix64(splitmix64(np.uint64(seed), np.uint64(0)), np.uint64(draw))
    uniform = ((splitmix64(start, (ids + 1).astype(np.uint64)) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    noise: npt.NDArray[np.float64] = -np.log(-np.log(uniform))
    return noise


def sample(
    logits: torch.Tensor,
    requests: Sequence[EngineRequest],
    draws: Sequence[int],
    masks: Mapping[int, npt.NDArray[np.uint32]] = _NO_MASKS,
    edits: Mapping[int, LogitEdits] = _NO_EDITS,
) -> list[int | None]:
    """One id a row, or None for a row whose logits are not finite, or not where its mask allows an id.

    Args:
        logits: [num_rows, vocab_size] float32; they are left as they are.
        requests: the rows' requests, for their sampling.
        draws: how many tokens each row has drawn before.
        masks: by row, words of bits as `TokenConstraint.fill` writes them: ids whose bit is not set can't be drawn.
        edits: by row, what its terms change; no last id is awaited.
    """
    best, greedy_ids = logits.max(dim=-1)  # a NaN anywhere in a row is that row's maximum
    finite = torch.isfinite(best).tolist()
    ids: list[int | None] = list(greedy_ids.tolist())
    for row, request in enumerate(requests):
        if not finite[row]:
            ids[row] = None
            continue
        is_changed = row in masks or row in edits
        if is_greedy(request) and not is_changed:
            continue
        own, largest = logits[row], best[row]
        if row in edits:
            own = edited(own, edits[row])
        if row in masks:
            forbids = bias(masks[row], own.shape[0])
            own = own.add_(forbids) if row in edits else own + forbids
        if is_changed:
            largest, greedy_id = own.max(dim=-1)
            ids[row] = int(greedy_id) if math.isfinite(largest) else None
        if not is_greedy(request) and ids[row] is not None:
            ids[row] = _draw(own.double() - largest, request, draws[row])
    return ids


def edited(logits: torch.Tensor, edits: LogitEdits, start: int = 0) -> torch.Tensor:
    """A copy of one row's logits, [num_ids] float32 of the ids from `start` on, with its edits: repetition, then frequency and presence, then what is added."""
    own = logits.clone()
    ids, seen, added, terms = edits.ids - start, edits.seen, edits.added, edits.terms
    if len(ids) == 0:
        return own
    if start or own.shape[0] <= ids.max():  # ids of other ranks; and an end of rows that some checkpoints name is no id of theirs
        here = (ids >= 0) & (ids < own.shape[0])
        ids, seen, added = ids[here], seen[here], added[here]
    array = own.numpy()
    values = array[ids].astype(np.float64)
    if terms.repetition_penalty != 1:
        values = np.where(seen > 0, np.where(values > 0, values / terms.repetition_penalty, values * terms.repetition_penalty), values)
    count = seen >> 1
    array[ids] = values - (terms.frequency_penalty * count + terms.presence_penalty * (count > 0)) + added
    return own


def is_greedy(request: EngineRequest) -> bool:
    """Which of two equal logits topk takes is not defined: here it is the first."""
    return request.temperature == 0 or request.top_k == 1


def min_p_of(request: EngineRequest) -> float:
    """0 is off."""
    return 0.0 if request.terms is None else request.terms.min_p


def bias(words: npt.NDArray[np.uint32], vocab_size: int) -> torch.Tensor:
    """[vocab_size] float32: 0 where the id's bit is set, else minus infinity."""
    return torch.from_numpy(_BYTE_BIAS.take(words.astype("<u4", copy=False).view(np.uint8), axis=0)).view(-1)[:vocab_size]


@dataclass(frozen=True, slots=True)
class Candidates:
    """The most likely ids of one row, most likely first.

    Args:
        values: [num_candidates] float64, their logits divided by the temperature; the largest is 0.
        ids: [num_candidates] int64.
        log_total: logarithm of the sum of exp(value) over all ids.
        is_all: no other id can be drawn, and log_total is not read.
    """

    values: torch.Tensor
    ids: torch.Tensor
    log_total: float
    is_all: bool = False


def draw_among(candidates: Candidates, request: EngineRequest, draw: int, scaled: torch.Tensor | None) -> int | None:
    """Draw number `draw` of one row: top-k, then top-p over what top-k left.

    Args:
        candidates: request.top_k of them where that is less than the vocabulary, else about CANDIDATES.
        scaled: [vocab_size] float64, `values` of all ids; None where they are not at hand, and then the result is None where they decide.
    """
    values, ids = candidates.values, candidates.ids
    is_cut = candidates.is_all or 0 < request.top_k <= values.shape[0]
    total = float(values.logsumexp(dim=-1)) if is_cut else candidates.log_total
    mass = 1.0 if is_cut else float((values - total).exp().sum())
    rest = 0.0 if is_cut or request.top_p < 1 else max(0.0, 1.0 - mass)
    if request.top_p < 1:
        if not is_cut and mass < request.top_p:
            if scaled is None:
                return None
            values, ids = scaled.sort(descending=True)
        summed = (values - total).exp().cumsum(dim=-1)
        size = int(torch.searchsorted(summed, request.top_p)) + 1  # the id that crosses top_p is kept
        values, ids = values[:size], ids[:size]
    found = ids.numpy()
    sums = (values - total).numpy() + gumbel(request.seed, draw, found)
    best = int(sums.argmax())
    if rest == 0 or sums[best] >= math.log(rest) + gumbel(request.seed, draw, np.array([_REST]))[0]:
        return int(found[best])
    if scaled is None:
        return None
    others = scaled.numpy().copy()
    others[found] = -np.inf
    return int((others + gumbel(request.seed, draw, np.arange(scaled.shape[0]))).argmax())


def _draw(logits: torch.Tensor, request: EngineRequest, draw: int) -> int:
    """Draw number `draw` from one row [vocab_size] float64: temperature, min_p, then top-k, then top-p over what top-k left.

    The largest logit is 0, so that the smallest temperature does not overflow.
    """
    scaled = logits / request.temperature
    vocab_size = scaled.shape[0]
    is_cut = 0 < request.top_k < vocab_size
    values, ids = scaled.topk(request.top_k if is_cut else min(CANDIDATES, vocab_size))
    likely = vocab_size
    if (min_p := min_p_of(request)) > 0:
        lowest = math.log(min_p)
        likely = int((values >= lowest).sum())
        if likely == values.shape[0] and not is_cut:  # there may be more
            scaled.masked_fill_(scaled < lowest, -math.inf)
    if likely < values.shape[0]:
        candidates = Candidates(values[:likely], ids[:likely], 0.0, is_all=True)
    else:
        candidates = Candidates(values, ids, 0.0 if is_cut else float(scaled.logsumexp(dim=-1)))
    token_id = draw_among(candidates, request, draw, scaled)
    assert token_id is not None, "all logits are at hand"
    return token_id
