"""Runs scheduled rows through the model: batch, forward, logits, sampler. Owns the weights and the KV cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pocketllm.torch_engine.batch import build_batch
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
    """

    def __init__(self, model: Llama, cache: KVCache, block_size: int) -> None:
        self.model = model
        self.cache = cache
        self.block_size = block_size

    @torch.inference_mode()
    def execute(self, step: Sequence[ScheduledRow]) -> dict[int, int | None]:
        """Compute one step.

        Returns:
            The sampled id of each row that samples, by the row's place in `step`; None where its logits were not finite.
        """
        batch = build_batch(step, self.block_size, self.cache.dtype)
        hidden = self.model.forward(batch, self.cache)
        if not batch.sampling:
            return {}
        logits = self.model.logits(hidden[batch.sample_index])
        requests = [scheduled.row.request for scheduled in batch.sampling]
        ids = sample(logits, requests, [scheduled.row.num_generated for scheduled in batch.sampling])
        places = {id(scheduled): place for place, scheduled in enumerate(step)}
        return {places[id(scheduled)]: token_id for scheduled, token_id in zip(batch.sampling, ids, strict=True)}
