"""Every kind of model on the GPU's plane in float32: greedy ids of transformers in ragged batches, in chunks, with prefixes reused, and after preemption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pocketllm.backends.base import EngineRequest
from tests.logit_reference import check_answer, rows_of_terms
from tests.models.generic_variants import GENERIC_VARIANTS
from tests.models.plane import check_greedy, logits_of
from tests.models.tiny import PROMPTS, prompt_of
from tests.models.tiny_qwen3_5 import EXPERTS, SIZES, write_tiny
from tests.models.variants import VARIANTS

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.gpu_runner import GpuRunner
from pocketllm.torch_engine.step_inputs import StepInputs
from pocketllm.torch_engine.step_shape import StepShape
from tests.models.gpu_plane import DEVICE, load, run

IS_GPU = DEVICE.type == "cuda"
NEW_TOKENS = 64 if IS_GPU else 2  # Triton's interpreter takes a second a token, so without a GPU a few kinds answer in a few tokens
TEXTS = PROMPTS if IS_GPU else [prompt_of(length, length) for length in (1, 18)]
CHUNK = 24 if IS_GPU else 16
_FEW = ("gemma3", "qwen3-moe", "deepseek-v3")  # windows, experts, values narrower than keys
_SHOWN = [variant for variant in [*VARIANTS, *GENERIC_VARIANTS] if IS_GPU or variant.name in _FEW]
CASES: dict[str, Any] = {variant.name: variant.save for variant in _SHOWN} | {"qwen3_5": write_tiny}
if IS_GPU:
    CASES["qwen3_5-moe"] = lambda path: write_tiny(path, **EXPERTS)


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint and its oracle."""
    path = tmp_path_factory.mktemp("model")
    return path, request.param(path)


def requests(prompts: Sequence[Sequence[int]], name: str = "cold") -> list[EngineRequest]:
    return [EngineRequest(f"{name} {place}", tuple(prompt), NEW_TOKENS) for place, prompt in enumerate(prompts)]


@pytest.mark.usefixtures("triton_device")
def test_greedy_ids_cold_and_warm(case: tuple[Path, Any]) -> None:
    path, oracle = case
    plane = load(path, prefill_chunk_tokens=CHUNK)
    cold = list(run(plane, requests(TEXTS)).values())
    check_greedy(oracle, TEXTS, cold, NEW_TOKENS)
    assert list(run(plane, requests(TEXTS[1:2], "warm")).values()) == cold[1:2]
    longer = [TEXTS[1] + cold[1] + [3]]
    check_greedy(oracle, longer, list(run(plane, requests(longer, "longer")).values()), NEW_TOKENS)


@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("name", ["llama", "qwen3_5"] if IS_GPU else ["qwen3_5"])
def test_greedy_ids_after_preemption(name: str, tmp_path: Path) -> None:
    oracle = CASES[name](tmp_path)
    # without a GPU all rows begin in one step, each with a whole block, and want another for the second token
    chunk, length, left = (24, 30, 8) if IS_GPU else (64, 16, 5)
    plane = load(tmp_path, kv_cache_memory="4MiB", prefill_chunk_tokens=chunk)
    pool = plane.scheduler.pool
    held = pool.allocate(pool.num_blocks - left)  # what is left is too little for all rows together
    prompts = [prompt_of(length, seed) for seed in range(4)]
    answers = list(run(plane, requests(prompts)).values())
    assert held is not None
    assert plane.scheduler.num_preemptions > 0
    check_greedy(oracle, prompts, answers, NEW_TOKENS)


@pytest.mark.usefixtures("triton_device")
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "qwen3_5-moe"] if IS_GPU else ["qwen3_5"])
def test_greedy_ids_in_padded_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts alone, prompts beside answers, and answers alone, each in a shape with room for more; on a GPU as CUDA graphs."""
    oracle = CASES[name](tmp_path)
    plane = load(tmp_path, cuda_graphs=False, prefill_chunk_tokens=16)
    runner = plane.runner
    assert isinstance(runner, GpuRunner)
    shapes = [StepShape.decoding(4), StepShape.filling(4, 16, 8)]
    runner.capture(shapes, lambda done: None)
    eager = runner.compute
    used = []

    def compute(inputs: StepInputs) -> Any:
        used.append(inputs.shape)
        return eager(inputs)

    monkeypatch.setattr(runner, "compute", compute)
    prompts = [prompt_of(length, length) for length in (18, 1, 5)]
    answers = list(run(plane, requests(prompts)).values())
    check_greedy(oracle, prompts, answers, NEW_TOKENS)
    assert set(used) == (set() if IS_GPU else set(shapes))


@pytest.mark.usefixtures("triton_device")
def test_rows_with_terms_draw_what_the_oracle_draws(tmp_path: Path) -> None:
    """Launched ahead of the ids that their terms count, in chunks, beside rows without terms."""
    write_tiny(tmp_path)
    rows = rows_of_terms(SIZES["vocab_size"], frozenset({0, 9}), 16 if IS_GPU else 3)
    rows = rows if IS_GPU else [rows[10], rows[0]]
    answers = list(run(load(tmp_path, prefill_chunk_tokens=CHUNK, max_batch_size=len(rows)), rows).values())
    texts = [[*row.prompt_token_ids, *answer] for row, answer in zip(rows, answers, strict=True)]
    for row, answer, logits in zip(rows, answers, logits_of(tmp_path, texts, 0), strict=True):
        check_answer(row, answer, len(answer) < row.max_tokens, logits.numpy())
