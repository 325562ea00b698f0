"""The model runner with a small real llama: a row whose numbers break stays alone, in this step and in its blocks afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_llama import CONFIG, tiny_tensors, write_tiny_llama

from pocketllm.backends.base import EngineRequest
from pocketllm.checkpoint import open_checkpoint
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.cpu import CpuDevice
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.model_runner import ModelRunner
from pocketllm.torch_engine.models.llama import Llama
from pocketllm.torch_engine.runner import Draw
from pocketllm.torch_engine.scheduler import Scheduler

POISON, BLOCK_SIZE = 49, 4


class Plane:
    """Scheduler and runner, stepped by the test as the engine does."""

    def __init__(self, directory: Path, num_blocks: int, chunk: int = 0) -> None:
        with torch.inference_mode():
            model = Llama(open_checkpoint(directory), CpuDevice(torch.float32), 64, lambda done: None)
        cache = KVCache(CONFIG["num_hidden_layers"], num_blocks, BLOCK_SIZE, CONFIG["num_key_value_heads"], CONFIG["head_dim"], torch.float32)
        self.runner = ModelRunner(model, cache, BLOCK_SIZE, 1)
        self.masks = Masks(CONFIG["vocab_size"])
        self.scheduler = Scheduler(BlockPool(num_blocks, BLOCK_SIZE), 8, chunk)
        self.failed: list[str] = []
        self.answers: dict[str, list[int]] = {}

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        self.scheduler.add(EngineRequest(name, tuple(prompt), max_tokens))

    def step(self) -> None:
        step = self.scheduler.schedule()
        results = self.runner.execute(step, self.masks)
        self.scheduler.advance(step)
        failed = [place for place, result in results.items() if isinstance(result, BaseException)]
        for place in failed:
            self.scheduler.remove(step[place].row)
            self.failed.append(step[place].row.request.request_id)
        for update in self.scheduler.resolve(step, {place: result.token_id for place, result in results.items() if isinstance(result, Draw)}):
            self.answers.setdefault(update.row.request.request_id, []).extend(update.token_ids)
        self.scheduler.check_integrity()

    def run(self) -> None:
        while self.scheduler.running or self.scheduler.waiting:
            self.step()


@pytest.fixture(params=["nan", "inf"])
def poisoned(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A checkpoint in which one id's embedding is not finite."""
    tensors = tiny_tensors()
    tensors["model.embed_tokens.weight"][POISON] = float(request.param)
    return write_tiny_llama(tmp_path, tensors)


def alone(directory: Path, prompt: list[int], max_tokens: int) -> list[int]:
    plane = Plane(directory, 16)
    plane.add("x", prompt, max_tokens)
    plane.run()
    return plane.answers["x"]


def test_a_broken_row_fails_alone_in_its_step(poisoned: Path) -> None:
    plane = Plane(poisoned, 16)
    plane.add("decoding", [1, 2, 3], 8)
    plane.step()
    plane.add("broken", [4, POISON, 5], 8)
    plane.add("prompt", [6, 7, 8, 9, 10], 8)
    plane.add("broken too", [POISON], 8)
    plane.step()
    assert sorted(plane.failed) == ["broken", "broken too"]
    plane.run()
    assert plane.answers["decoding"] == alone(poisoned, [1, 2, 3], 8)
    assert plane.answers["prompt"] == alone(poisoned, [6, 7, 8, 9, 10], 8)


def test_a_broken_piece_of_a_prompt_fails_before_it_samples(poisoned: Path) -> None:
    plane = Plane(poisoned, 16, chunk=4)
    plane.add("broken", [1, 2, POISON, 4, 5, 6, 7, 8, 9, 10], 8)
    plane.step()
    assert plane.failed == ["broken"]
    plane.add("again", [1, 2, POISON, 4, 5], 8)
    plane.step()
    assert plane.failed == ["broken", "again"], "nothing of the broken block was kept as a prefix"


def test_the_blocks_of_a_broken_row_are_clean_for_the_next_rows(poisoned: Path) -> None:
    """Two rows decode together in blocks that hold what the broken row left behind their own last token."""
    plane = Plane(poisoned, 4)
    plane.add("broken", [POISON] * 15, 1)
    plane.step()
    assert plane.failed == ["broken"]
    plane.add("a", [1, 2], 4)
    plane.add("b", [3, 4, 5], 5)
    plane.run()
    assert plane.failed == ["broken"]
    assert plane.answers == {"a": alone(poisoned, [1, 2], 4), "b": alone(poisoned, [3, 4, 5], 5)}


def test_a_shared_prefix_survives_a_row_that_breaks_after_it(poisoned: Path) -> None:
    prefix = [11, 12, 13, 14, 15, 16, 17, 18]
    plane = Plane(poisoned, 16)
    plane.add("first", [*prefix, 1], 9)
    plane.step()
    plane.add("broken", [*prefix, POISON], 9)
    plane.step()
    plane.add("second", [*prefix, 2], 5)
    plane.run()
    assert plane.failed == ["broken"]
    assert plane.answers == {"first": alone(poisoned, [*prefix, 1], 9), "second": alone(poisoned, [*prefix, 2], 5)}


def test_ids_do_not_depend_on_company_chunks_or_preemption(tmp_path: Path) -> None:
    write_tiny_llama(tmp_path, tiny_tensors())
    prompts = {f"r{place}": [(place * 7 + 3 * token) % 49 for token in range(1 + 5 * place)] for place in range(5)}
    expected = {name: alone(tmp_path, prompt, 10) for name, prompt in prompts.items()}
    assert len({tuple(ids) for ids in expected.values()}) == 5
    for num_blocks, chunk in ((40, 0), (40, 3), (9, 0), (9, 4)):
        plane = Plane(tmp_path, num_blocks, chunk)
        for name, prompt in prompts.items():
            plane.add(name, prompt, 10)
            plane.step()
        plane.run()
        assert plane.answers == expected
        assert (plane.scheduler.num_preemptions > 0) == (num_blocks == 9)
