"""The torch plane on a device, asked as generation asks it, and what transformers says to its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pocketllm.backends.base import MAX_LOGPROBS, Backend, EngineRequest, StepOutput, TokenLogprobs
from pocketllm.backends.select import select_backend
from pocketllm.checkpoint import Checkpoint, open_checkpoint
from pocketllm.config import EngineArgs

WAIT = 240.0  # the first use of a shape compiles kernels
MEMORY = "96MiB"  # of KV cache and states: several test processes may share a device


@dataclass
class Answer:
    """What one row got.

    Args:
        ids: generated.
        logprobs: one a token.
        cached_tokens: prompt tokens that came from the prefix cache.
    """

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    cached_tokens: int = 0
    error: BaseException | None = None


@contextmanager
def opened(source: Path | Checkpoint, device: str, dtype: str = "float32", *, cuda_graphs: bool = True, **options: Any) -> Iterator[Backend]:
    """A loaded backend. Prefix caching is off unless `options` turn it on."""
    plane: dict[str, Any] = {"num_threads": 1} if device == "cpu" else {"cuda_graphs": cuda_graphs}
    options = {"kv_cache_memory": MEMORY, "max_batch_size": 8, "enable_prefix_caching": False, "backend_options": plane, **options}
    checkpoint = open_checkpoint(source) if isinstance(source, Path) else source
    backend = select_backend(EngineArgs(backend="torch", dtype=dtype, device=device, **options), checkpoint)
    try:
        backend.load(lambda progress: None)
        assert backend.capabilities.device.startswith(device)
        yield backend
    finally:
        backend.close()


def ask(backend: Backend, prompts: Sequence[list[int]], max_tokens: int, **terms: Any) -> list[Answer]:
    """Answers to all of `prompts`, running together; `terms` of EngineRequest, greedy and with every alternative that may be had unless they say otherwise."""
    answers = [Answer() for _ in prompts]
    ended = [threading.Event() for _ in prompts]

    def listen(place: int, output: StepOutput) -> None:
        answer = answers[place]
        answer.ids.extend(output.token_ids)
        answer.logprobs.extend(output.logprobs)
        answer.cached_tokens, answer.error = output.cached_tokens, output.error
        if output.finish_reason is not None:
            ended[place].set()

    for place, prompt in enumerate(prompts):
        request = EngineRequest(f"row {place}", tuple(prompt), max_tokens, **{"logprobs": MAX_LOGPROBS, **terms})
        backend.submit(request, lambda output, place=place: listen(place, output))  # type: ignore[misc]
    for event in ended:
        assert event.wait(WAIT), f"no end after {WAIT:.0f} s: {backend.health()}"
    for answer in answers:
        if answer.error is not None:
            raise answer.error
    return answers


@torch.inference_mode()
def logprobs_of(oracle: Any, text: list[int]) -> torch.Tensor:
    """Log probabilities after each token of `text`, [length, vocab_size], float32, computed by torch on the GPU where there is one: some are long."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    logits: torch.Tensor = oracle.to(device)(torch.tensor([text], device=device)).logits[0]
    return logits.float().log_softmax(-1).cpu()


def check(oracle: Any, prompts: Sequence[list[int]], answers: Sequence[Answer], count: int, tolerance: float = 1e-4, *, is_greedy: bool = True) -> None:
    """Every alternative of every token has the oracle's log probability, after what precedes it in the answer itself, to `tolerance` of the largest one's
    size; with `is_greedy` each id is also the oracle's best. So logits are as near, but for a number that all of a token's share, and the oracle would
    have generated the same."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == len(answer.logprobs) == count
        expected = logprobs_of(oracle, prompt + answer.ids)[len(prompt) - 1 : -1]
        size = float(expected.abs().max())
        for place, (id_, found) in enumerate(zip(answer.ids, answer.logprobs, strict=True)):
            row = expected[place]
            ids, values = zip(*found.top, strict=True)
            error = float((torch.tensor(values) - row[list(ids)]).abs().max())
            assert error <= tolerance * size, f"token {place} after {len(prompt)}: log probabilities differ by {error:.2e}, the largest is {size:.1f}"
            assert abs(found.logprob - float(row[id_])) <= tolerance * size
            least = float(row[list(ids)].min())
            missed = row > least + 2 * tolerance * size  # what is clearly above the last alternative is one of them
            missed[list(ids)] = False
            assert not bool(missed.any()), f"token {place} after {len(prompt)}: {missed.nonzero().flatten().tolist()} are not among the alternatives"
            if is_greedy:
                assert id_ == int(row.argmax()), f"token {place} after {len(prompt)}: {id_}, and the oracle has {int(row.argmax())}"
