"""One rank as its supervisor sees it: a process, what it prints, and the control channel to it."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, TextIO

from pocketllm import env

_TAIL_LINES = 3
_LONGEST_LINE = 2**14


class RankProcess:
    """A running rank, in a session and process group of its own, so that signals of the terminal reach the supervisor alone.

    Args:
        index: its rank.
        command: program and arguments; no shell reads them.
        variables: what its environment has besides the supervisor's; None takes a variable out.
        channel: the supervisor's end.
        control: the rank's end of the channel, which is closed here.
        prints: what it says is printed, tagged with its rank.

    Attributes:
        is_ready: it has said so.
        failure: why it says that it can't go on, or None.
        ended_at: when its end was noticed, or None.
    """

    def __init__(
        self, index: int, command: Sequence[str], variables: Mapping[str, str | None], channel: socket.socket, control: socket.socket, *, prints: bool = True
    ) -> None:
        self.index = index
        self._prints = prints
        self.is_ready = False
        self.failure: str | None = None
        self.ended_at: float | None = None
        self._channel = channel
        channel.setblocking(False)
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            pass_fds=(control.fileno(),),
            start_new_session=True,
            env=env.child_environment(variables),
        )
        control.close()
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._words = b""
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._outputs = [_Output(self._process.stdout, sys.stdout), _Output(self._process.stderr, sys.stderr)]

    def register(self, selector: selectors.BaseSelector) -> None:
        """Let `selector` wake up for what this rank says."""
        for output in self._outputs:
            selector.register(output.pipe, selectors.EVENT_READ)
        selector.register(self._channel, selectors.EVENT_READ)

    def read(self, selector: selectors.BaseSelector) -> None:
        """Take what it has said since, print it, and drop from `selector` what it has closed."""
        for output in self._outputs:
            lines, is_open = output.read()
            for line in lines:
                self._tail.append(line)
                if self._prints:
                    print(f"[rank {self.index}] {line}", file=output.target, flush=True)
            if not is_open:
                _forget(selector, output.pipe)
        try:
            while words := self._channel.recv(4096):
                self._words += words
            _forget(selector, self._channel)
        except BlockingIOError:
            pass  # no more for now
        except ConnectionResetError:  # it ended with words of ours unread
            _forget(selector, self._channel)
        *lines_said, self._words = self._words.split(b"\n")
        for said in lines_said:
            word, _, rest = said.decode(errors="replace").partition(" ")
            self.is_ready = self.is_ready or word == "ready"
            if word == "failed" and self.failure is None:
                self.failure = rest

    def poll(self) -> int | None:
        """Its exit code, negative for a signal, or None while it runs. Whatever it started ends with it."""
        code = self._process.poll()
        if code is not None and self.ended_at is None:
            self.ended_at = time.monotonic()
            self._signal_group(signal.SIGKILL)
        return code

    def say(self, line: str) -> None:
        """One line on the control channel. A rank that can't be told has ended, or is about to be killed."""
        try:
            self._channel.sendall(line.encode() + b"\n")
        except OSError:
            return

    def terminate(self) -> None:
        """SIGTERM, to the rank alone: it stops what it has started."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it and everything in its process group, and reap it."""
        if self._process.poll() is None:
            self._signal_group(signal.SIGKILL)
            self._process.wait()
        self.poll()

    def close(self) -> None:
        """Let go of the pipes of a rank that has ended."""
        for output in self._outputs:
            output.pipe.close()
        self._channel.close()

    def fate(self) -> str:
        """How it ended, for clients too."""
        code = self._process.poll()
        if code is None:
            how = f"says that {self.failure}" if self.failure is not None else "still runs"
        elif code < 0:
            how = f"was ended by {signal.Signals(-code).name}"
        else:
            how = f"ended with exit code {code}"
        return f"rank {self.index} {how}"

    def story(self) -> str:
        """How it ended and its last lines, for whoever may read its log."""
        tail = " | ".join(self._tail)
        return self.fate() + (f"; it last said: {tail}" if tail else "")

    def _signal_group(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return  # nothing is left of it


class _Output:
    """A pipe of a rank, read in lines without waiting."""

    def __init__(self, pipe: IO[bytes], target: TextIO) -> None:
        self.pipe, self.target = pipe, target
        self._rest = b""
        self._is_open = True
        os.set_blocking(pipe.fileno(), False)

    def read(self) -> tuple[list[str], bool]:
        """Lines that are complete, and whether more may come."""
        while self._is_open:
            try:
                piece = os.read(self.pipe.fileno(), 2**16)
            except BlockingIOError:
                break
            self._rest += piece
            self._is_open = bool(piece)
        *lines, self._rest = self._rest.split(b"\n")
        if self._rest and (not self._is_open or len(self._rest) > _LONGEST_LINE):
            lines.append(self._rest)
            self._rest = b""
        return [line.decode(errors="replace").rstrip("\r") for line in lines], self._is_open


def _forget(selector: selectors.BaseSelector, file: IO[bytes] | socket.socket) -> None:
    if file in selector.get_map():
        selector.unregister(file)
