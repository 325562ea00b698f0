"""Every architecture against transformers in float32: logits, greedy ids, batches, chunks, the prefix cache, preemption, dtypes of the file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from pocketllm.checkpoint import open_checkpoint
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE
from pocketllm.torch_engine.layers.linear import has_bfloat16_units
from pocketllm.torch_engine.models.registry import kv_sizes
from tests.models.generic_variants import GENERIC_VARIANTS
from tests.models.plane import check_close, check_greedy, expected_logits, generate, logits_of, opened
from tests.models.tiny import CONTEXT, PROMPTS, Variant
from tests.models.variants import VARIANTS

NEW_TOKENS = 64
needs_bfloat16 = pytest.mark.skipif(not has_bfloat16_units(), reason="this processor has no bfloat16 units")


@dataclass(frozen=True)
class Case:
    """A variant on disk beside its oracle."""

    path: Path
    oracle: PreTrainedModel

    @property
    def block_bytes(self) -> int:
        num_layers, num_kv_heads, head_dim = kv_sizes(open_checkpoint(self.path))
        return 2 * num_layers * num_kv_heads * head_dim * 4 * BLOCK_SIZE


@pytest.fixture(scope="module", params=[*VARIANTS, *GENERIC_VARIANTS], ids=lambda variant: variant.name)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    path = tmp_path_factory.mktemp(request.param.name)
    return Case(path, request.param.save(path))


def test_logits(case: Case) -> None:
    expected = [expected_logits(case.oracle, prompt) for prompt in PROMPTS]
    assert len({int(logits[-1].argmax()) for logits in expected}) > 2, "the prompts do not matter to this oracle"
    for chunk in (0, 17):
        for found, wanted in zip(logits_of(case.path, PROMPTS, chunk), expected, strict=True):
            check_close(found, wanted)


def test_greedy_cold_and_warm(case: Case) -> None:
    with opened(case.path, prefill_chunk_tokens=24) as backend:
        cold = generate(backend, PROMPTS, NEW_TOKENS)
        assert backend.stats().cached_tokens == 0
        warm = generate(backend, PROMPTS, 16)
        assert backend.stats().cached_tokens == sum((len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE for prompt in PROMPTS)
        longer = [prompt + answer + [5] for prompt, answer in zip(PROMPTS, cold, strict=True)]  # as a conversation goes on
        before = backend.stats().cached_tokens
        further = generate(backend, longer, 8)
        assert backend.stats().cached_tokens - before > 64 * len(PROMPTS)
        alone = generate(backend, PROMPTS[3:4], 16)
    check_greedy(case.oracle, PROMPTS, cold, NEW_TOKENS)
    check_greedy(case.oracle, longer, further, 8)
    assert warm == [answer[:16] for answer in cold]
    assert alone == warm[3:4]


def test_greedy_after_preemption(case: Case) -> None:
    with opened(case.path, kv_cache_memory=(CONTEXT // BLOCK_SIZE + 2) * case.block_bytes, enable_prefix_caching=False) as backend:
        answers = generate(backend, PROMPTS, NEW_TOKENS)
        assert backend.stats().preemptions > 0
    check_greedy(case.oracle, PROMPTS, answers, NEW_TOKENS)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.is_plain], ids=lambda variant: variant.name)
def test_16_bit_shards(variant: Variant, dtype: torch.dtype, tmp_path: Path) -> None:
    oracle = variant.save(tmp_path, dtype, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert (tmp_path / "model.safetensors.index.json").exists()
    check_close(logits_of(tmp_path, PROMPTS[2:3], 0)[0], expected_logits(oracle, PROMPTS[2]))


@pytest.mark.parametrize(("dtype", "tolerance"), [("auto", 5e-3), pytest.param("bfloat16", 0.15, marks=needs_bfloat16)])
@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.is_plain], ids=lambda variant: variant.name)
def test_other_compute_dtypes_are_close(variant: Variant, dtype: str, tolerance: float, tmp_path: Path) -> None:
    oracle = variant.save(tmp_path)
    for found, prompt in zip(logits_of(tmp_path, PROMPTS, 30, dtype), PROMPTS, strict=True):
        check_close(found, expected_logits(oracle, prompt), tolerance)
