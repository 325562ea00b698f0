"""Starts the ranks that share a model on this machine, waits for their readiness, and ends all of them when one ends. It knows no plane.

The supervisor is the process that the user started. Each rank is a child; docs/tensor-parallel.md says what a rank finds in its environment, what
the two tell each other, and what happens when any of them dies.
"""

from __future__ import annotations

import contextlib
import selectors
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from pocketllm.config import SupervisorArgs
from pocketllm.errors import ConfigurationError, TensorParallelSupervisorError
from pocketllm.parallel.rank import rank_variables
from pocketllm.parallel.rank_process import RankProcess

_BEAT = 0.5  # seconds after which ranks are looked at though none of them said anything
_GRACE = 5.0  # seconds that ranks get to tell their clients when another one is lost
_VERDICT = 0.3  # seconds in which other ranks may end too, so that the one that ended first of itself is named


class Supervisor:
    """The ranks of one run.

    Args:
        args: the user's options.
        size: ranks.
        command: what each rank runs, program first; it learns from the environment which one it is.
        shutdown_timeout: seconds until ranks that were asked to stop are killed, where `args` does not say.
        variables: what every rank finds in its environment besides the supervisor's.
    """

    def __init__(
        self, args: SupervisorArgs, size: int, command: Sequence[str], shutdown_timeout: float, variables: Mapping[str, str | None] | None = None
    ) -> None:
        self._args, self._size, self._command, self._variables = args, size, list(command), dict(variables or {})
        chosen = args.tensor_parallel_shutdown_timeout
        self._shutdown_timeout = shutdown_timeout if chosen is None else chosen
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._signals = 0

    def run(self) -> int:
        """Run until the ranks end; the exit code: 0 after SIGINT or SIGTERM, or when rank 0 ended with 0.

        Raises:
            ConfigurationError: the private directory can't be made.
            TensorParallelSupervisorError: a rank failed, was not ready in time, or did not stop in time. All of them have ended.
        """
        with self._wakeups(), self._directory() as directory:
            try:
                self._start(directory)
                self._await_readiness()
                return self._watch()
            finally:
                for rank in self._ranks:
                    rank.kill()
                for rank in self._ranks:  # apart, since what they said may have nowhere to go
                    rank.read(self._selector)
                    rank.close()
                self._selector.close()

    def _start(self, directory: Path) -> None:
        master = self._args.tensor_parallel_master_addr, self._args.tensor_parallel_master_port
        for index in range(self._size):
            ours, theirs = socket.socketpair()
            variables = {**self._variables, **rank_variables(index, self._size, directory, master, theirs.fileno())}
            try:
                rank = RankProcess(index, self._command, variables, ours, theirs)
            except OSError as error:
                raise TensorParallelSupervisorError(f"rank {index} could not be started ({error}): free processes or memory of this machine.") from error
            self._ranks.append(rank)
            rank.register(self._selector)

    def _await_readiness(self) -> None:
        """Return once every rank is ready and rank 0 was told so, or a signal came, or a rank ended in good order."""
        limit = self._args.tensor_parallel_startup_timeout
        deadline = time.monotonic() + limit
        while not self._signals and not self._has_ended():
            if all(rank.is_ready for rank in self._ranks):
                self._ranks[0].say("start")
                return
            if time.monotonic() >= deadline:
                late = [rank for rank in self._ranks if not rank.is_ready]
                names = " and ".join(rank.story() for rank in late)
                reason = f"not ready after {limit:g} seconds: {names}. Look there, or raise --tensor-parallel-startup-timeout."
                self._fail(reason, "the start took too long")
            self._wait(deadline)
            self._check("while the model loaded")

    def _watch(self) -> int:
        """Until a signal comes or a rank ends; then stop the others."""
        while not self._signals and not self._has_ended():
            self._wait(None)
            self._check("while it served")
        return self._stop()

    def _stop(self) -> int:
        """Ask rank 0 to stop, which tells the others; those that outlive it are told by SIGTERM, and all are killed at the deadline."""
        deadline = time.monotonic() + self._shutdown_timeout
        told = 0
        while running := [rank for rank in self._ranks if rank.poll() is None]:
            if self._ranks[0].poll() is None:
                if told < max(1, self._signals):  # a second signal of the user is one of rank 0's
                    told = max(1, self._signals)
                    self._ranks[0].terminate()
            else:
                for rank in running:
                    rank.terminate()
            if time.monotonic() >= deadline:
                names = ", ".join(str(rank.index) for rank in running)
                for rank in running:
                    rank.kill()
                raise TensorParallelSupervisorError(
                    f"rank {names} did not stop within {self._shutdown_timeout:g} seconds and was killed: raise --tensor-parallel-shutdown-timeout."
                )
            self._wait(deadline)
        first = self._ranks[0]
        if first.poll() not in (0, -signal.SIGTERM):
            raise TensorParallelSupervisorError(f"{first.story()}.")
        return 0

    def _check(self, when: str) -> None:
        """Fail where a rank has ended with an error, or says that it can't go on."""
        if not any(rank.poll() or rank.failure is not None for rank in self._ranks):
            return
        until = time.monotonic() + _VERDICT
        while time.monotonic() < until:
            self._wait(until)
        failed = [rank for rank in self._ranks if rank.poll() or rank.failure is not None]
        first = min(failed, key=_blame)
        self._fail(f"{first.story()}, {when}.", first.fate())

    def _fail(self, reason: str, fate: str) -> None:
        """Tell the ranks `fate`, so that rank 0 tells its clients, who need not see the log of another rank, and end them.

        Raises:
            TensorParallelSupervisorError: always.
        """
        line = " ".join(fate.split())
        for rank in self._ranks:
            rank.say(f"lost {line}")
            rank.terminate()
        deadline = time.monotonic() + _GRACE
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            self._wait(deadline)
        raise TensorParallelSupervisorError(" ".join(reason.split()))

    def _has_ended(self) -> bool:
        return any(rank.poll() is not None for rank in self._ranks)

    def _wait(self, deadline: float | None) -> None:
        """Sleep until a rank says something or ends, a signal comes, or the time is over; print what was said."""
        left = _BEAT if deadline is None else min(_BEAT, max(0.0, deadline - time.monotonic()))
        self._selector.select(left)
        with contextlib.suppress(BlockingIOError):
            while self._wakeup.recv(64):
                pass
        for rank in self._ranks:
            rank.read(self._selector)

    @contextlib.contextmanager
    def _wakeups(self) -> Iterator[None]:
        """Inside, SIGINT and SIGTERM are counted, and they and the end of a child end a `_wait`."""
        self._wakeup, sender = socket.socketpair()
        self._wakeup.setblocking(False)
        sender.setblocking(False)
        self._selector.register(self._wakeup, selectors.EVENT_READ)
        before_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        handlers = {signal.SIGINT: self._count, signal.SIGTERM: self._count, signal.SIGCHLD: _ignore}
        before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
        try:
            yield
        finally:
            for number, old in before.items():
                signal.signal(number, old)
            signal.set_wakeup_fd(before_fd)
            self._wakeup.close()
            sender.close()

    def _count(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1

    @contextlib.contextmanager
    def _directory(self) -> Iterator[Path]:
        """A directory of this run alone, readable by its user alone, removed at the end."""
        parent = self._args.tensor_parallel_rendezvous_dir
        try:
            directory = Path(tempfile.mkdtemp(prefix="pocketllm-tp-", dir=parent)).resolve()
        except OSError as error:
            raise ConfigurationError(
                f'"tensor_parallel_rendezvous_dir" = {parent!r} can\'t hold a directory ({error.strerror}): name one that exists and may be written.',
                param="tensor_parallel_rendezvous_dir",
            ) from None
        try:
            yield directory
        finally:
            shutil.rmtree(directory, onerror=_say_what_stays)


def _blame(rank: RankProcess) -> tuple[int, float]:
    """Orders ranks that failed: first what a signal ended, which others only suffer from; then by time; then what merely complains."""
    code = rank.poll()
    kind = 2 if code is None else 0 if code < 0 else 1
    return kind, rank.ended_at or 0.0


def _ignore(number: int, frame: FrameType | None) -> None:
    """A handler, since a signal without one wakes nobody up."""


def _say_what_stays(function: object, path: str, error: object) -> None:
    print(f"pocketllm: {path} could not be removed", file=sys.stderr)
