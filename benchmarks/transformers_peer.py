"""transformers beside PocketLLM: the same checkpoint, its own modules, and flash-linear-attention where that is installed."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from pocketllm.bench.hardware import package_version

_STEPS = 20


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
        placed = {"device_map": {"": device}} if device != "cpu" else {}
        self._model = cast(Any, AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **placed))
        self._model.eval()
        self._synchronize()
        self.load_seconds = time.perf_counter() - start
        self._random = torch.Generator().manual_seed(seed)

    @property
    def facts(self) -> dict[str, Any]:
        """Versions of what computes; None where a package is not installed, and plain torch stands in for it."""
        names = ("transformers", "flash-linear-attention", "fla-core", "causal-conv1d", "flash-attn")
        return {"attention": self._model.config._attn_implementation, **{name: package_version(name) for name in names}}

    @torch.inference_mode()
    def prefill(self, batch: int, tokens: int, samples: int) -> list[float]:
        """Tokens a second of computing `batch` prompts of `tokens` ids, the cache and the last token's logits included; one sample a repetition."""
        rates = []
        for number in range(samples + 1):
            ids = self._prompts(batch, tokens)
            seconds = self._seconds(lambda ids=ids: self._model(ids, use_cache=True, logits_to_keep=1))
            if number:  # the first compiles
                rates.append(batch * tokens / seconds)
        return rates

    @torch.inference_mode()
    def decode(self, batch: int, context: int) -> list[float]:
        """Tokens a second of all rows, one greedy step after another, as eager Python runs them; one sample a few steps."""
        out = self._model(self._prompts(batch, context), use_cache=True, logits_to_keep=1)
        cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
        rates = []
        for number in range(4):

            def steps() -> None:
                nonlocal cache, ids
                for _ in range(_STEPS // 4):
                    out = self._model(ids, past_key_values=cache, use_cache=True)
                    cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)

            seconds = self._seconds(steps)
            if number:
                rates.append(batch * (_STEPS // 4) / seconds)
        return rates

    @torch.inference_mode()
    def logprobs(self, prompt: list[int], ids: list[int]) -> tuple[list[float], float]:
        """Log probabilities of `ids` after `prompt`, and the spread of that row: its standard deviation."""
        row = self._model(torch.tensor([prompt], device=self._model.device), logits_to_keep=1).logits[0, -1].float().log_softmax(-1)
        return row[ids].tolist(), float(row.std())

    def median(self, samples: list[float]) -> float:
        return statistics.median(samples)

    def _prompts(self, batch: int, tokens: int) -> torch.Tensor:
        size = self._model.config.get_text_config().vocab_size
        return torch.randint(size // 20, size - size // 10, (batch, tokens), generator=self._random).to(self._model.device)

    def _seconds(self, work: Any) -> float:
        self._synchronize()
        start = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - start

    def _synchronize(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
