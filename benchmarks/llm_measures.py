"""PocketLLM measured through LLM's public calls: prefill, decode, a long prompt in chunks, and on a GPU where the time goes."""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from product_rate import Product

from pocketllm import LLM, EngineArgs, SamplingParams
from pocketllm.bench.sides.pocketllm_side import SETTLING, greedy, rounds
from pocketllm.outputs import GenerationOutput

_MEMORY_POLL = 0.01  # seconds
_MEMORY_SLICE = 0.5  # seconds


@dataclass(frozen=True)
class Workload:
    """What is measured, in tokens and rows.

    Args:
        prompts: (rows, tokens of each) of prefill.
        decodes: (rows, tokens of the prompt of each, steps). Where decoding is measured, at least about so many steps of all rows are; a whole call has
            answers of so many tokens.
        long: tokens of the long prompt; `appended` are then added to it.
        chunk: most prompt tokens a step.
        samples: repetitions.
    """

    prompts: tuple[tuple[int, int], ...] = ((1, 512), (1, 2048), (1, 8192), (32, 512))
    decodes: tuple[tuple[int, int, int], ...] = ((1, 2048, 256), (32, 512, 128), (64, 512, 128))
    long: int = 200_000
    appended: int = 100
    chunk: int = 8192
    samples: int = 3

    @classmethod
    def tiny(cls) -> Workload:
        """For trying the program."""
        return cls(((1, 32), (2, 48)), ((1, 32, 16), (3, 24, 8)), 1500, 20, 128, 2)

    @property
    def rows(self) -> int:
        return max(rows for rows, *_ in (*self.prompts, *self.decodes))

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer, the long prompt aside, with room for the steps of a profile."""
        return max(*(tokens for _, tokens in self.prompts), *(tokens + _answer(rows, steps) for rows, tokens, steps in self.decodes)) + 64


@dataclass(frozen=True)
class PrefillSamples:
    """Prefill in turn with products, so that both see the same clock.

    Args:
        rates: tokens a second of each prefill.
        product_rates: operations a second of the product before it, or of a row of them.
        products: how many products each time.
    """

    rates: list[float]
    product_rates: list[float]
    products: int


@dataclass(frozen=True)
class DecodeSample:
    """Tokens of all rows a second, over `steps` steps in which every row decoded."""

    rate: float
    steps: int


class MeasuredLLM:
    """A loaded LLM with fresh prompts of token ids.

    Args:
        directory: the checkpoint.
        device: "cuda" or "cpu".
        options: EngineArgs beside those.
        seed: of the prompts.
    """

    def __init__(self, directory: Path, device: str, options: dict[str, Any], seed: int) -> None:
        start = time.perf_counter()
        self._llm = LLM(EngineArgs(model=str(directory), device=device, **options))
        self.load_seconds = time.perf_counter() - start
        self._random = random.Random(seed)
        size = self._llm.capabilities.vocab_size
        self._ids = range(size // 20, size - size // 10)

    @property
    def capabilities(self) -> dict[str, Any]:
        return asdict(self._llm.capabilities)

    def close(self) -> None:
        self._llm.close()

    def expert_stats(self) -> dict[str, int]:
        """Of experts that stay in their file: `lookups`, `hits`, and `bytes` that are in memory."""
        stats = self._llm._service.stats()
        return {"lookups": stats.expert_lookups, "hits": stats.expert_hits, "bytes": stats.expert_bytes}

    def prefill(self, rows: int, tokens: int, samples: int) -> list[float]:
        """Tokens a second, from the call to its return with the first token of each row; the first call, which compiles, is left out."""
        seconds = [self._seconds(rows, tokens, 1) for _ in range(samples + 2)]
        return [rows * tokens / one for one in seconds[2:]]

    def rested_prefill(self, product: Product, rows: int, tokens: int, samples: int, rest: float) -> PrefillSamples:
        """`prefill` and one product in turn, each after `rest` seconds of nothing."""
        self.prefill(rows, tokens, 0)
        rates, product_rates = [], []
        for _ in range(samples):
            time.sleep(rest)
            product_rates.append(product.rate())
            time.sleep(rest)
            rates.append(rows * tokens / self._seconds(rows, tokens, 1))
        return PrefillSamples(rates, product_rates, 1)

    def sustained_prefill(self, product: Product, rows: int, tokens: int, samples: int) -> PrefillSamples:
        """`prefill` and as many products as take its time in turn, one right after another, once all has been done once."""
        seconds = [self._seconds(rows, tokens, 1) for _ in range(3)]
        count = product.count(statistics.median(seconds))
        rates, product_rates = [], []
        for _ in range(samples + 1):
            product_rates.append(product.rate(count))
            rates.append(rows * tokens / self._seconds(rows, tokens, 1))
        return PrefillSamples(rates[1:], product_rates[1:], count)

    def decode(self, rows: int, tokens: int, steps: int, samples: int) -> list[DecodeSample]:
        """Steps of `rows` rows that all decode, after prompts of `tokens` ids; the first sample, which compiles, is left out.

        Raises:
            RuntimeError: an answer ended early, or so late that there was no time in which all rows decoded.
        """
        return [self._decode(rows, tokens, _answer(rows, steps)) for _ in range(samples + 1)][1:]

    def intervals(self, tokens: int, steps: int) -> list[float]:
        """Seconds between the events of one streamed answer."""
        times = []
        with self._llm.generate_stream(self.fresh(tokens), greedy(steps)) as stream:
            for _event in stream:
                times.append(time.perf_counter())
        return [after - before for before, after in pairwise(times)]

    def batch_total(self, rows: int, tokens: int, budget: int, samples: int) -> list[float]:
        """Generated tokens a second of whole calls: `rows` prompts of `tokens` ids and answers of `budget`."""
        seconds = [self._seconds(rows, tokens, budget) for _ in range(samples + 1)]
        return [rows * budget / one for one in seconds[1:]]

    def first_logprobs(self, prompt: list[int]) -> list[tuple[int, float]]:
        """(id, log probability) of the 20 likeliest ids after `prompt`."""
        (output,) = self._llm.generate(prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))
        assert output.logprobs is not None
        return [(entry.token_id, entry.logprob) for entry in output.logprobs[0].top]

    def long_prompt(self, tokens: int, appended: int, chunk: int) -> dict[str, Any]:
        """A prompt of one chunk and one of `tokens` ids, with the memory that each takes, then that with `appended` ids more, and what of it was computed."""
        _, of_chunk, _ = self._watched(self.fresh(chunk))
        prompt = self.fresh(tokens)
        first, watch, seconds = self._watched(prompt)
        second, _, again = self._watched([*prompt, *first.token_ids, *self.fresh(appended - len(first.token_ids))])
        return {
            "prompt_tokens": tokens,
            "seconds": seconds,
            "tokens_per_s": tokens / seconds,
            "chunk_tokens": chunk,
            "memory_of_chunk": of_chunk,
            "memory": watch,
            "appended_tokens": appended,
            "append_seconds": again,
            "append_cached_tokens": second.usage.cached_tokens,
            "append_computed_tokens": second.usage.prompt_tokens - second.usage.cached_tokens,
            "snapshot_interval": self._llm.capabilities.details.get("snapshot_interval"),
        }

    def profile(self, rows: int, tokens: int, steps: int) -> tuple[str, dict[str, float]]:
        """A table of the kernels of one call, after one that warms up, and its sums in milliseconds."""
        self._seconds(rows, tokens, steps)
        kinds = [torch.profiler.ProfilerActivity.CUDA if torch.cuda.is_available() else torch.profiler.ProfilerActivity.CPU]
        with torch.profiler.profile(activities=kinds) as profile:
            seconds = self._seconds(rows, tokens, steps)
        averages = profile.key_averages()
        kernels = [one for one in averages if one.self_device_time_total > 0]  # beside calls of the driver
        table = averages.table(sort_by="self_device_time_total", row_limit=60, max_name_column_width=100)
        busy, count = sum(one.self_device_time_total for one in kernels) / 1e3, sum(one.count for one in kernels)
        return table, {"wall_ms": seconds * 1e3, "kernels_ms": busy, "kernels": float(count), "steps": float(steps)}

    def fresh(self, count: int) -> list[int]:
        """Ids without those at the ends of the vocabulary, which may be control tokens."""
        return self._random.choices(self._ids, k=count)

    def _seconds(self, rows: int, tokens: int, budget: int) -> float:
        prompts = [self.fresh(tokens) for _ in range(rows)]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, greedy(budget))
        seconds = time.perf_counter() - start
        _check(outputs, budget)
        return seconds

    def _decode(self, rows: int, tokens: int, budget: int) -> DecodeSample:
        prompts = [self.fresh(tokens) for _ in range(rows)]
        with ExitStack() as stack:
            streams = [stack.enter_context(self._llm.generate_stream(prompt, greedy(budget))) for prompt in prompts]
            marks = list(rounds(streams))[SETTLING:]
            _check([stream.result() for stream in streams], budget)
        if len(marks) < 2:
            raise RuntimeError(f"the first of {rows} answers of {budget} tokens ended before all of them had been decoding for {SETTLING + 1} steps")
        (began, before), (ended, after) = marks[0], marks[-1]
        return DecodeSample((after - before) / (ended - began), round((after - before) / rows))

    def _watched(self, prompt: Sequence[int]) -> tuple[GenerationOutput, list[dict[str, float]], float]:
        """One answer of a few tokens, and allocated memory while it was computed, by slices of time."""
        ended = threading.Event()
        entries: list[dict[str, float]] = []

        def watch() -> None:
            start = time.perf_counter()
            while not ended.wait(_MEMORY_POLL):
                now, peak, seconds = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), time.perf_counter() - start
                torch.cuda.reset_peak_memory_stats()
                if entries and seconds < entries[-1]["at_s"] + _MEMORY_SLICE:
                    entries[-1]["peak_bytes"] = max(entries[-1]["peak_bytes"], peak)
                    entries[-1]["after_bytes"] = now
                else:
                    entries.append({"at_s": round(seconds, 3), "before_bytes": now, "after_bytes": now, "peak_bytes": peak})

        watcher = threading.Thread(target=watch)
        if torch.cuda.is_available():
            watcher.start()
        start = time.perf_counter()
        try:
            (output,) = self._llm.generate(list(prompt), greedy(8))
        finally:
            seconds = time.perf_counter() - start
            ended.set()
            if watcher.ident is not None:
                watcher.join()
        return output, entries, seconds


def _check(outputs: Sequence[GenerationOutput], budget: int) -> None:
    for output in outputs:
        if len(output.token_ids) != budget:
            raise RuntimeError(f"an answer of {budget} tokens ended after {len(output.token_ids)}: measure a checkpoint without EOS")
        if output.usage.cached_tokens:
            raise RuntimeError(f"a prompt drawn afresh hit the prefix cache with {output.usage.cached_tokens} tokens: the sample is not a prefill")


def _answer(rows: int, steps: int) -> int:
    """Tokens of each answer where decoding is measured: as prompts are computed in turn, the last row may begin some `rows` steps after the first."""
    return steps + rows + SETTLING
