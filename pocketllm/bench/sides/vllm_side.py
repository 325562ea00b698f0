"""vLLM: its offline `LLM.generate` on token ids."""

from __future__ import annotations

import time
from typing import Any

from pocketllm.bench.hardware import package_version
from pocketllm.bench.sides.base import Side, Spec, Timing


class VllmSide(Side):
    """See Side. What comes after the first tokens is the time of a whole call less that of a call for one token."""

    name = "vllm"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        from vllm import LLM

        llm: Any = LLM
        self._llm = llm(model=str(spec.model), max_model_len=spec.context, max_num_seqs=spec.rows, enable_prefix_caching=False, seed=spec.seed)

    @property
    def vocab_size(self) -> int:
        return int(self._llm.get_tokenizer().vocab_size)

    @property
    def facts(self) -> dict[str, Any]:
        return {"vllm": package_version("vllm")}

    def prefill(self, rows: int, tokens: int) -> Timing:
        return Timing(rows * tokens, self._seconds([self.fresh(tokens) for _ in range(rows)], 1))

    def decode(self, rows: int, context: int, steps: int) -> Timing:
        prompts = [self.repeating(context) for _ in range(rows)]
        first = self._seconds(prompts, 1)
        return Timing(rows * steps, self._seconds(prompts, steps + 1) - first)

    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        return Timing(rows * answer, self._seconds([self.repeating(prompt) for _ in range(rows)], answer))

    def _seconds(self, prompts: list[list[int]], budget: int) -> float:
        from vllm import SamplingParams

        params: Any = SamplingParams
        start = time.perf_counter()
        self._llm.generate([{"prompt_token_ids": ids} for ids in prompts], params(max_tokens=budget, temperature=0.0, ignore_eos=True), use_tqdm=False)
        return time.perf_counter() - start
