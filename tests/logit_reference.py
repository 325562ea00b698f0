"""The oracle of the sampler: backends/logit_terms.py and the cuts for one row, in float64, written as they are defined and not as they are computed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.logit_terms import NO_TERMS, LogitTerms
from pocketllm.torch_engine.sampler import gumbel


def changed_logits(
    logits: npt.NDArray[np.float32], request: EngineRequest, answer: Sequence[int], allowed: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.float64]:
    """[vocab_size] after the first four steps, minus infinity where an id can't be drawn.

    Args:
        logits: [vocab_size], as the model gives them.
        answer: what the row has drawn.
        allowed: [vocab_size], by the row's constraint.
    """
    terms = request.terms or NO_TERMS
    found = logits.astype(np.float64)
    for token_id in {*request.prompt_token_ids, *answer}:
        found[token_id] = found[token_id] / terms.repetition_penalty if found[token_id] > 0 else found[token_id] * terms.repetition_penalty
    for token_id in set(answer):
        found[token_id] -= terms.frequency_penalty * list(answer).count(token_id) + terms.presence_penalty
    for token_id, bias in terms.logit_bias:
        found[token_id] += bias
    if len(answer) < terms.min_tokens:
        found[list(request.eos_token_ids)] = -math.inf
    if terms.allowed_token_ids is not None:
        found[[token_id for token_id in range(len(found)) if token_id not in terms.allowed_token_ids]] = -math.inf
    for word in terms.bad_words:
        if len(word) == 1 or tuple(answer[-(len(word) - 1) :]) == word[:-1]:
            found[word[-1]] = -math.inf
    return found if allowed is None else np.where(allowed, found, -math.inf)


def kept_ids(logits: npt.NDArray[np.float64], request: EngineRequest) -> npt.NDArray[np.int64]:
    """The ids that may be drawn from `changed_logits`, most likely first; at least one is finite."""
    order: npt.NDArray[np.int64] = np.argsort(-logits, kind="stable")
    order = order[: np.isfinite(logits).sum()]
    if request.temperature == 0 or request.top_k == 1:
        return order[:1]
    scaled = (logits[order] - logits[order[0]]) / request.temperature
    min_p = (request.terms or NO_TERMS).min_p
    order = order[scaled >= (math.log(min_p) if min_p > 0 else -math.inf)]
    order = order[: request.top_k] if request.top_k > 0 else order
    if request.top_p < 1:
        mass = np.exp(scaled[: len(order)]).cumsum()
        order = order[: int(np.searchsorted(mass, request.top_p * mass[-1])) + 1]
    return order


def draw(logits: npt.NDArray[np.float32], request: EngineRequest, answer: Sequence[int], allowed: npt.NDArray[np.bool_] | None = None) -> int:
    """The row's next id, where each id has noise of its own, as on the GPU."""
    changed = changed_logits(logits, request, answer, allowed)
    kept = kept_ids(changed, request)
    if len(kept) == 1:
        return int(kept[0])
    return int(kept[int((changed[kept] / request.temperature + gumbel(request.seed, len(answer), kept)).argmax())])


def rows_of_terms(vocab_size: int, ends: frozenset[int], max_tokens: int = 12) -> list[EngineRequest]:
    """Rows of every feature, alone and with the others, greedy and drawn, between rows that have none, for a model that draws `ends` now and then."""
    some = tuple(sorted({*ends, *range(0, vocab_size, 3)}))
    kinds: dict[str, tuple[LogitTerms | None, dict[str, object]]] = {
        "plain": (None, {"temperature": 0.0}),
        "drawn": (None, {"temperature": 1.1, "top_k": 40}),
        "repetition": (LogitTerms(1.9), {"temperature": 0.0}),
        "frequency": (LogitTerms(frequency_penalty=1.5), {"temperature": 0.0}),
        "presence": (LogitTerms(presence_penalty=-1.5), {"temperature": 0.9, "top_k": 20}),
        "bias": (LogitTerms(logit_bias=((1, 6.0), (vocab_size - 1, 5.0))), {"temperature": 1.3, "top_k": 8}),
        "min_p": (LogitTerms(min_p=0.3), {"temperature": 1.5, "top_k": 40}),
        "min_tokens": (LogitTerms(min_tokens=5), {"temperature": 0.0}),
        "allowed": (LogitTerms(allowed_token_ids=some), {"temperature": 1.0, "top_p": 0.9, "top_k": 40}),
        "bad words": (LogitTerms(frequency_penalty=-0.5, bad_words=((2,), *((a, b) for a in range(0, vocab_size, 2) for b in (1, 4)), (3, 3, 3))), {}),
        "all": (
            LogitTerms(1.2, 0.4, 0.3, ((1, 3.0), (5, 2.0)), 0.02, 4, some, ((3,), *((a, a) for a in range(0, vocab_size, 6)))),
            {"temperature": 1.2, "top_p": 0.95, "top_k": 40},
        ),
    }
    prompts = [tuple((7 * place + 3 * length) % vocab_size for place in range(length)) for length in (3, 18, 7)]
    return [
        EngineRequest(name, prompts[place % 3], max_tokens, seed=place + 3, eos_token_ids=ends, terms=terms, **options)  # type: ignore[arg-type]
        for place, (name, (terms, options)) in enumerate(kinds.items())
    ]


def check_answer(request: EngineRequest, answer: Sequence[int], has_stopped: bool, logits: npt.NDArray[np.float32]) -> None:
    """An answer of an engine, token by token.

    Args:
        has_stopped: an id ended it that it does not have.
        logits: [len(prompt) + len(answer), vocab_size], what the model gives after each token of both.
    """
    start = len(request.prompt_token_ids) - 1
    for place, token_id in enumerate(answer):
        assert draw(logits[start + place], request, answer[:place]) == token_id, (request.request_id, place)
    assert len(answer) == request.max_tokens or has_stopped, request.request_id
    if has_stopped:
        assert draw(logits[start + len(answer)], request, answer) in request.eos_token_ids, request.request_id
