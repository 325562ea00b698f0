"""Log probabilities of prompts on the torch plane against transformers: chunked, cached, crowded out, on the CPU and with the GPU's kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plane import opened
from tiny_qwen3_5 import write_tiny

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.engine import Engine
from tests.models.tiny import prompt_of
from tests.models.variants import VARIANTS
from tests.prompt_scoring import check_broken_terms_are_refused, check_prompt_logprobs, check_ranks, check_ranks_after_preemption
from tests.row_listener import Listener

LLAMA = next(variant for variant in VARIANTS if variant.name == "llama")


@pytest.mark.parametrize("chunk", [0, 24])
@pytest.mark.parametrize("make", [LLAMA.save, write_tiny], ids=["llama", "qwen3_5"])
def test_prompt_logprobs(make: Callable[[Path], Any], chunk: int, tmp_path: Path) -> None:
    oracle = make(tmp_path)
    with opened(tmp_path, prefill_chunk_tokens=chunk, max_batch_size=8) as backend:
        check_prompt_logprobs(backend, oracle)


def test_rows_that_are_preempted(tmp_path: Path) -> None:
    oracle = LLAMA.save(tmp_path)
    with opened(tmp_path, prefill_chunk_tokens=24, max_model_len=96) as backend:
        block = backend.capabilities.details["kv_cache_bytes"] // backend.capabilities.details["kv_blocks"]
    with opened(tmp_path, prefill_chunk_tokens=24, max_model_len=96, kv_cache_memory=10 * block, max_batch_size=4) as backend:
        check_ranks_after_preemption(backend, oracle)


def test_what_breaks_the_terms_is_refused(tmp_path: Path) -> None:
    LLAMA.save(tmp_path)
    with opened(tmp_path) as backend:
        check_broken_terms_are_refused(backend)


@pytest.mark.usefixtures("triton_device")
def test_on_the_plane_of_the_gpu(tmp_path: Path) -> None:
    """Beside a row that asks for nothing, in chunks, with CUDA graphs where there are any, and with nothing generated."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    from tests.models.gpu_plane import load

    oracle = write_tiny(tmp_path)
    plane = load(tmp_path, prefill_chunk_tokens=16)
    engine = Engine(lambda check_open: (plane.scheduler, plane.runner))
    try:
        engine.wait_until_built()
        prompts = [prompt_of(length, length) for length in (18, 5)]  # few, since Triton's interpreter takes a second a token
        requests = [EngineRequest(f"row {place}", tuple(prompt), place, prompt_logprobs=7 * place) for place, prompt in enumerate(prompts)]
        requests.append(EngineRequest("plain", tuple(prompts[1]), 1))
        listeners = [Listener() for _ in requests]
        for request, listener in zip(requests, listeners, strict=True):
            engine.submit(request, listener)
        for place, (prompt, listener) in enumerate(zip(prompts, listeners, strict=False)):
            assert listener.end().num_generated == len(listener.token_ids) == place
            check_ranks(oracle, tuple(prompt), listener, 7 * place)
        assert listeners[2].end().finish_reason == "length"
        assert listeners[2].token_ids == listeners[1].token_ids
    finally:
        engine.close()
