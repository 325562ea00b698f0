"""Steps as CUDA graphs, in shapes with room for more, against the same steps launched kernel by kernel."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE
from pocketllm.torch_engine.device_sampler import DrawnTokens
from pocketllm.torch_engine.gpu_runner import GpuRunner
from pocketllm.torch_engine.kernels.sampler import LastIds
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy
from pocketllm.torch_engine.step_shape import StepShape
from tests.gpu.wide import VOCAB_SIZE, write_wide
from tests.models.gpu_plane import load

pytestmark = pytest.mark.gpu

ROWS = 6
# of each step, by row: its tokens, 0 where it is not in the step
STEPS = (
    (70, 33, 0, 0, 0, 0),  # prompts alone
    (1, 1, 100, 0, 2, 0),  # answers beside the first part of a prompt and a whole short one
    (1, 1, 64, 65, 1, 0),  # and beside its end, which is a whole chunk, and a prompt of a chunk and a token
    (1, 0, 1, 1, 1, 128),  # and beside a prompt that does not end
    (1, 1, 1, 1, 1, 1),  # answers alone, and a prompt's last token
    (0, 1, 0, 0, 0, 0),
)
SHAPES = [StepShape.decoding(1), StepShape.decoding(8), *(StepShape.filling(rows, tokens, ROWS) for rows in (0, 16) for tokens in (128, 192))]


@dataclass
class Recorder:
    """The logits that a runner's sampler is given, by step, beside the draws."""

    runner: GpuRunner
    logits: list[torch.Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._draw = self.runner._sampler.draw

    def draw(self, logits: torch.Tensor, keep: LastIds | None = None) -> DrawnTokens:
        self.logits.append(logits.float().cpu())
        return self._draw(logits, keep)


def run_steps(runner: GpuRunner, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The logits of each of STEPS, with the same tokens whatever is drawn."""
    generator = torch.Generator().manual_seed(3)
    counts = [sum(step[slot] for step in STEPS) for slot in range(ROWS)]
    rows = []
    for slot, count in enumerate(counts):
        row = Row(EngineRequest(f"row {slot}", tuple(torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()), 99))
        row.slot, row.block_table = slot, [slot + ROWS * place for place in range(-(-count // BLOCK_SIZE))]
        rows.append(row)
    recorder = Recorder(runner)
    masks = Masks(runner.vocab_size)
    with monkeypatch.context() as patch:
        patch.setattr(runner._sampler, "draw", recorder.draw)
        for place, step in enumerate(STEPS):
            samples = [slot for slot in range(ROWS) if step[slot] and (step[slot] == 1 or (place, slot) not in ((1, 2), (3, 5)))]
            scheduled = [ScheduledRow(rows[slot], count, slot in samples) for slot, count in enumerate(step) if count]
            copies = [StateCopy(None, slot) for slot in range(ROWS)] if place == 0 else []
            results = runner.launch(scheduled, masks, copies).result()
            assert len(results) == len(samples)
            for one in scheduled:
                one.row.num_computed_tokens += one.num_tokens
    masks.close()
    for row in rows:
        runner.release(row)
    return recorder.logits


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05), ("float16", 0.01)])
def test_steps_in_larger_shapes(dtype: str, tolerance: float, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if device == "cpu" or (dtype == "bfloat16" and torch.cuda.get_device_capability() < (8, 0)):
        pytest.skip(f"no CUDA graphs, or no {dtype} units, here")
    write_wide("qwen3_5", tmp_path)
    plane = load(tmp_path, dtype, cuda_graphs=False, max_batch_size=ROWS, kv_cache_memory="512MiB", prefill_chunk_tokens=256, enable_prefix_caching=False)
    assert isinstance(plane.runner, GpuRunner)
    eager = run_steps(plane.runner, monkeypatch)
    plane.runner.capture(SHAPES, lambda done: None)
    monkeypatch.setattr(plane.runner, "compute", None)  # every step has a graph
    for found, wanted in zip(run_steps(plane.runner, monkeypatch), eager, strict=True):
        assert found.shape == wanted.shape
        size = float(wanted.abs().max())
        assert size > 0.1
        assert float((found - wanted).abs().max()) <= tolerance * size
        if dtype == "float32":
            assert torch.equal(found.argmax(-1), wanted.argmax(-1))
