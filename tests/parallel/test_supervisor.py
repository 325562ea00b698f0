"""The supervisor over ranks that are small programs of their own: what it starts, tells, hears, ends and leaves behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from pocketllm.backends.cpp import shared_memory_rank
from pocketllm.cli.main import main
from pocketllm.config import EngineArgs, SupervisorArgs
from pocketllm.errors import ConfigurationError, TensorParallelSupervisorError, UnsupportedFeatureError
from pocketllm.parallel.rank import NAMES, Rank
from pocketllm.parallel.supervisor import Supervisor
from pocketllm.torch_engine.rank_group import RankGroup

# A rank that says what it is, gets ready, and lives until it is told to stop; `act` is what it does besides.
RANK = """
import os, signal, sys, threading, time
from pocketllm.config import EngineArgs
from pocketllm.parallel.rank import Rank
from pocketllm.parallel.rank_link import RankLink
rank = Rank.from_environment(EngineArgs(tensor_parallel_size=2))
link = RankLink(rank)
def stop(*_):
    time.sleep(0.2)  # in which the link's thread says what it heard
    print("stopped", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
print("directory", rank.directory, flush=True)
link.on_lost(lambda reason: print("lost:", reason, flush=True))
{act}
link.ready()
if rank.index == 0:
    link.wait_until_started()
    print("started", flush=True)
{then}
threading.Event().wait()
"""


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[Path]:
    """The caller's directory, which is there and empty afterwards."""
    directory = tmp_path / "rendezvous"
    directory.mkdir()
    yield directory
    assert list(directory.iterdir()) == []


def program(act: str = "", then: str = "") -> list[str]:
    return [sys.executable, "-c", RANK.format(act=act, then=then)]


def supervisor(parent: Path, command: list[str], **options: object) -> Supervisor:
    return Supervisor(SupervisorArgs(tensor_parallel_rendezvous_dir=str(parent), **options), 2, command, 20)  # type: ignore[arg-type]


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children(recursive=True) if child.status() != psutil.STATUS_ZOMBIE]


class StopWhen:
    """SIGTERM to this process once `text` was printed; `said` is all that was printed till then."""

    def __init__(self, capfd: pytest.CaptureFixture[str], text: str) -> None:
        self.said = ""
        self._capfd, self._text = capfd, text
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while self._text not in self.said:
            self.said += "".join(self._capfd.readouterr())
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)


