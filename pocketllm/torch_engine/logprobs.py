"""Log probabilities of one row's distribution, as the model gives it: before temperature, top_k, top_p and constraint."""

from __future__ import annotations

import torch

from pocketllm.backends.base import TokenLogprobs

LOWEST = -9999.0  # a finite number, since JSON has no infinity; the one that OpenAI's API uses


def rank(logits: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    """Log probabilities at one token.

    Args:
        logits: [vocab_size] float32, the largest of them finite.
        token_id: the id that was drawn.
        num_top: most likely ids wanted.

    Returns:
        Numbers of float64 precision, at least LOWEST.
    """
    log_total = float(logits.double().logsumexp(dim=-1))
    values, ids = largest(logits, min(num_top, logits.shape[0])) if num_top else ([], [])
    top = tuple((other, max(value - log_total, LOWEST)) for value, other in zip(values, ids, strict=True))
    return TokenLogprobs(max(float(logits[token_id]) - log_total, LOWEST), top)


def largest(logits: torch.Tensor, count: int) -> tuple[list[float], list[int]]:
    """The `count` largest logits and their ids, largest first, of equal ones the lower id first."""
    values, ids = logits.topk(min(count + 1, logits.shape[0]))  # with one more, a tie across the border shows
    if bool((values[1:] == values[:-1]).any()):  # topk does not say which of two equal logits it takes, nor in which order
        ids = (logits >= values[count - 1]).nonzero().squeeze(-1)  # ascending
        values, order = logits[ids].sort(descending=True, stable=True)
        ids = ids[order]
    return values[:count].tolist(), ids[:count].tolist()
