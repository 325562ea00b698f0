"""Runs scheduled rows through the model: batch, forward, logits, sampler. Owns the weights and the KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pocketllm.torch_engine.batch import Batch, build_batch
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.models.llama import Llama
from pocketllm.torch_engine.sampler import sample
from pocketllm.torch_engine.scheduler import ScheduledRow


class ModelRunner:
    """One model with its cache.

    Args:
        model: loaded.
        cache: blocks that the scheduler's pool counts.
        block_size: tokens a block.
        num_threads: threads of torch's operators.
    """

    def __init__(self, model: Llama, cache: KVCache, block_size: int, num_threads: int) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self.num_threads = num_threads

    @torch.inference_mode()
    def execute(self, step: Sequence[ScheduledRow]) -> dict[int, int | None]:
        """Compute one step.

        Returns:
            By place in `step`: the sampled id of each row that samples, and None for each row whose values were not finite, sampling or not.
        """
        batch = build_batch(step, self.block_size, self.cache.dtype)
        # A native step has its own threads; OpenMP's, which spin for milliseconds after each operator, would take their cores.
        self._use_threads(1 if self.model.is_native(batch, self.cache) and not batch.prefills else self.num_threads)
        hidden = self.model.forward(batch, self.cache)
        places = {id(scheduled): place for place, scheduled in enumerate(step)}
        sampled: dict[int, int | None] = {}
        if batch.sampling:
            logits = self.model.logits(hidden[batch.sample_index])
            requests = [scheduled.row.request for scheduled in batch.sampling]
            ids = sample(logits, requests, [scheduled.row.num_generated for scheduled in batch.sampling])
            sampled = {places[id(scheduled)]: token_id for scheduled, token_id in zip(batch.sampling, ids, strict=True)}
        if not math.isfinite(float(hidden.sum())):
            for scheduled in self._clear_broken(batch, hidden):
                sampled[places[id(scheduled)]] = None
        return sampled

    def _use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def _clear_broken(self, batch: Batch, hidden: torch.Tensor) -> list[ScheduledRow]:
        """Rows with a token in `hidden` [num_tokens, hidden_size] that is not finite. What those tokens left in the cache is zeroed."""
        broken = ~torch.isfinite(hidden).all(dim=-1)  # [num_tokens]
        self.cache.clear(batch.slot_mapping[broken])
        counts = torch.tensor([scheduled.num_tokens for scheduled in batch.rows])
        rows = torch.arange(len(batch.rows)).repeat_interleave(counts)  # [num_tokens]
        return [batch.rows[row] for row in sorted(set(rows[broken].tolist()))]
