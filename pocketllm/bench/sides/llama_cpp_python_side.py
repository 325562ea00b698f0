"""llama-cpp-python: `Llama.generate`, which yields greedy ids one by one, and does not end at EOS."""

from __future__ import annotations

import time
from itertools import islice
from typing import Any

from pocketllm.bench.hardware import package_version
from pocketllm.bench.sides.base import Side, Spec, Timing

_BATCH = 512  # tokens that one step of a prompt takes: llama-bench's --ubatch-size


class LlamaCppPythonSide(Side):
    """See Side. Its high-level class takes one row at a time."""

    name = "llama-cpp-python"
    is_batching = False

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        from llama_cpp import Llama

        self._own: dict[str, float] = {}  # tokens a second of the last samples, as llama.cpp's own counters have them
        layers = 0 if spec.device == "cpu" else -1  # on the GPU: all
        self._llama: Any = Llama(
            str(spec.model),
            n_ctx=spec.context,
            n_batch=_BATCH,
            n_ubatch=_BATCH,
            n_threads=spec.threads,
            n_threads_batch=spec.threads,
            n_gpu_layers=layers,
            verbose=False,
        )

    @property
    def vocab_size(self) -> int:
        return int(self._llama.n_vocab())

    @property
    def facts(self) -> dict[str, Any]:
        from llama_cpp import llama_print_system_info

        return {
            "llama-cpp-python": package_version("llama_cpp_python"),
            "system": llama_print_system_info().decode().strip(),
            "n_batch": _BATCH,
            "own_tokens_per_s": dict(self._own),
        }

    def close(self) -> None:
        self._llama.close()

    def prefill(self, rows: int, tokens: int) -> Timing:
        ids = self._generate(self.fresh(tokens))
        start = time.perf_counter()
        next(ids)
        timing = Timing(tokens, time.perf_counter() - start)
        counters = self._counters()
        self._own["prefill"] = counters.n_p_eval / counters.t_p_eval_ms * 1e3
        return timing

    def decode(self, rows: int, context: int, steps: int) -> Timing:
        ids = self._generate(self.repeating(context))
        next(ids)
        self._forget_counters()
        start = time.perf_counter()
        count = sum(1 for _ in islice(ids, steps))
        timing = Timing(count, time.perf_counter() - start)
        counters = self._counters()
        self._own["decode"] = counters.n_eval / counters.t_eval_ms * 1e3
        return timing

    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        start = time.perf_counter()
        count = sum(1 for _ in islice(self._generate(self.repeating(prompt)), answer))
        return Timing(count, time.perf_counter() - start)

    def _counters(self) -> Any:
        from llama_cpp import llama_perf_context

        return llama_perf_context(self._llama.ctx)

    def _forget_counters(self) -> None:
        from llama_cpp import llama_perf_context_reset

        llama_perf_context_reset(self._llama.ctx)

    def _generate(self, prompt: list[int]) -> Any:
        self._llama.reset()
        self._forget_counters()
        return self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True)
