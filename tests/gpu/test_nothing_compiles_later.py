"""Once a model is loaded, no step and no draw that a scheduler may ask for compiles a kernel, which would keep everybody waiting for seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE
from pocketllm.torch_engine.gpu_runner import GpuRunner
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from tests.gpu.wide import VOCAB_SIZE, write_wide
from tests.models.gpu_plane import load

pytestmark = pytest.mark.gpu

ROWS, CHUNK = 24, 1536
# what the rows that a step draws for ask for
DRAWS: tuple[dict[str, Any], ...] = ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 7}, {"logprobs": 1}, {"temperature": 0.0, "logprobs": 11})


@contextmanager
def compiled() -> Iterator[list[str]]:
    """Names of the kernels that Triton compiles meanwhile, or takes from its cache on the disk."""
    from triton import knobs

    names: list[str] = []
    before = knobs.runtime.jit_post_compile_hook
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **_rest: names.append(fn.name)
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def step_of(generator: random.Random, lengths: list[int], asked: dict[str, Any]) -> list[ScheduledRow]:
    """Rows of `lengths` tokens, those of one token somewhere in an answer."""
    step, block = [], 0
    for slot, num_tokens in enumerate(lengths):
        computed = generator.randrange(1, 200) if num_tokens == 1 else generator.choice((0, 0, 48))
        row = Row(EngineRequest(f"row {slot}", tuple(generator.choices(range(VOCAB_SIZE), k=computed + num_tokens)), 9, seed=slot, **asked))
        row.slot, row.num_computed_tokens = slot, computed
        row.block_table = list(range(block, block := block - (-(computed + num_tokens) // BLOCK_SIZE)))
        step.append(ScheduledRow(row, num_tokens, True))
    return step


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_no_step_compiles_a_kernel(dtype: str, cuda_graphs: bool, device: str, tmp_path: Path) -> None:
    if device == "cpu" or (dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip(f"no Triton, or no {dtype} units, here")
    write_wide("qwen3_5", tmp_path)
    options: dict[str, Any] = {
        "max_batch_size": ROWS,
        "kv_cache_memory": "1GiB",
        "prefill_chunk_tokens": CHUNK,
        "enable_prefix_caching": False,
        "context_length": 2040,
    }
    plane = load(tmp_path, dtype, cuda_graphs=cuda_graphs, **options)
    runner, generator, masks = plane.runner, random.Random(7), Masks(VOCAB_SIZE)
    assert isinstance(runner, GpuRunner)
    with compiled() as names:
        for number in range(120):
            answers, prompts = generator.choice((0, 1, 2, 3, 5, 8, 11, 16, 17)), generator.choice((0, 1, 1, 2, 4, 7))
            longest = generator.choice((2, 9, 16, 17, 70, 300, 700))
            lengths = [1] * answers + [generator.randint(2, max(2, min(longest, CHUNK // max(1, prompts)))) for _ in range(prompts)]
            if not lengths:
                continue
            step = step_of(generator, lengths, DRAWS[number % len(DRAWS)])
            runner.launch(step, masks, ()).result()
            for one in step:
                runner.release(one.row)
    masks.close()
    assert names == []
