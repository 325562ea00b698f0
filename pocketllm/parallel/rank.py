"""Which rank of a tensor-parallel group this process is, as its launcher says in the environment. docs/tensor-parallel.md is the contract."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from pocketllm import env
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError

DIRECTORY, NCCL_ID, CONTROL_FD = "POCKETLLM_TP_DIR", "POCKETLLM_TP_NCCL_ID", "POCKETLLM_TP_CONTROL_FD"
_RANKS, _SIZES = ("TP_RANK", "RANK"), ("TP_WORLD", "WORLD_SIZE")
_MASTER_ADDR, _MASTER_PORT = "MASTER_ADDR", "MASTER_PORT"
_INTERFACE = "GLOO_SOCKET_IFNAME"
NAMES = (*_RANKS, *_SIZES, "LOCAL_RANK", "LOCAL_WORLD_SIZE", _MASTER_ADDR, _MASTER_PORT, DIRECTORY, NCCL_ID, CONTROL_FD)


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank.

    Args:
        index: in [0, size); rank 0 schedules, and alone serves HTTP.
        size: ranks that share the model.
        local_index: among the ranks of this machine; the number of its GPU.
        local_size: ranks on this machine.
        directory: private to this run, or None where no supervisor made one.
        nccl_id_path: where rank 0 leaves the id of the NCCL communicator, for a plane that has no other way to hand it on; or None likewise.
        master: address and port of rank 0 at which the ranks meet, or None where they meet in `directory`.
        control_fd: this process's end of the supervisor's control channel, or None without a supervisor.
    """

    index: int
    size: int
    local_index: int
    local_size: int
    directory: Path | None = None
    nccl_id_path: Path | None = None
    master: tuple[str, int] | None = None
    control_fd: int | None = None

    @classmethod
    def from_environment(cls, args: EngineArgs) -> Rank:
        """The rank that the launcher gave this process.

        Raises:
            UnsupportedFeatureError: no launcher started this process.
            ConfigurationError: the launcher named another number of ranks than `args`, or no place to meet; or a variable is no number.
        """
        found = env.variables(NAMES)
        index = _number(found, _RANKS)
        if index is None and args.tensor_parallel_rank > 0:
            index = args.tensor_parallel_rank
        if index is None and _MASTER_PORT in found:
            index = 0  # a manual launcher, whose rank 0 needs no option
        if index is None:
            raise UnsupportedFeatureError(
                f'"tensor_parallel_size" = {args.tensor_parallel_size} needs as many processes: use pocketllm serve, which starts them, or torchrun.',
                param="tensor_parallel_size",
            )
        size = _number(found, _SIZES)
        size = args.tensor_parallel_size if size is None else size
        if size != args.tensor_parallel_size:
            raise ConfigurationError(
                f'"tensor_parallel_size" = {args.tensor_parallel_size}, and the launcher started {size} ranks: make them equal.', param="tensor_parallel_size"
            )
        if index >= size or args.tensor_parallel_rank not in (0, index):
            raise ConfigurationError(
                f'"tensor_parallel_rank" = {args.tensor_parallel_rank}, and the launcher calls this process rank {index} of {size}: leave one of them out.',
                param="tensor_parallel_rank",
            )
        port = _number(found, (_MASTER_PORT,))
        master = None if port is None else (found.get(_MASTER_ADDR, "127.0.0.1"), port)
        if master is None and DIRECTORY not in found:
            raise ConfigurationError(
                f"rank {index} of {size} has no place to meet the others: set MASTER_ADDR and MASTER_PORT to an address of rank 0, as torchrun does.",
                param="tensor_parallel_rank",
            )
        local_index, local_size = _number(found, ("LOCAL_RANK",)), _number(found, ("LOCAL_WORLD_SIZE",))
        local_index = index if local_index is None else local_index
        local_size = size if local_size is None else local_size
        if local_index >= local_size:
            raise ConfigurationError(
                f"LOCAL_RANK = {local_index} is not below LOCAL_WORLD_SIZE = {local_size}: set both to what they are on this machine.",
                param="tensor_parallel_rank",
            )
        return cls(
            index,
            size,
            local_index,
            local_size,
            Path(found[DIRECTORY]) if DIRECTORY in found else None,
            Path(found[NCCL_ID]) if NCCL_ID in found else None,
            master,
            _number(found, (CONTROL_FD,)),
        )


def has_launcher(args: EngineArgs) -> bool:
    """Whether somebody has started this process as a rank, or its user says that it is one."""
    found = env.variables(NAMES)
    return args.tensor_parallel_rank > 0 or _MASTER_PORT in found or any(name in found for name in _RANKS)


def names_a_rank() -> bool:
    """Whether a launcher has made this process one of several ranks."""
    found = env.variables(NAMES)
    return _number(found, _RANKS) is not None and (_number(found, _SIZES) or 1) > 1


def rank_variables(index: int, size: int, directory: Path, master: tuple[str, int | None], control_fd: int) -> dict[str, str | None]:
    """What a supervisor sets in the environment of rank `index`; None takes out what stands there."""
    address, port = master
    loopback = {"linux": "lo", "darwin": "lo0"}.get(sys.platform)
    # Ranks of one machine need not be reached from others. What the user has set stays.
    interface = {_INTERFACE: loopback} if loopback is not None and address in ("127.0.0.1", "localhost") and not env.variables([_INTERFACE]) else {}
    return {
        **interface,
        "TP_RANK": str(index),
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "TP_WORLD": str(size),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        _MASTER_ADDR: address,
        _MASTER_PORT: None if port is None else str(port),
        DIRECTORY: str(directory),
        NCCL_ID: str(directory / "nccl-id"),
        CONTROL_FD: str(control_fd),
    }


def _number(found: dict[str, str], names: tuple[str, ...]) -> int | None:
    """The first of `names` that is set."""
    for name in names:
        if name in found:
            if not found[name].isdecimal():
                raise ConfigurationError(f"The variable {name} = {found[name]!r} is not valid: set it to a whole number, or to nothing.")
            return int(found[name])
    return None
