"""A hybrid model behind the backend door: memory for states, hits as they are reported, cancelling."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from stepped_plane import greedy
from tiny_qwen3_5 import SIZES, write_tiny

from pocketllm.backends.base import EngineRequest, StepOutput
from pocketllm.backends.select import select_backend
from pocketllm.backends.torch import TorchBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE

WAIT = 60.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("hybrid")
    return directory, write_tiny(directory)


@contextmanager
def backend_of(directory: Path, **options: Any) -> Iterator[TorchBackend]:
    backend = select_backend(EngineArgs(backend="torch", dtype="float32", backend_options={"num_threads": 1}, **options), open_checkpoint(directory))
    assert isinstance(backend, TorchBackend)
    try:
        backend.load(lambda progress: None)
        yield backend
    finally:
        backend.close()


def ask(backend: TorchBackend, name: str, prompt: list[int], max_tokens: int, *, cancel_after: int | None = None) -> tuple[list[int], StepOutput]:
    """Ids and the last output of one request."""
    ids: list[int] = []
    outputs: list[StepOutput] = []
    ended = threading.Event()

    def on_step(output: StepOutput) -> None:
        ids.extend(output.token_ids)
        outputs.append(output)
        if len(ids) == cancel_after:
            backend.cancel(name)
        if output.finish_reason is not None:
            ended.set()

    backend.submit(EngineRequest(name, tuple(prompt), max_tokens), on_step)
    assert ended.wait(WAIT)
    return ids, outputs[-1]


def prompt_of(length: int) -> list[int]:
    chooser = random.Random(length)
    return [chooser.randrange(SIZES["vocab_size"]) for _ in range(length)]


def test_a_conversation(checkpoint: tuple[Path, Any]) -> None:
    directory, oracle = checkpoint
    first = prompt_of(100)
    with backend_of(directory) as backend:
        answer, last = ask(backend, "a", first, 40)
        assert (answer, last.cached_tokens) == (greedy(oracle, first, 40), 0)
        second = [*first, *answer, *prompt_of(7)]
        answer, last = ask(backend, "b", second, 20)
        assert (answer, last.cached_tokens) == (greedy(oracle, second, 20), 128)
        assert ask(backend, "c", first, 40)[1].cached_tokens == 96
        assert backend.stats().cached_tokens == 128 + 96
        details = backend.capabilities.details
        assert (details["state_snapshots"], details["snapshot_interval"]) == (32, 512)


def test_a_cancelled_answer_is_taken_up_again(checkpoint: tuple[Path, Any]) -> None:
    directory, oracle = checkpoint
    prompt = prompt_of(50)
    with backend_of(directory) as backend:
        partial, last = ask(backend, "a", prompt, 400, cancel_after=40)
        assert last.finish_reason == "cancelled"
        answer, last = ask(backend, "b", prompt + partial, 20)
        assert answer == greedy(oracle, prompt + partial, 20)
        assert last.cached_tokens >= 80


def test_without_prefix_caching_there_are_no_snapshots(checkpoint: tuple[Path, Any]) -> None:
    directory, oracle = checkpoint
    with backend_of(directory, enable_prefix_caching=False, max_batch_size=3) as backend:
        for name in ("a", "b"):
            answer, last = ask(backend, name, prompt_of(100), 20)
            assert (answer, last.cached_tokens) == (greedy(oracle, prompt_of(100), 20), 0)
        assert backend.capabilities.details["state_snapshots"] == 0


@pytest.mark.parametrize(("chunk", "interval"), [(0, 8192), (7, 512), (1000, 1008)])
def test_the_interval_follows_the_chunk(chunk: int, interval: int, checkpoint: tuple[Path, Any]) -> None:
    with backend_of(checkpoint[0], prefill_chunk_tokens=chunk) as backend:
        assert backend.capabilities.details["snapshot_interval"] == interval


def test_states_count_as_memory_of_the_cache(checkpoint: tuple[Path, Any]) -> None:
    with backend_of(checkpoint[0], kv_cache_memory="1MiB", max_batch_size=4) as backend:
        details = backend.capabilities.details
        assert details["state_bytes"] + details["kv_cache_bytes"] <= 2**20 < details["state_bytes"] + details["kv_cache_bytes"] * (1 + 1 / details["kv_blocks"])
        assert details["state_snapshots"] == 16
        assert details["kv_blocks"] * BLOCK_SIZE >= SIZES["max_position_embeddings"]


def test_states_that_leave_no_room_are_named(checkpoint: tuple[Path, Any]) -> None:
    says = r"may be used beside 1 MiB of recurrent states: raise kv_cache_memory, or lower"
    with pytest.raises(ConfigurationError, match=says) as caught, backend_of(checkpoint[0], kv_cache_memory="1MiB", max_batch_size=80):
        pass
    assert caught.value.param == "kv_cache_memory"
