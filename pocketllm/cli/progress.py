"""How loading shows on stderr: one line that is rewritten on a terminal, a few lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from pocketllm.backends.base import LoadProgress

_SECONDS_BETWEEN_LINES = 2.0


class ProgressLine:
    """A ProgressCallback that writes to `stream`; leave it as a context manager so that the line is cleared."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next = 0.0

    def __call__(self, progress: LoadProgress) -> None:
        line = f"pocketllm: loading {progress.fraction:4.0%}  {progress.message}"
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()
        elif (now := time.monotonic()) >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            print(line, file=self._stream, flush=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