def test_ranks_start_in_a_private_directory_and_stop_on_a_signal(parent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    act = "print(rank.size, oct(os.stat(rank.directory).st_mode & 0o777), rank.nccl_id_path.parent == rank.directory); print('to stderr', file=sys.stderr)"
    stop = StopWhen(capfd, "[rank 0] started")
    assert supervisor(parent, program(act)).run() == 0
    for index in range(2):
        assert f"[rank {index}] 2 0o700 True" in stop.said
        assert f"[rank {index}] to stderr\n" in stop.said
    assert "[rank 0] stopped" in capfd.readouterr().out
    assert children() == []


def test_a_line_without_an_end_is_printed_too(parent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert supervisor(parent, program("print('the end', end='', flush=True); sys.exit(0)")).run() == 0
    assert "the end\n" in capfd.readouterr().out


@pytest.mark.parametrize("index", [0, 1])
def test_a_rank_that_is_killed_ends_the_others_and_is_named(index: int, parent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    then = f"""
note = rank.directory / "started"
if rank.index == 0:
    note.touch()
while not note.exists():
    time.sleep(0.01)
if rank.index == {index}:
    print("last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with pytest.raises(TensorParallelSupervisorError, match=rf"rank {index} was ended by SIGKILL; it last said: .*last words, while it served\."):
        supervisor(parent, program(then=then)).run()
    assert f"[rank {1 - index}] lost: rank {index} was ended by SIGKILL\n" in capfd.readouterr().out  # the log of a rank is not for clients
    assert children() == []


def test_what_a_rank_started_ends_with_it(parent: Path, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    act = f"import subprocess; open({str(note)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); sys.exit(3)"
    with pytest.raises(TensorParallelSupervisorError, match=r"rank [01] ended with exit code 3"):
        supervisor(parent, program(act)).run()
    end = time.monotonic() + 5
    while psutil.pid_exists(pid := int(note.read_text())) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_rank_that_says_it_can_not_go_on(parent: Path) -> None:
    with pytest.raises(TensorParallelSupervisorError, match=r"rank 1 says that a step failed: of two lines"):
        supervisor(parent, program("if rank.index == 1: link.failed('a step failed: of\\ntwo lines')")).run()


def test_a_rank_that_is_never_ready(parent: Path) -> None:
    with pytest.raises(TensorParallelSupervisorError, match=r"not ready after 1 seconds: rank 1 still runs.*--tensor-parallel-startup-timeout"):
        supervisor(parent, program("if rank.index == 1: threading.Event().wait()"), tensor_parallel_startup_timeout=1.0).run()


def test_a_rank_that_does_not_stop_is_killed(parent: Path, capfd: pytest.CaptureFixture[str]) -> None:
    act = "if rank.index == 1: signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    StopWhen(capfd, "[rank 0] started")
    with pytest.raises(TensorParallelSupervisorError, match=r"rank 1 did not stop within 0\.5 seconds and was killed"):
        supervisor(parent, program(act), tensor_parallel_shutdown_timeout=0.5).run()


def test_the_supervisors_death_ends_the_ranks(parent: Path) -> None:
    code = f"""
import sys
from pocketllm.config import SupervisorArgs
from pocketllm.parallel.supervisor import Supervisor
Supervisor(SupervisorArgs(tensor_parallel_rendezvous_dir={str(parent)!r}), 2, {program()!r}, 20).run()
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while "[rank 0] started" not in process.stdout.readline():
        pass
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    process.kill()
    process.wait()
    _, alive = psutil.wait_procs(ranks, 8)
    assert [rank for rank in alive if rank.status() != psutil.STATUS_ZOMBIE] == []
    process.stdout.close()


def test_a_parent_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r'"tensor_parallel_rendezvous_dir" = .*none') as caught:
        supervisor(tmp_path / "none", program()).run()
    assert caught.value.param == "tensor_parallel_rendezvous_dir"


def test_ranks_of_other_launchers(monkeypatch: pytest.MonkeyPatch) -> None:
    args = EngineArgs(tensor_parallel_size=2)
    with pytest.raises(UnsupportedFeatureError, match="torchrun"):
        Rank.from_environment(args)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError, match="no place to meet"):
        Rank.from_environment(args)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert Rank.from_environment(args) == Rank(1, 2, 0, 1, master=("10.0.0.1", 29500))
    with pytest.raises(ConfigurationError, match="started 2 ranks") as caught:
        Rank.from_environment(EngineArgs(tensor_parallel_size=3))
    assert caught.value.param == "tensor_parallel_size"
    monkeypatch.setenv("LOCAL_RANK", "1")
    with pytest.raises(ConfigurationError, match="LOCAL_RANK = 1 is not below LOCAL_WORLD_SIZE = 1"):
        Rank.from_environment(args)
    monkeypatch.setenv("MASTER_PORT", "x")
    with pytest.raises(ConfigurationError, match="MASTER_PORT = 'x'"):
        Rank.from_environment(args)


def test_ranks_by_hand_need_a_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert Rank.from_environment(EngineArgs(tensor_parallel_size=2, tensor_parallel_rank=1)) == Rank(1, 2, 1, 2, master=("127.0.0.1", 29500))
    assert Rank.from_environment(EngineArgs(tensor_parallel_size=2)).index == 0


def test_ranks_of_the_native_plane_share_memory(tmp_path: Path) -> None:
    assert shared_memory_rank(Rank(1, 2, 1, 2, tmp_path)).directory == tmp_path
    with pytest.raises(ConfigurationError, match="rank 1 of 2 has no directory to meet the others in: set POCKETLLM_TP_DIR to one of this run alone"):
        shared_memory_rank(Rank(1, 2, 1, 2, master=("127.0.0.1", 29500)))
    with pytest.raises(UnsupportedFeatureError, match=r'"tensor_parallel_size" = 2 over several machines .* send backend "torch"') as caught:
        shared_memory_rank(Rank(1, 2, 0, 1, tmp_path, master=("10.0.0.1", 29500)))
    assert caught.value.param == "tensor_parallel_size"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (["--tensor-parallel-rank", "1"], "tensor_parallel_rank"),
        (["--no-tensor-parallel-supervisor", "--tensor-parallel-master-port", "29500"], "tensor_parallel_master_port"),
        (["--tensor-parallel-master-addr", "10.0.0.1"], "tensor_parallel_master_addr"),
        (["--tensor-parallel-master-addr", "", "--tensor-parallel-master-port", "29500"], "tensor_parallel_master_addr"),
    ],
)
def test_flags_that_would_be_ignored_are_refused(options: list[str], param: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--model", "no-such-model", "--tensor-parallel-size", "2", *options]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert param in line.replace("-", "_")


def test_a_channel_of_another_process_is_refused(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    note = (tmp_path / "note").open("w")
    for number, what in ((4000, "Bad file descriptor"), (note.fileno(), "Socket operation on non-socket")):
        for name, value in {"TP_RANK": "1", "TP_WORLD": "2", "POCKETLLM_TP_DIR": str(tmp_path), "POCKETLLM_TP_CONTROL_FD": str(number)}.items():
            monkeypatch.setenv(name, value)
        assert main(["serve", "--tensor-parallel-size", "2", "--no-tensor-parallel-supervisor"]) == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert f"POCKETLLM_TP_CONTROL_FD = {number} names no socket of this process ({what}): unset it" in line
    note.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_there_are_ranks_ends_the_command(number: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    def send(*_: object) -> None:
        os.kill(os.getpid(), number)

    monkeypatch.setattr("pocketllm.backends.open.open_backend", send)
    before = signal.getsignal(number)
    assert main(["serve", "--tensor-parallel-size", "2"]) == 0
    assert signal.getsignal(number) == before
    assert children() == []


def test_ranks_that_can_not_meet_say_where() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigurationError, match=rf"rank 0 of 2 can't meet the others at MASTER_ADDR = 127\.0\.0\.1, MASTER_PORT = {port} \(.*\): name an"):
            RankGroup(Rank(0, 2, 0, 2, master=("127.0.0.1", port)), torch.device("cpu"))
    with pytest.raises(ConfigurationError, match=r"rank 1 of 2 can't meet the others at MASTER_ADDR = no\.such\.host\.invalid"):
        RankGroup(Rank(1, 2, 1, 2, master=("no.such.host.invalid", 29500)), torch.device("cpu"))
