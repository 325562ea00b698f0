"""Greedy ids of the torch plane against transformers, alone and in company, chunked and whole, preempted, warm and cold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pocketllm.config import EngineArgs
from pocketllm.generation import GenerationService
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.sampling_params import SamplingParams
from pocketllm.token_stream import TokenStream
from pocketllm.torch_engine.layers.linear import has_float16_packing
from tests.conformance.llama_oracle import Oracle

NEW_TOKENS = 16
ALLOWANCE = {"float32": 0.0, "auto": 0.1, "operators": 0.1}  # nats, between the oracle's two best tokens where an answer first differs
COMPUTES = pytest.mark.parametrize("compute", list(ALLOWANCE))  # "operators": as auto, without the native kernels


@contextmanager
def opened(model: Path, compute: str, **options: object) -> Iterator[GenerationService]:
    dtype = "float32" if compute == "float32" else "auto"
    # One thread: threads that share a core wait for each other at every operator.
    plane = {"num_threads": 1, "native_kernels": compute != "operators"}
    service = GenerationService.open(EngineArgs(**{"model": str(model), "dtype": dtype, "max_model_len": 1024, "backend_options": plane, **options}))
    try:
        yield service
    finally:
        service.close()


def start(service: GenerationService, prompt: list[int], max_tokens: int = NEW_TOKENS) -> TokenStream:
    return service.stream(GenerationRequest(tuple(prompt), SamplingParams(max_tokens=max_tokens, temperature=0), new_request_id("test")))


def alone(service: GenerationService, prompts: list[list[int]]) -> list[list[int]]:
    return [list(start(service, prompt).result().token_ids) for prompt in prompts]


def staggered(service: GenerationService, prompts: list[list[int]]) -> list[list[int]]:
    """Each request arrives after the one before has given two tokens, so that rows join and leave a running batch."""
    streams, heads = [], []
    for prompt in prompts:
        stream = start(service, prompt)
        streams.append(stream)
        heads.append([token_id for _ in range(2) for token_id in next(stream).token_ids])
    return [head + [token_id for event in stream for token_id in event.token_ids] for head, stream in zip(heads, streams, strict=True)]


def together(service: GenerationService, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    streams = [start(service, prompt, max_tokens) for prompt in prompts]
    return [list(stream.result().token_ids) for stream in streams]


def check(oracle: Oracle, prompts: list[list[int]], answers: list[list[int]], compute: str) -> None:
    assert len(answers) == len(prompts)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer
        oracle.check_greedy(prompt, answer, ALLOWANCE[compute])


@COMPUTES
def test_alone_cold_and_warm(default_model: Path, oracle: Oracle, prompt_ids: list[list[int]], compute: str) -> None:
    with opened(default_model, compute) as service:
        cold = alone(service, prompt_ids)
        assert service.stats().cached_tokens == 0
        warm = alone(service, prompt_ids)
        assert service.stats().cached_tokens == sum((len(prompt) - 1) // 16 * 16 for prompt in prompt_ids)
    check(oracle, prompt_ids, cold, compute)
    check(oracle, prompt_ids, warm, compute)


@pytest.mark.parametrize("chunk", [16, 64, 0])
@COMPUTES
def test_staggered_batch_of_8(default_model: Path, oracle: Oracle, prompt_ids: list[list[int]], compute: str, chunk: int) -> None:
    with opened(default_model, compute, prefill_chunk_tokens=chunk, max_batch_size=8) as service:
        answers = staggered(service, prompt_ids)
    check(oracle, prompt_ids, answers, compute)


@pytest.mark.parametrize("prefix_caching", [True, False])
@COMPUTES
def test_preempted(default_model: Path, oracle: Oracle, prompt_ids: list[list[int]], compute: str, prefix_caching: bool) -> None:
    # Short and long prompts by turns, and blocks for little more than the longest: rows of 2 to 500 tokens are preempted.
    order = [index for pair in zip(range(10), range(19, 9, -1), strict=True) for index in pair]
    mixed = [prompt_ids[index] for index in order]
    value_bytes = 2 if compute != "float32" and (has_float16_packing()) else 4
    memory = 34 * 16 * 30 * 2 * 3 * 64 * value_bytes  # 34 blocks of 16 tokens; 30 layers, keys and values, 3 heads of 64 values
    with opened(default_model, compute, max_model_len=34 * 16, kv_cache_memory=memory, enable_prefix_caching=prefix_caching) as service:
        answers = together(service, mixed, max_tokens=24)
        stats = service.stats()
    assert stats.preemptions >= 3
    assert stats.kv_blocks_total == 34
    assert stats.kv_blocks_used == 0
    check(oracle, mixed, answers, compute)
