"""A server in a process of its own, as a user starts it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = ("--backend-options", '{"num_threads": 1}')


class ServerProcess:
    """A running command and what it says on stderr.

    Args:
        command: arguments of this Python.
    """

    def __init__(self, *command: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("POCKETLLM_") or name == "POCKETLLM_CACHE"}
        environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # a native module may be in a build tree
        self.process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip("\n"))

    def wait_for(self, pattern: str, seconds: float = 20) -> str:
        """The first group of `pattern`, or all that it matches, in the first line that has it."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if ended := self.process.poll() is not None:
                self._reader.join(5)  # it has read all that was said
            for line in list(self.lines):
                if match := re.search(pattern, line):
                    return match[1] if match.re.groups else match[0]
            assert not ended, f"the process ended, and no line has {pattern!r}: {self.lines}"
            time.sleep(0.01)
        raise AssertionError(f"no line has {pattern!r}: {self.lines}")

    def end(self, seconds: float = 20) -> int:
        """Wait until it ends; the exit code."""
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def kill(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        self.process.wait()
        self._reader.join(5)
        for pipe in (self.process.stdout, self.process.stderr):
            assert pipe is not None
            pipe.close()


def serve(*options: Any) -> ServerProcess:
    """`python -m pocketllm serve` on a free port, on one thread."""
    return ServerProcess("-m", "pocketllm", "serve", "--port", "0", *ONE_THREAD, *map(str, options))


def wait_until_ready(server: ServerProcess) -> str:
    """The URL of the server once its model is loaded."""
    return server.wait_for(r"is ready at (http\S+)", 180)


def gauge(url: str, name: str) -> float:
    """A value of the server's /metrics."""
    (line,) = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith(f"pocketllm_{name} ")]
    return float(line.split()[1])
