"""transformers: the same checkpoint in its own modules, one step of eager Python after another, as its `generate` runs them."""

from __future__ import annotations

import inspect
import time
from typing import Any

from pocketllm.bench.hardware import package_version
from pocketllm.bench.sides.base import Side, Spec, Timing


class TransformersSide(Side):
    """See Side. The dtype is transformers' own choice unless the options name one; weights of a GGUF file are expanded to it while they load."""

    name = "transformers"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        self._torch: Any = torch
        if spec.device == "cpu":
            torch.set_num_threads(spec.threads)
        path = str(spec.model)
        source: dict[str, Any] = {"pretrained_model_name_or_path": path}
        if path.endswith(".gguf"):
            folder, _, file = path.rpartition("/")
            source = {"pretrained_model_name_or_path": folder or ".", "gguf_file": file}
        placed = {} if spec.device == "cpu" else {"device_map": {"": spec.device}}
        model: Any = AutoModelForCausalLM
        self.model = model.from_pretrained(**source, **placed, **spec.options).eval()
        # What the model calls its cache: newer releases of transformers have renamed it.
        self._cache = "cache" if "cache" in inspect.signature(self.model.forward).parameters else "past_key_values"

    @property
    def vocab_size(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def facts(self) -> dict[str, Any]:
        names = ("transformers", "torch", "flash-linear-attention", "causal-conv1d")
        return {"dtype": str(self.model.dtype), "attention": self.model.config._attn_implementation, **{name: package_version(name) for name in names}}

    def prefill(self, rows: int, tokens: int) -> Timing:
        start, _, _ = self._start([self.fresh(tokens) for _ in range(rows)])
        return Timing(rows * tokens, time.perf_counter() - start)

    def decode(self, rows: int, context: int, steps: int) -> Timing:
        _, cache, ids = self._start([self.repeating(context) for _ in range(rows)])
        start = time.perf_counter()
        self._steps(cache, ids, steps)
        return Timing(rows * steps, time.perf_counter() - start)

    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        start, cache, ids = self._start([self.repeating(prompt) for _ in range(rows)])
        self._steps(cache, ids, answer - 1)
        return Timing(rows * answer, time.perf_counter() - start)

    def _start(self, prompts: list[list[int]]) -> tuple[float, Any, Any]:
        """When it began, then the cache and the first ids of `prompts`. [rows, tokens] -> [rows, 1]"""
        ids = self._torch.tensor(prompts, device=self.model.device)
        self._synchronize()
        start = time.perf_counter()
        with self._torch.inference_mode():
            out = self.model(ids, use_cache=True, logits_to_keep=1)
            cache, ids = out[self._cache], out.logits[:, -1:].argmax(-1)
        self._synchronize()
        return start, cache, ids

    def _steps(self, cache: Any, ids: Any, steps: int) -> None:
        with self._torch.inference_mode():
            for _ in range(steps):
                out = self.model(ids, use_cache=True, **{self._cache: cache})
                cache, ids = out[self._cache], out.logits[:, -1:].argmax(-1)
        self._synchronize()

    def _synchronize(self) -> None:
        if self.model.device.type == "cuda":
            self._torch.cuda.synchronize()
