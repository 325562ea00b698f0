"""transformers beside PocketLLM in bfloat16: the package's side, in the form in which the programs here ask for samples."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from pocketllm.bench.hardware import package_version
from pocketllm.bench.sides.base import Spec
from pocketllm.bench.sides.transformers_side import TransformersSide

_STEPS = 5  # of a sample of decode


class TransformersPeer:
    """A model of transformers on one device, in bfloat16.

    Args:
        directory: the checkpoint.
        device: "cuda" or "cpu".
        seed: of the prompts.
    """

    name = "transformers"

    def __init__(self, directory: Path, device: str, seed: int) -> None:
        start = time.perf_counter()
        self._side = TransformersSide(Spec(directory, device, torch.get_num_threads(), seed=seed, options={"dtype": "bfloat16"}))
        self.load_seconds = time.perf_counter() - start

    @property
    def facts(self) -> dict[str, Any]:
        """Versions of what computes; None where a package is not installed, and plain torch stands in for it."""
        return {**self._side.facts, **{name: package_version(name) for name in ("fla-core", "flash-attn")}}

    def prefill(self, batch: int, tokens: int, samples: int, rest: float = 0.0) -> list[float]:
        """Tokens a second of computing `batch` prompts of `tokens` ids, the cache and the last token's logits included; one sample a repetition, each
        after `rest` seconds of nothing."""
        rates = []
        for _ in range(samples + 1):
            time.sleep(rest)
            rates.append(self._side.prefill(batch, tokens).rate)
        return rates[1:]  # the first compiles

    def decode(self, batch: int, context: int) -> list[float]:
        """Tokens a second of all rows, one greedy step after another, as eager Python runs them; one sample a few steps."""
        return [self._side.decode(batch, context, _STEPS).rate for _ in range(4)][1:]

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], ids: list[int]) -> tuple[list[float], float]:
        """Log probabilities of `ids` after `prompt`, and the spread of that row: its standard deviation."""
        model = self._side.model
        row = model(torch.tensor([prompt], device=model.device), logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
        return row[ids].tolist(), float(row.std())
