"""Every architecture on the GPU against transformers in float32: chunks, batches, the prefix cache, preemption, CUDA graphs; 16-bit types nearly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.door import ask, check, opened
from tests.gpu.wide import NAMES, VOCAB_SIZE, wide_prompts, write_wide
from tests.models.tiny import PROMPTS
from tests.models.tiny_qwen3_5 import write_tiny, write_tiny_moe
from tests.models.variants import VARIANTS

pytestmark = pytest.mark.gpu

NEW_TOKENS = 64
BLOCK_SIZE = 16
WRITERS: dict[str, Callable[[Path], Any]] = {
    **{variant.name: variant.save for variant in VARIANTS},
    "qwen3_5": lambda path: write_tiny(path, max_position_embeddings=256),
    "qwen3_5-moe": lambda path: write_tiny_moe(path, max_position_embeddings=256),
}


@dataclass(frozen=True)
class Case:
    """A model on disk beside its oracle."""

    name: str
    path: Path
    oracle: Any


@pytest.fixture(scope="module", params=WRITERS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param)
    return Case(request.param, path, WRITERS[request.param](path))


@pytest.fixture(scope="module", params=NAMES)
def wide(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(f"wide-{request.param}")
    return Case(request.param, path, write_wide(request.param, path))


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize("chunk", [0, 24])
def test_batch(case: Case, device: str, chunk: int, cuda_graphs: bool) -> None:
    if device == "cpu" and not cuda_graphs:
        pytest.skip("a CPU has no CUDA graphs to turn off")
    with opened(case.path, device, prefill_chunk_tokens=chunk, cuda_graphs=cuda_graphs) as backend:
        check(case.oracle, PROMPTS, ask(backend, PROMPTS, NEW_TOKENS), NEW_TOKENS)


def test_alone_as_in_a_batch(case: Case, device: str) -> None:
    with opened(case.path, device) as backend:
        together = ask(backend, PROMPTS, 16)
        for prompt, answer in zip(PROMPTS, together, strict=True):
            assert ask(backend, [prompt], 16)[0].ids == answer.ids


def test_warm_as_cold(case: Case, device: str) -> None:
    with opened(case.path, device, enable_prefix_caching=True, prefill_chunk_tokens=24) as backend:
        cold = ask(backend, PROMPTS, NEW_TOKENS)
        assert sum(answer.cached_tokens for answer in cold) == 0
        warm = ask(backend, PROMPTS, 16)
        longer = [prompt + answer.ids + [5] for prompt, answer in zip(PROMPTS, cold, strict=True)]  # as a conversation goes on
        further = ask(backend, longer, 8)
    assert sum(answer.cached_tokens for answer in warm) > 64
    assert all(answer.cached_tokens >= 48 for answer in further)
    check(case.oracle, PROMPTS, warm, 16)
    check(case.oracle, longer, further, 8)


def test_preempted(case: Case, device: str) -> None:
    with opened(case.path, device) as backend:
        details = backend.capabilities.details
        memory = details.get("state_bytes", 0) + details["kv_cache_bytes"] // details["kv_blocks"] * (256 // BLOCK_SIZE + 2)
    with opened(case.path, device, kv_cache_memory=memory) as backend:
        answers = ask(backend, PROMPTS, NEW_TOKENS)
        assert backend.stats().preemptions > 0
    check(case.oracle, PROMPTS, answers, NEW_TOKENS)


def test_draws_as_on_the_cpu(case: Case, device: str) -> None:
    terms = {"temperature": 1.3, "top_p": 0.95, "top_k": 40, "seed": 7}
    with opened(case.path, device) as backend:
        together = ask(backend, PROMPTS, 16, **terms)
        (alone,) = ask(backend, PROMPTS[2:3], 16, **terms)
    check(case.oracle, PROMPTS, together, 16, is_greedy=False)
    assert alone.ids == together[2].ids
    with opened(case.path, "cpu") as backend:
        assert [answer.ids for answer in ask(backend, PROMPTS, 16, **terms)] == [answer.ids for answer in together]


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.01)])
def test_16_bit(case: Case, device: str, dtype: str, tolerance: float) -> None:
    if device == "cpu" or (dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip(f"no {dtype} units here")
    with opened(case.path, device, dtype) as backend:
        answers = ask(backend, PROMPTS, 8)
    check(case.oracle, PROMPTS, answers, 8, tolerance, is_greedy=False)


@pytest.mark.parametrize("chunk", [0, 512])
def test_wide_heads(wide: Case, device: str, chunk: int) -> None:
    prompts = wide_prompts()
    with opened(wide.path, device, prefill_chunk_tokens=chunk, kv_cache_memory="1GiB") as backend:
        check(wide.oracle, prompts, ask(backend, prompts, 24), 24)


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.1), ("float16", 0.01)])
def test_wide_heads_16_bit(wide: Case, device: str, dtype: str, tolerance: float) -> None:
    if device == "cpu" or (dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip(f"no {dtype} units here")
    prompts = wide_prompts()
    with opened(wide.path, device, dtype, kv_cache_memory="1GiB") as backend:
        check(wide.oracle, prompts, ask(backend, prompts, 8), 8, tolerance, is_greedy=False)


def test_a_branch_of_a_long_prompt(wide: Case, device: str) -> None:
    stem = torch.randint(VOCAB_SIZE, (1200,), generator=torch.Generator().manual_seed(1)).tolist()
    branch = stem[:1100] + wide_prompts()[1]
    with opened(wide.path, device, enable_prefix_caching=True, prefill_chunk_tokens=512, kv_cache_memory="1GiB") as backend:
        ask(backend, [stem], 4)
        (again,) = ask(backend, [branch], 16)
    assert again.cached_tokens >= 512
    check(wide.oracle, [branch], [again], 16)


def test_many_rows(wide: Case, device: str) -> None:
    prompts = [[*wide_prompts()[0][: 1 + place % 5], place] for place in range(37)]  # more rows than a batch holds, and no bucket's number
    with opened(wide.path, device, max_batch_size=21, max_model_len=512, kv_cache_memory="1GiB") as backend:
        check(wide.oracle, prompts, ask(backend, prompts, 8), 8)


def test_seeds_matter(device: str, tmp_path: Path) -> None:
    prompt = wide_prompts()[1]
    write_wide("qwen3", tmp_path)
    with opened(tmp_path, device, max_model_len=512, kv_cache_memory="1GiB") as backend:
        draws = {tuple(ask(backend, [prompt], 12, temperature=2.0, seed=seed)[0].ids) for seed in range(6)}
    assert len(draws) > 3
