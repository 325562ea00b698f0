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

        return {"llama-cpp-python": package_version("llama_cpp_python"), "system": llama_print_system_info().decode().strip(), "n_batch": _BATCH}

    def close(self) -> None:
        self._llama.close()

    def prefill(self, rows: int, tokens: int) -> Timing:
        start = time.perf_counter()
        next(self._generate(self.fresh(tokens)))
        return Timing(tokens, time.perf_counter() - start)

    def decode(self, rows: int, context: int, steps: int) -> Timing:
        ids = self._generate(self.repeating(context))
        next(ids)
        start = time.perf_counter()
        count = sum(1 for _ in islice(ids, steps))
        return Timing(count, time.perf_counter() - start)

    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        start = time.perf_counter()
        count = sum(1 for _ in islice(self._generate(self.repeating(prompt)), answer))
        return Timing(count, time.perf_counter() - start)

    def _generate(self, prompt: list[int]) -> Any:
        self._llama.reset()
        return self._llama.generate(prompt, temp=0.0, repeat_penalty=1.0, reset=True)
