"""How loading shows on stderr: one line that is rewritten on a terminal, a few lines elsewhere, and what the log says meanwhile."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self, TextIO

from pocketllm.backends.base import LoadProgress

_SECONDS_BETWEEN_LINES = 2.0
_LOGGER = logging.getLogger("pocketllm")


class ProgressLine:
    """A ProgressCallback that writes to `stream`. As a context manager it prints what the log says meanwhile, from INFO on, and clears its line at the end."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next = 0.0
        self._handler = _LogLines(self)
        self._level = logging.NOTSET

    def __call__(self, progress: LoadProgress) -> None:
        line = f"pocketllm: loading {progress.fraction:4.0%}  {progress.message}"
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{line}")
            self._stream.flush()
        elif (now := time.monotonic()) >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            print(line, file=self._stream, flush=True)

    def say(self, message: str) -> None:
        """A line that stays."""
        clear = "\r\x1b[K" if self._is_terminal else ""
        print(f"{clear}pocketllm: {message}", file=self._stream, flush=True)

    def __enter__(self) -> Self:
        self._level = _LOGGER.level
        _LOGGER.setLevel(logging.INFO)
        _LOGGER.addHandler(self._handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        _LOGGER.removeHandler(self._handler)
        _LOGGER.setLevel(self._level)
        if self._is_terminal:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


class _LogLines(logging.Handler):
    """Hands what the log says to a ProgressLine."""

    def __init__(self, line: ProgressLine) -> None:
        super().__init__(logging.INFO)
        self._line = line

    def emit(self, record: logging.LogRecord) -> None:
        self._line.say(self.format(record))
