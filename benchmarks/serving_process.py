"""A server under test, in a process of its own."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading
from collections import deque
from typing import IO

import psutil

from load_generator import LoadError
from tree import ROOT

_READY = re.compile(r"is ready at (http://\S+)")


class ServingProcess:
    """A running server.

    Args:
        command: starts it; it says on stderr where it is ready.
        core: the one that it may use, or None for all.
        patience: seconds that it may take to start.

    Raises:
        LoadError: it did not start.
    """

    def __init__(self, command: list[str], core: int | None = None, patience: float = 60) -> None:
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, cwd=ROOT)
        assert self._process.stderr is not None
        self._stats = psutil.Process(self._process.pid)
        if core is not None:
            self._stats.cpu_affinity([core])  # threads that it starts from here on inherit this
        self._lines: deque[str] = deque(maxlen=20)
        self._is_ready = threading.Event()
        self.url = ""
        threading.Thread(target=self._read, args=(self._process.stderr,), daemon=True).start()
        if not self._is_ready.wait(patience) or not self.url:
            self.close()
            raise LoadError(f"{shlex.join(command)} did not start: {' '.join(self._lines)}")

    def cpu_seconds(self) -> float:
        """User and system time so far."""
        times = self._stats.cpu_times()
        return float(times.user + times.system)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self, stderr: IO[str]) -> None:
        for line in stderr:
            self._lines.append(line.strip())
            if not self.url and (found := _READY.search(line)):
                self.url = found[1]
                self._is_ready.set()
        self._is_ready.set()
