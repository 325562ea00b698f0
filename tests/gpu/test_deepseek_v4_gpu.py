"""deepseek_v4 on the GPU against transformers in float32: rows that decode in CUDA graphs and without, experts on the GPU and in the host's file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.door import ask, check, opened
from tests.models.tiny_deepseek_v4 import KINDS, SIZES, quantized, write_gguf, write_tiny

pytestmark = pytest.mark.gpu

NEW_TOKENS = 40
# Whole groups of 32 along rows, as FP4 needs them, and many index heads, so that no two entries score the same.
WIDE: dict[str, Any] = {"index_n_heads": 16, "hidden_size": 64, "q_lora_rank": 32, "moe_intermediate_size": 64, "index_topk": 3}
OPTIONS: dict[str, Any] = {"prefill_chunk_tokens": 24, "max_model_len": 256}
PROMPTS = [[random.Random(f"{length} {place}").randrange(SIZES["vocab_size"]) for place in range(length)] for length in (1, 13, 37, 131)]


@pytest.fixture(scope="module")
def fp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Experts in FP4 and other matrices in FP8, and the oracle on the same numbers."""
    saved, directory = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("fp4")
    write_tiny(saved, **WIDE, hidden_act="silu")
    return directory, quantized(saved, directory)


@pytest.mark.parametrize("cuda_graphs", [True, False], ids=["graphs", "eager"])
def test_batch(fp4: tuple[Path, Any], device: str, cuda_graphs: bool) -> None:
    path, oracle = fp4
    with opened(path, device, cuda_graphs=cuda_graphs, **OPTIONS) as backend:
        if device != "cpu":
            assert bool(backend.capabilities.details["cuda_graphs"]["decode"]) == cuda_graphs
        check(oracle, PROMPTS, ask(backend, PROMPTS, NEW_TOKENS), NEW_TOKENS)
        for prompt in PROMPTS[::3]:
            check(oracle, [prompt], ask(backend, [prompt], NEW_TOKENS), NEW_TOKENS)


def test_experts_on_the_host_as_on_the_gpu(fp4: tuple[Path, Any], device: str) -> None:
    """Whatever of them is kept on the GPU."""
    path, _ = fp4
    with opened(path, device, **OPTIONS) as backend:
        resident = [answer.ids for answer in ask(backend, PROMPTS, NEW_TOKENS)]
        assert backend.stats().expert_lookups == 0
    for memory in ("60KiB", "1MiB"):
        with opened(path, device, routed_experts_device="cpu", routed_experts_memory=memory, **OPTIONS) as backend:
            assert [answer.ids for answer in ask(backend, PROMPTS, NEW_TOKENS)] == resident
            stats = backend.stats()
            assert stats.expert_lookups > stats.expert_hits
    assert stats.expert_hits > 0


def test_warm_as_cold(fp4: tuple[Path, Any], device: str) -> None:
    path, oracle = fp4
    with opened(path, device, **OPTIONS, enable_prefix_caching=True) as backend:
        ask(backend, PROMPTS, 8)
        warm = ask(backend, PROMPTS, NEW_TOKENS)
    assert sum(answer.cached_tokens for answer in warm) > 64
    check(oracle, PROMPTS, warm, NEW_TOKENS)


def test_gguf(device: str, tmp_path: Path) -> None:
    write_tiny(tmp_path, **WIDE, compress_rates={KINDS[1]: 4, KINDS[2]: 128}, mlp_layer_types=["hash_moe", "moe", "moe", "moe"])
    oracle = write_gguf(tmp_path, path := tmp_path / "tiny.gguf")
    with opened(path, device, **OPTIONS) as backend:
        check(oracle, PROMPTS[2:], ask(backend, PROMPTS[2:], 16), 16)


def test_16_bit(fp4: tuple[Path, Any], device: str) -> None:
    if device == "cpu" or torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("no bfloat16 units here")
    path, oracle = fp4
    with opened(path, device, "bfloat16", **OPTIONS) as backend:
        check(oracle, PROMPTS, ask(backend, PROMPTS, 8), 8, 0.15, is_greedy=False)
