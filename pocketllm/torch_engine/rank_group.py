"""What the ranks of a model say to each other: sums and gathered parts of tensors, and the orders of rank 0. Gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from pocketllm.errors import BackendUnavailableError, ConfigurationError
from pocketllm.parallel.rank import Rank
from pocketllm.torch_engine.share import Share

# Ranks wait for orders as long as nobody asks for anything; a peer that dies is noticed by its closed connection, and by the supervisor.
_FOR_EVER = timedelta(days=3650)
_HEADER = 512  # ints that an order has room for in its first message


class RankGroup:
    """This process among the ranks. One thread uses it, the engine's; every rank makes the same calls in the same order.

    What needs the others raises BackendUnavailableError once one of them is lost.

    Args:
        rank: this process and where it meets the others; returns once all are there.
        device: of the tensors that are summed and gathered.
        check: called now and then while the ranks meet in a directory; raises to end that.

    Raises:
        ConfigurationError: the ranks can't meet where `rank` says.
    """

    def __init__(self, rank: Rank, device: torch.device, check: Callable[[], None] = lambda: None) -> None:
        self.rank, self.share = rank, Share(rank.index, rank.size)
        if rank.master is not None:
            meeting: dict[str, Any] = {"init_method": f"tcp://{rank.master[0]}:{rank.master[1]}"}  # of torchrun's own store, where it has one
        else:
            assert rank.directory is not None, "Rank.from_environment has seen to that"
            _await_all(rank, rank.directory, check)
            meeting = {"store": dist.FileStore(str(rank.directory / "store"), rank.size)}  # type: ignore[attr-defined]
        if device.type == "cuda":
            meeting["device_id"] = device
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            if rank.master is not None:
                socket.getaddrinfo(*rank.master)  # torch would go on asking for a name that nobody knows
            dist.init_process_group(backend, rank=rank.index, world_size=rank.size, timeout=_FOR_EVER, **meeting)
        except (OSError, RuntimeError) as error:
            where = rank.directory if rank.master is None else f"MASTER_ADDR = {rank.master[0]}, MASTER_PORT = {rank.master[1]}"
            raise ConfigurationError(
                f"rank {rank.index} of {rank.size} can't meet the others at {where} ({_first_sentence(error)}): "
                "name an address of rank 0 and a free port there.",
                param="tensor_parallel_master_port",
            ) from error
        self.least(0)  # all are there

    def sum(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place of `part`; the same bits on each."""
        with self._together():
            dist.all_reduce(part)
        return part

    def gather(self, part: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's `part`, by rank; all have the same shape."""
        parts = [torch.empty_like(part) for _ in range(self.share.size)]
        with self._together():
            dist.all_gather(parts, part.contiguous())
        return parts

    def gather_columns(self, part: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
        """[num_rows, sum(widths)] of every rank's `part` [num_rows, its width]."""
        missing = max(widths) - part.shape[1]
        parts = self.gather(torch.nn.functional.pad(part, (0, missing)) if missing else part)
        return torch.cat([one[:, :width] for one, width in zip(parts, widths, strict=True)], dim=1)

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        told = torch.tensor([number], dtype=torch.int64)
        with self._together():
            dist.all_reduce(told, dist.ReduceOp.MIN)
        return int(told)

    def numbers(self, number: int) -> list[int]:
        """Every rank's number, by rank."""
        return [int(one) for one in self.gather(torch.tensor([number], dtype=torch.int64))]

    def order(self, numbers: Sequence[int]) -> None:
        """On rank 0: tell the others."""
        told = torch.tensor([len(numbers), *numbers], dtype=torch.int64)
        head = torch.zeros(_HEADER, dtype=torch.int64)
        head[: min(_HEADER, told.shape[0])] = told[:_HEADER]
        with self._together():
            dist.broadcast(head, 0)
            if told.shape[0] > _HEADER:
                dist.broadcast(told[_HEADER:].contiguous(), 0)

    def receive(self) -> list[int]:
        """On another rank: wait for what rank 0 tells."""
        head = torch.empty(_HEADER, dtype=torch.int64)
        with self._together():
            dist.broadcast(head, 0)
        count = int(head[0])
        if count < _HEADER:
            return head[1 : 1 + count].tolist()
        rest = torch.empty(count + 1 - _HEADER, dtype=torch.int64)
        with self._together():
            dist.broadcast(rest, 0)
        return [*head[1:].tolist(), *rest.tolist()]

    def share_words(self, words: npt.NDArray[np.uint32]) -> None:
        """Make `words` those of rank 0, in place."""
        with self._together():
            dist.broadcast(torch.from_numpy(words.view(np.int32)), 0)

    def close(self) -> None:
        """Leave; ranks that wait for this one fail."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Inside, ranks exchange something; a failure is told as the loss that it most likely is, with the library's words as its cause."""
        try:
            yield
        except RuntimeError as error:
            raise BackendUnavailableError(f"another of the {self.share.size} ranks is lost ({_first_sentence(error)})") from error


def _await_all(rank: Rank, directory: Path, check: Callable[[], None]) -> None:
    """Return once every rank has come to `directory`: torch would wait for those that never come without end, and nothing could end that."""
    notes = [directory / f"here-{index}" for index in range(rank.size)]
    notes[rank.index].touch()
    while not all(note.exists() for note in notes):
        check()
        time.sleep(0.01)


def _first_sentence(error: Exception) -> str:
    """What has happened, without the place in the library's source before it and its advice behind."""
    first = re.sub(r"^\[\S+\] ", "", str(error).partition("\n")[0])
    return re.split(r"\.\s", first, maxsplit=1)[0].rstrip(".")
