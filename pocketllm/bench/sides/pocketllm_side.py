"""PocketLLM, through LLM's public calls."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from pocketllm.bench.report import plain
from pocketllm.bench.sides.base import Side, Spec, StoppedEarlyError, Timing
from pocketllm.config import EngineArgs
from pocketllm.llm import LLM
from pocketllm.outputs import GenerationOutput
from pocketllm.sampling_params import SamplingParams
from pocketllm.token_stream import TokenStream

SETTLING = 4  # rounds left out once all rows decode: what had queued up meanwhile is read in them


class PocketLLMSide(Side):
    """See Side. Prompts are drawn afresh, and a sample that hit the prefix cache all the same is an error."""

    name = "pocketllm"

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        options: dict[str, Any] = {"model": str(spec.model), "device": spec.device, "max_batch_size": spec.rows, "max_model_len": spec.context, **spec.options}
        if spec.device == "cpu":
            options["backend_options"] = {"num_threads": spec.threads, **options.get("backend_options", {})}
        self.llm = LLM(EngineArgs(**options))

    @property
    def vocab_size(self) -> int:
        return self.llm.capabilities.vocab_size

    @property
    def facts(self) -> dict[str, Any]:
        facts: dict[str, Any] = plain(dataclasses.asdict(self.llm.capabilities))
        return facts

    def close(self) -> None:
        self.llm.close()

    def prefill(self, rows: int, tokens: int) -> Timing:
        prompts = [self.fresh(tokens) for _ in range(rows)]
        return Timing(rows * tokens, self._seconds(prompts, 1))

    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        return Timing(rows * answer, self._seconds([self.repeating(prompt) for _ in range(rows)], answer))

    def decode(self, rows: int, context: int, steps: int) -> Timing:
        budget = steps_of_answer(rows, steps)
        with ExitStack() as stack:
            streams = [stack.enter_context(self.llm.generate_stream(self.repeating(context), greedy(budget))) for _ in range(rows)]
            marks = list(rounds(streams))
            _check([stream.result() for stream in streams], budget)
        if rows > 1:
            marks = marks[SETTLING:]
        if len(marks) < 2:
            raise StoppedEarlyError(f"the first of {rows} answers of {budget} tokens ended before all of them had been decoding")
        (began, before), (ended, after) = marks[0], marks[-1]
        return Timing(after - before, ended - began)

    def _seconds(self, prompts: Sequence[Sequence[int]], budget: int) -> float:
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, greedy(budget))
        seconds = time.perf_counter() - start
        _check(outputs, budget)
        return seconds


def greedy(budget: int) -> SamplingParams:
    return SamplingParams(max_tokens=budget, temperature=0.0)


def steps_of_answer(rows: int, steps: int) -> int:
    """Tokens of each answer where decoding is measured: as prompts are computed in turn, the last row may begin some `rows` steps after the first."""
    return steps + (rows + SETTLING if rows > 1 else 1)


def rounds(streams: Sequence[TokenStream]) -> Iterator[tuple[float, int]]:
    """Read one event of every stream in turn: the clock after each round, and the tokens so far. Until a round in which a stream ends, that one included.

    The first round ends with the first token of the row that begins last. Steps that have queued up in a stream come as one event.
    """
    total, has_ended = 0, False
    while not has_ended:
        for stream in streams:
            event = next(stream)
            total += len(event.token_ids)
            has_ended |= event.finish_reason is not None
        yield time.perf_counter(), total


def _check(outputs: Sequence[GenerationOutput], budget: int) -> None:
    for output in outputs:
        if len(output.token_ids) != budget:
            raise StoppedEarlyError(f"an answer of {budget} tokens ended after {len(output.token_ids)}")
        if output.usage.cached_tokens:
            raise RuntimeError(f"a prompt drawn afresh hit the prefix cache with {output.usage.cached_tokens} tokens: the sample is no prefill")
