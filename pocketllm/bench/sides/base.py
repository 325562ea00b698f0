"""The contract of an engine that is measured."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_DRAWS = 6


class StoppedEarlyError(Exception):
    """The model ended an answer before its budget, so the sample covers fewer tokens than was asked for."""


@dataclass(frozen=True)
class Spec:
    """What a side loads.

    Args:
        model: path of the checkpoint; for a server its URL.
        device: "cpu", or a GPU as torch calls it.
        threads: on a CPU.
        context: most tokens of a prompt and its answer.
        rows: most rows at once.
        seed: of the prompts.
        options: EngineArgs of PocketLLM beside those; of transformers what `from_pretrained` takes.
    """

    model: Path | str
    device: str = "cpu"
    threads: int = 1
    context: int = 1024
    rows: int = 1
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """One sample. `tokens` were prompt tokens of a prefill or generated tokens of what came after it, in `seconds`."""

    tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


class Side(ABC):
    """A loaded engine. What it is asked for, it does at once, greedily, on prompts of ids that it has not seen.

    Args:
        spec: what it loads.
    """

    name: str
    is_batching = True  # whether it takes several rows at once

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self._random = random.Random(f"{spec.seed} {self.name}")
        self._repeated: set[int] = set()  # ids that prompts were made of: a second one would find the first in a cache
        self.discarded = 0

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Versions and settings that a reader needs, as JSON."""

    @abstractmethod
    def prefill(self, rows: int, tokens: int) -> Timing:
        """From the call to the first generated token of every row."""

    @abstractmethod
    def decode(self, rows: int, context: int, steps: int) -> Timing:
        """Steps in which every row decodes, after prompts of `context` ids. Raises StoppedEarlyError."""

    @abstractmethod
    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        """Generated tokens of a whole call, prefill included. Raises StoppedEarlyError."""

    def close(self) -> None:  # noqa: B027  # most engines end with their process
        """Free the model."""

    def measure(self, what: str, *sizes: int) -> Timing:
        """One of the three, drawn again where the model ended an answer early.

        Raises:
            StoppedEarlyError: it did so six times in a row.
        """
        for _ in range(_DRAWS - 1):
            try:
                return self._timing(what, *sizes)
            except StoppedEarlyError:
                self.discarded += 1
        return self._timing(what, *sizes)

    def _timing(self, what: str, *sizes: int) -> Timing:
        measures: dict[str, Callable[..., Timing]] = {"prefill": self.prefill, "decode": self.decode, "whole": self.whole}
        return measures[what](*sizes)

    def fresh(self, count: int) -> list[int]:
        """Random ids, not of the vocabulary's ends, which may be control tokens."""
        return self._random.choices(range(self.vocab_size // 20, self.vocab_size - self.vocab_size // 10), k=count)

    def repeating(self, count: int) -> list[int]:
        """One fresh id, repeated: a model mostly goes on with it rather than ending its answer."""
        if len(self._repeated) >= self.vocab_size // 2:
            self._repeated.clear()
        while (drawn := self.fresh(1)[0]) in self._repeated:
            pass
        self._repeated.add(drawn)
        return [drawn] * count
