"""The other ranks of a model whose rank 0 is this process, such as a program that uses the library: started, watched and ended from here."""

from __future__ import annotations

import queue
import selectors
import shutil
import socket
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from pocketllm.backends.base import Backend, ProgressCallback
from pocketllm.config import EngineArgs
from pocketllm.errors import BackendUnavailableError, TensorParallelSupervisorError
from pocketllm.parallel.rank import Rank, rank_variables
from pocketllm.parallel.rank_process import RankProcess

_BEAT = 0.2  # seconds after which ranks are looked at though none of them said anything
_VERDICT = 1.0  # seconds in which a rank that has ended is noticed after rank 0 has failed
_FAREWELL = 15.0  # seconds until a rank that was told to stop is killed


class LocalRanks:
    """Ranks 1 to N - 1, each `pocketllm serve` on this machine, which end with this process whatever ends that.

    Args:
        args: as rank 0 has them.
        backend: rank 0's, not yet loaded.

    Raises:
        TensorParallelSupervisorError: a process can't be started.
    """

    def __init__(self, args: EngineArgs, backend: Backend) -> None:
        size = args.tensor_parallel_size
        self._backend = backend
        self._directory = Path(tempfile.mkdtemp(prefix="pocketllm-tp-")).resolve()
        self._ranks: list[RankProcess] = []
        self._selector = selectors.DefaultSelector()
        self._news: queue.SimpleQueue[BaseException | str | None] = queue.SimpleQueue()  # how the load ended, or which rank is lost
        self._lock = threading.Lock()
        self._loss: str | None = None
        self._is_closing = False
        self._is_loaded = False  # guarded by _lock, with the two above
        self._watcher = threading.Thread(target=self._watch, name="pocketllm-ranks", daemon=True)
        backend.rank = Rank(0, size, 0, size, self._directory, self._directory / "nccl-id")
        try:
            for index in range(1, size):
                self._start(index, args)
        except OSError as error:
            self.close()
            raise TensorParallelSupervisorError(
                f"rank {len(self._ranks) + 1} could not be started ({error}): free processes or memory of this machine."
            ) from error
        self._watcher.start()

    def load(self, progress: ProgressCallback) -> None:
        """Load rank 0's part, while the others load theirs.

        Raises:
            TensorParallelSupervisorError: another rank failed, with its last words. Whatever `Backend.load` raises.
        """
        threading.Thread(target=self._load, args=(progress,), name="pocketllm-load", daemon=True).start()
        try:
            news = self._news.get()
            if isinstance(news, BackendUnavailableError):  # such as the loss of a rank, of which the watcher knows more
                self._watcher.join(_VERDICT)
                news = self._loss or news
            if news is None:
                return
            if isinstance(news, str):
                self._backend.abandon(news)  # without waiting for it: it may wait for the rank
                raise TensorParallelSupervisorError(f"{news}, while the model loaded.")
            raise news
        except BaseException:
            self._end(0.0)
            raise

    def close(self) -> None:
        """Stop rank 0's engine, which tells the others, and end those that it does not reach. May be called more than once."""
        self._backend.close()
        self._end(_FAREWELL)

    def _start(self, index: int, args: EngineArgs) -> None:
        from pocketllm.cli.options import spell_options  # late: the flags' parser is not needed to use the library

        ours, theirs = socket.socketpair()
        variables = rank_variables(index, args.tensor_parallel_size, self._directory, ("127.0.0.1", None), theirs.fileno())
        options = spell_options(replace(args, tensor_parallel_rank=index))
        command = [sys.executable, "-m", "pocketllm", "serve", *options, "--no-tensor-parallel-supervisor"]
        rank = RankProcess(index, command, variables, ours, theirs, prints=False)
        self._ranks.append(rank)
        rank.register(self._selector)

    def _load(self, progress: ProgressCallback) -> None:
        try:
            self._backend.load(progress)
        except BaseException as error:  # `load` raises it
            self._news.put(error)
            return
        with self._lock:
            self._is_loaded = True
        self._news.put(self._loss)

    def _watch(self) -> None:
        """Until the ranks are to end, or one is lost."""
        while not self._is_closing:
            self._selector.select(_BEAT)
            for rank in self._ranks:
                rank.read(self._selector)
            lost = next((rank for rank in self._ranks if rank.poll() is not None or rank.failure is not None), None)
            if lost is None:
                continue
            for rank in self._ranks:
                rank.read(self._selector)  # its last words
            with self._lock:
                if self._is_closing:
                    return
                self._loss = " ".join((lost.story() if not self._is_loaded else lost.fate()).split())
                is_loaded = self._is_loaded
            if is_loaded:
                self._backend.abandon(self._loss)
            else:
                self._news.put(self._loss)
            return

    def _end(self, farewell: float) -> None:
        with self._lock:
            was_closing, self._is_closing = self._is_closing, True
        if was_closing:
            return
        if self._watcher.is_alive() and threading.current_thread() is not self._watcher:
            self._watcher.join()
        deadline = time.monotonic() + (0.0 if self._loss is not None else farewell)
        while any(rank.poll() is None for rank in self._ranks) and time.monotonic() < deadline:
            self._selector.select(_BEAT)
            for rank in self._ranks:
                rank.read(self._selector)  # else one with much to say would wait for ever
        for rank in self._ranks:
            rank.kill()
            rank.close()
        self._selector.close()
        shutil.rmtree(self._directory, ignore_errors=True)  # a rank that has noticed the end removes it too
