"""The torch plane on a tiny checkpoint, and what the oracle says to its answers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pocketllm.backends.base import EngineRequest, StepOutput
from pocketllm.backends.select import select_backend
from pocketllm.backends.torch import TorchBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.torch_engine.batch import build_batch
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE
from pocketllm.torch_engine.scheduler import Scheduler

WAIT = 60.0


def backend_of(path: Path, dtype: str = "float32", **options: Any) -> TorchBackend:
    backend = select_backend(EngineArgs(backend="torch", dtype=dtype, **{"backend_options": {"num_threads": 1}, **options}), open_checkpoint(path))
    assert isinstance(backend, TorchBackend)
    return backend


@contextmanager
def opened(path: Path, dtype: str = "float32", **options: Any) -> Iterator[TorchBackend]:
    backend = backend_of(path, dtype, **options)
    backend.load(lambda progress: None)
    try:
        yield backend
    finally:
        backend.close()


def generate(backend: TorchBackend, prompts: Sequence[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers to all of `prompts`, running together."""
    answers: list[list[int]] = [[] for _ in prompts]
    ended = [threading.Event() for _ in prompts]

    def listener(place: int) -> Any:
        def listen(output: StepOutput) -> None:
            answers[place].extend(output.token_ids)
            if output.finish_reason is not None:
                ended[place].set()

        return listen

    for place, prompt in enumerate(prompts):
        backend.submit(EngineRequest(f"row {place}", tuple(prompt), max_tokens), listener(place))
    for event in ended:
        assert event.wait(WAIT)
    return answers


@torch.inference_mode()
def logits_of(path: Path, texts: Sequence[list[int]], chunk: int, dtype: str = "float32", **options: Any) -> list[torch.Tensor]:
    """Logits after each token of each text, [length, vocab_size], all texts computed as one batch in chunks of `chunk` tokens."""
    backend = backend_of(path, dtype, **options)
    scheduler, runner = backend._build(lambda progress: None, lambda: None)  # what the engine thread builds, here without that thread
    scheduler = Scheduler(BlockPool(scheduler.pool.num_blocks, BLOCK_SIZE, enable_prefix_caching=False), 8, chunk)
    for place, text in enumerate(texts):
        scheduler.add(EngineRequest(str(place), tuple(text), 1))
    parts: dict[str, list[torch.Tensor]] = {str(place): [] for place in range(len(texts))}
    while step := scheduler.schedule():
        batch = build_batch(step, BLOCK_SIZE, runner.cache.dtype)
        logits = runner.model.logits(runner.model.forward(batch, runner.cache))
        for scheduled, part in zip(batch.rows, logits.split([scheduled.num_tokens for scheduled in batch.rows]), strict=True):
            parts[scheduled.row.request.request_id].append(part)
        scheduler.advance(step)
        scheduler.resolve(step, {place: 0 for place, scheduled in enumerate(step) if scheduled.samples})
    return [torch.cat(parts[str(place)]) for place in range(len(texts))]


@torch.inference_mode()
def expected_logits(oracle: PreTrainedModel, text: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([text])).logits[0]
    return logits


def check_greedy(oracle: PreTrainedModel, prompts: Sequence[list[int]], answers: Sequence[list[int]], count: int) -> None:
    """Each id of each answer is the oracle's best after what precedes it: so the oracle would have generated the same."""
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer) == count
        best = expected_logits(oracle, prompt + answer)[len(prompt) - 1 : -1].argmax(-1).tolist()
        assert answer == best


def check_close(found: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-4) -> None:
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert float((found - expected).abs().max() / expected.abs().max()) <= tolerance
