"""Log probabilities of prompts on the native engine against transformers: chunked, cached, crowded out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pocketllm.backends.cpp import CppBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from tests.models.tiny_qwen3_5 import write_tiny
from tests.prompt_scoring import check_broken_terms_are_refused, check_prompt_logprobs, check_ranks_after_preemption

pytestmark = pytest.mark.usefixtures("native")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """And its oracle."""
    directory = tmp_path_factory.mktemp("tiny")
    return directory, write_tiny(directory, linear_value_head_dim=16)  # the CPU's heads are multiples of 16


@contextmanager
def opened(directory: Path, **options: Any) -> Iterator[CppBackend]:
    args = EngineArgs(**{"dtype": "float32", "max_model_len": 256, "max_batch_size": 8, "backend_options": {"num_threads": 1}, **options})
    backend = CppBackend(args, open_checkpoint(directory))
    backend.load(lambda progress: None)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize("chunk", [0, 24])
def test_prompt_logprobs(checkpoint: tuple[Path, Any], chunk: int) -> None:
    directory, oracle = checkpoint
    with opened(directory, prefill_chunk_tokens=chunk) as backend:
        assert backend.capabilities.prompt_logprobs
        check_prompt_logprobs(backend, oracle)


def test_rows_that_are_preempted(checkpoint: tuple[Path, Any]) -> None:
    directory, oracle = checkpoint
    with opened(directory, max_model_len=96, max_batch_size=4) as backend:
        details = backend.capabilities.details
        block, slot = details["kv_cache_bytes"] // details["kv_blocks"], details["state_bytes"] // (4 + details["state_snapshots"])
    with opened(directory, max_model_len=96, max_batch_size=4, kv_cache_memory=10 * block + 4 * slot, prefill_chunk_tokens=24) as backend:
        check_ranks_after_preemption(backend, oracle)


def test_what_breaks_the_terms_is_refused(checkpoint: tuple[Path, Any]) -> None:
    with opened(checkpoint[0]) as backend:
        check_broken_terms_are_refused(backend)
