"""A rank's end of the control channel: it says when it is ready, and hears when another rank or the supervisor is lost."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable

from pocketllm.errors import ConfigurationError
from pocketllm.parallel.rank import CONTROL_FD, Rank

Lost = Callable[[str], None]

_LAST_WORDS = 5.0  # seconds that a rank without a supervisor has to tell its clients


class RankLink:
    """The channel of one rank, read by a thread of its own. Without a supervisor every call returns at once.

    When the supervisor has died, the private directory is removed, `on_lost` is called, and the process ends by SIGTERM, or by force where that does not
    end it.

    Args:
        rank: this process.

    Raises:
        ConfigurationError: the environment names a channel that is not there, such as that of a rank which has ended.
    """

    def __init__(self, rank: Rank) -> None:
        self._directory = rank.directory
        self._lock = threading.Lock()
        self._on_lost: Lost | None = None  # guarded by _lock
        self._reason: str | None = None  # guarded by _lock
        self._started = threading.Event()
        self._channel: socket.socket | None = None
        if rank.control_fd is None:
            self._started.set()
            return
        try:
            os.set_inheritable(rank.control_fd, False)  # else what this process starts would keep the channel open after it
            self._channel = socket.socket(fileno=rank.control_fd)
        except OSError as error:
            raise ConfigurationError(
                f"The variable {CONTROL_FD} = {rank.control_fd} names no socket of this process ({error.strerror}): unset it; only a supervisor sets it, for "
                "the ranks that it starts."
            ) from None
        threading.Thread(target=self._listen, args=(self._channel,), name="pocketllm-rank-link", daemon=True).start()

    def ready(self) -> None:
        """Say that this rank has loaded its part of the model."""
        self._say("ready")

    def failed(self, reason: str) -> None:
        """Say that this rank can't go on; the supervisor then ends all of them."""
        self._say(f"failed {' '.join(reason.split())}")

    def wait_until_started(self) -> None:
        """Return when the supervisor knows that every rank is ready. For rank 0, which alone is told."""
        self._started.wait()

    def on_lost(self, callback: Lost) -> None:
        """Call `callback` with the reason, on a thread of this link, once another rank or the supervisor is lost; at once where one is already."""
        with self._lock:
            self._on_lost, reason = callback, self._reason
        if reason is not None:
            callback(reason)

    def _say(self, line: str) -> None:
        if self._channel is None:
            return
        try:
            self._channel.sendall(line.encode() + b"\n")
        except OSError:
            return  # the supervisor is gone, which the thread that listens sees too

    def _listen(self, channel: socket.socket) -> None:
        rest = b""
        while True:
            try:
                piece = channel.recv(4096)
            except ConnectionResetError:
                piece = b""
            if not piece:
                break
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                word, _, reason = line.decode(errors="replace").partition(" ")
                if word == "start":
                    self._started.set()
                elif word == "lost":
                    self._lose(reason)
        silence = os.open(os.devnull, os.O_WRONLY)
        for number in (1, 2):  # pipes that nobody reads any more, and whose error would end whatever prints
            os.dup2(silence, number)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)  # every rank does it, so one finds parts of it gone
        self._lose("the supervisor of the ranks has died")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_WORDS)
        os._exit(2)

    def _lose(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason, callback = reason, self._on_lost
        if callback is not None:
            callback(reason)
