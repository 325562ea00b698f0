"""Prompt log probabilities of a plane against log_softmax in float64 of another implementation's logits, for tests of any plane."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from pocketllm.backends.base import Backend, EngineRequest
from pocketllm.errors import ConfigurationError
from tests.row_listener import Listener, run

LENGTHS = (1, 2, 17, 40, 77)  # of the prompts: in one step, at the border of a block and of a chunk, and over several chunks


def prompts_of(vocab_size: int) -> list[tuple[int, ...]]:
    """Prompts of LENGTHS; the longest begins as the one before it does."""
    chooser = random.Random(5)
    found = [tuple(chooser.randrange(vocab_size) for _ in range(length)) for length in LENGTHS]
    return [*found[:-1], found[-2] + found[-1][len(found[-2]) :]]


def expected(oracle: Any, prompt: tuple[int, ...]) -> torch.Tensor:
    """[len(prompt), vocab_size] float64: log probabilities behind each token of `prompt`."""
    with torch.no_grad():
        logits = oracle(torch.tensor([prompt])).logits[0]
    values: torch.Tensor = logits.double().log_softmax(dim=-1)
    return values


def check_ranks(oracle: Any, prompt: tuple[int, ...], listener: Listener, num_top: int, *, tolerance: float = 1e-4) -> None:
    """What a row was told of its prompt: all at once, with its first output."""
    first, *rest = listener.outputs
    assert not any(output.prompt_logprobs for output in rest)
    values = expected(oracle, prompt)
    assert len(first.prompt_logprobs) == len(prompt) - 1
    for place, entry in enumerate(first.prompt_logprobs):
        wanted = values[place]
        assert entry.logprob == pytest.approx(float(wanted[prompt[place + 1]]), abs=tolerance), place
        best, _ = wanted.topk(num_top)
        assert [value for _, value in entry.top] == pytest.approx(best.tolist(), abs=tolerance), place
        assert [float(wanted[token_id]) for token_id, _ in entry.top] == pytest.approx(best.tolist(), abs=tolerance), place


def check_prompt_logprobs(backend: Backend, oracle: Any) -> None:
    """Prompts alone, together, beside rows that ask for nothing, after they were cached, and with nothing generated."""
    prompts = prompts_of(backend.capabilities.vocab_size)
    plain = [EngineRequest(f"plain {place}", prompt, 4) for place, prompt in enumerate(prompts)]
    before = run(backend, *plain)
    for name, max_tokens in (("scored", 0), ("answered", 4)):
        asked = [EngineRequest(f"{name} {place}", prompt, max_tokens, prompt_logprobs=5 * (place % 3)) for place, prompt in enumerate(prompts)]
        beside = [listener for request in zip(asked, plain, strict=True) for listener in request]
        together = run(backend, *beside)
        for place, prompt in enumerate(prompts):
            scored, answer = together[2 * place], together[2 * place + 1]
            check_ranks(oracle, prompt, scored, 5 * (place % 3))
            end = scored.end()
            assert (end.finish_reason, end.num_generated, end.cached_tokens) == ("length", max_tokens, 0), "a ranked prompt is computed whole"
            assert scored.token_ids == before[place].token_ids[:max_tokens]
            assert answer.token_ids == before[place].token_ids
            assert not answer.outputs[0].prompt_logprobs
    (alone,) = run(backend, EngineRequest("alone", prompts[-1], 1, temperature=2.0, seed=3, logprobs=2, prompt_logprobs=20))
    check_ranks(oracle, prompts[-1], alone, 20)
    assert len(alone.logprobs) == 1
    warm = run(backend, EngineRequest("warm", (*prompts[-1], 1), 1))[0]
    assert warm.outputs[0].cached_tokens > 0, "a ranked prompt leaves its blocks to others"


def check_ranks_after_preemption(backend: Backend, oracle: Any) -> None:
    """Rows that have to give way, in the middle of their prompts or behind them; the cache must be too small for all of them together."""
    chooser = random.Random(8)
    vocab_size = backend.capabilities.vocab_size
    prompts = [tuple(chooser.randrange(vocab_size) for _ in range(40)) for _ in range(4)]
    alone = [run(backend, EngineRequest(f"alone {place}", prompt, 40))[0].token_ids for place, prompt in enumerate(prompts)]
    before = backend.stats().preemptions
    rows = run(backend, *(EngineRequest(f"crowded {place}", prompt, 40, prompt_logprobs=2) for place, prompt in enumerate(prompts)))
    assert backend.stats().preemptions > before
    for prompt, row, ids in zip(prompts, rows, alone, strict=True):
        check_ranks(oracle, prompt, row, 2)
        assert row.token_ids == ids


def check_broken_terms_are_refused(backend: Backend) -> None:
    """By the name of the field at fault."""
    for request, param in (
        (EngineRequest("a", (1, 2), 0), "max_tokens"),
        (EngineRequest("a", (1, 2), -1, prompt_logprobs=0), "max_tokens"),
        (EngineRequest("a", (1, 2), 1, prompt_logprobs=21), "prompt_logprobs"),
        (EngineRequest("a", (1, 2), 1, prompt_logprobs=-1), "prompt_logprobs"),
    ):
        with pytest.raises(ConfigurationError) as caught:
            backend.submit(request, lambda step: None)
        assert caught.value.param == param
