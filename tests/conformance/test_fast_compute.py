"""The default compute against the float32 oracle, each fed the same texts: how often both name the same next token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.torch import TorchBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.text.tokenizer import load_tokenizer
from pocketllm.torch_engine.batch import build_batch
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE
from pocketllm.torch_engine.scheduler import ScheduledRow, Scheduler
from tests.conformance.llama_oracle import Oracle
from tests.conformance.prompts import TEXTS

LEAST_AGREEMENT = 0.98
MAX_ROWS = 32


class TeacherForced:
    """The default compute's model behind a real scheduler, fed with given ids instead of what it would sample."""

    def __init__(self, path: Path, *, native_kernels: bool) -> None:
        plane = {"num_threads": 1, "native_kernels": native_kernels}
        args = EngineArgs(model=str(path), max_model_len=512, max_batch_size=MAX_ROWS, backend_options=plane)
        backend = TorchBackend(args, open_checkpoint(path, "auto"))
        scheduler, runner = backend._build(lambda _progress: None, lambda: None)  # what the engine thread builds, here without that thread
        self._model, self._cache, self._num_blocks = runner.model, runner.cache, scheduler.pool.num_blocks
        details = backend.capabilities.details
        self.compute = f"{details['compute_dtype']}, native kernels: {details['native_kernels']}"

    @torch.inference_mode()
    def best_ids(self, texts: Sequence[list[int]], *, given: int | None, chunk: int = 0) -> list[list[int]]:
        """The best id after each token of each text, all texts running as one batch.

        Args:
            texts: token ids.
            given: how many ids of each text are its prompt; each further one comes as if it had been sampled. None: all of them.
            chunk: most prompt tokens a step.
        """
        scheduler = Scheduler(BlockPool(self._num_blocks, BLOCK_SIZE, enable_prefix_caching=False), MAX_ROWS, chunk)
        best: dict[int, list[int]] = {}
        text_of: dict[int, list[int]] = {}
        for text in texts:
            prompt = text if given is None else text[:given]
            row = scheduler.add(EngineRequest(f"text-{len(text_of)}", tuple(prompt), len(text) - len(prompt) + 1))
            text_of[id(row)], best[id(row)] = text, []
        rows = list(scheduler.rows())
        while step := scheduler.schedule():
            for scheduled, ids in self._compute(step):
                best[id(scheduled.row)] += ids
            forced = {place: self._next_id(one, text_of[id(one.row)]) for place, one in enumerate(step) if one.samples}
            scheduler.advance(step)
            scheduler.resolve(step, forced)
        return [best[id(row)] for row in rows]

    def _compute(self, step: Sequence[ScheduledRow]) -> Iterator[tuple[ScheduledRow, list[int]]]:
        batch = build_batch(step, BLOCK_SIZE, self._cache.dtype)
        ids = self._model.logits(self._model.forward(batch, self._cache)).argmax(-1).tolist()
        start = 0
        for scheduled in batch.rows:
            yield scheduled, ids[start : start + scheduled.num_tokens]
            start += scheduled.num_tokens

    @staticmethod
    def _next_id(scheduled: ScheduledRow, text: list[int]) -> int:
        length = len(scheduled.row.token_ids)
        return text[length] if length < len(text) else 0  # past the end the id is not computed any more


@pytest.fixture(scope="module", params=[True, False], ids=["native", "operators"])
def model(default_model: Path, request: pytest.FixtureRequest) -> TeacherForced:
    torch.set_num_threads(1)
    return TeacherForced(default_model, native_kernels=request.param)


@pytest.fixture(scope="module")
def texts(default_model: Path, prompt_ids: list[list[int]]) -> list[list[int]]:
    tokenizer = load_tokenizer(open_checkpoint(default_model, "auto"))
    further = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS.values()]
    assert sum(map(len, further)) > 1400
    return [*prompt_ids, *further]


def check_agreement(oracle: Oracle, texts: Sequence[list[int]], best_ids: Sequence[list[int]], what: str) -> None:
    gaps: list[float] = []
    total = 0
    for text, ids in zip(texts, best_ids, strict=True):
        expected = oracle.best(text, len(text))
        assert len(ids) == len(text)
        total += len(text)
        gaps += [gap for found, wanted, gap in zip(ids, expected.ids, expected.gaps, strict=True) if found != wanted]
    agreement = 1 - len(gaps) / total
    print(
        f"{what}: {agreement:.2%} of {total} positions agree; at the {len(gaps)} others the oracle's two best are at most {max(gaps, default=0):.3f} nats apart"
    )
    assert agreement >= LEAST_AGREEMENT
    assert max(gaps, default=0) <= 0.1


@pytest.mark.parametrize("chunk", [0, 200])
def test_prefill(oracle: Oracle, model: TeacherForced, texts: list[list[int]], chunk: int) -> None:
    check_agreement(oracle, texts, model.best_ids(texts, given=None, chunk=chunk), f"prefill in chunks of {chunk or 'any size'}, {model.compute}")


@pytest.mark.parametrize(("rows", "length"), [(1, 180), (4, 80), (8, 80)])
def test_decode(oracle: Oracle, model: TeacherForced, texts: list[list[int]], rows: int, length: int) -> None:
    """Few rows read the 4-bit weights where the processor has them, many the 16-bit ones."""
    cut = [text[:length] for text in [*texts[-6:], *texts[-8:-6]][:rows]]
    check_agreement(oracle, cut, model.best_ids(cut, given=1), f"decode of {rows} rows, {model.compute}")
