"""A side in a process of its own: its memory is its own to be measured, and no library meets another's threads."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from pocketllm.bench.hardware import peak_rss
from pocketllm.bench.sides.base import Side, Spec, Timing
from pocketllm.errors import ConfigurationError, PocketLLMError


class SideProcess:
    """A loaded side, idle except while it is asked.

    Args:
        name: as `select.load_side` takes it.
        spec: what it loads.

    Raises:
        PocketLLMError: the engine could not be loaded; one line with its own words.
    """

    def __init__(self, name: str, spec: Spec) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, name, spec))  # no daemon: an engine may have processes of its own
        self._process.start()
        theirs.close()
        try:
            self.load_seconds = float(self._receive())
        except BaseException:
            self.close()
            raise

    def measure(self, what: str, *sizes: int) -> Timing:
        """As Side.measure. Raises PocketLLMError where the engine failed."""
        self._pipe.send((what, sizes))
        timing: Timing = self._receive()
        return timing

    def facts(self) -> dict[str, Any]:
        """The side's own facts, how often a sample was drawn again, and memory: largest resident set, and on a GPU what torch had allocated at most."""
        self._pipe.send(("facts", ()))
        facts: dict[str, Any] = self._receive()
        return {"load_seconds": self.load_seconds, "peak_rss_bytes": peak_rss(self._process.pid or 0), **facts}

    def close(self) -> None:
        self._pipe.close()
        self._process.join(20)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _receive(self) -> Any:
        try:
            kind, value = self._pipe.recv()
        except EOFError:
            self._process.join(5)
            raise PocketLLMError(f"The process of {self.name} ended with {self._process.exitcode}: run it alone to see why, or leave it out.") from None
        if kind == "error":
            raise ConfigurationError(f"{self.name}: {value}")
        return value

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _serve(pipe: Connection, name: str, spec: Spec) -> None:
    """The other process: load, then answer until the pipe closes."""
    from pocketllm.bench.sides.select import load_side

    start = time.perf_counter()
    try:
        side = load_side(name, spec)
    except Exception as error:  # of any engine, in whatever words: it is shown in one line
        pipe.send(("error", _line(error)))
        return
    pipe.send(("ok", time.perf_counter() - start))
    try:
        while True:
            what, sizes = pipe.recv()
            try:
                answer: Any = _facts(side) if what == "facts" else side.measure(what, *sizes)
            except Exception as error:
                pipe.send(("error", _line(error)))
            else:
                pipe.send(("ok", answer))
    except (EOFError, BrokenPipeError, KeyboardInterrupt):  # nobody asks any more
        side.close()


def _facts(side: Side) -> dict[str, Any]:
    return {**side.facts, "is_batching": side.is_batching, "discarded_samples": side.discarded, **_gpu_memory()}


def _gpu_memory() -> dict[str, int]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {}
    return {"peak_gpu_bytes": int(torch.cuda.max_memory_allocated())}


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
