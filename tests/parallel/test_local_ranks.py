"""Ranks that a library call starts: they answer as one does, and end with the model, with the program, and with each other."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import psutil
import pytest

from pocketllm import LLM, EngineArgs, SamplingParams
from pocketllm.errors import PocketLLMError, TensorParallelSupervisorError
from pocketllm.parallel.rank import NAMES
from tests.server_process import ROOT

MODEL = ROOT / "tests/models/tiny_qwen3_5_trained"
NATIVE = pytest.mark.skipif(importlib.util.find_spec("pocketllm_cpp") is None, reason="the native module is not built: build it with scripts/build_native.sh")
Plane = Literal["torch", "cpp"]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The system's temporary directory, in a process that no launcher has started."""
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]))  # of the ranks
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def args(plane: Plane, size: int) -> EngineArgs:
    return EngineArgs(model=str(MODEL), backend=plane, device="cpu", dtype="float32", tensor_parallel_size=size, backend_options={"num_threads": 1})


def ranks_of(pid: int) -> list[psutil.Process]:
    found = []
    for child in psutil.Process(pid).children(recursive=True):
        if child.status() != psutil.STATUS_ZOMBIE and "--no-tensor-parallel-supervisor" in child.cmdline():
            found.append(child)
    return found


def eventually(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("plane", ["torch", pytest.param("cpp", marks=NATIVE)])
def test_a_library_call_starts_the_ranks_that_it_needs_and_ends_them(plane: Plane, directory: Path) -> None:
    prompts = [[1, 42, 17], list(range(60))]
    with LLM(args(plane, 1)) as alone:
        expected = [output.token_ids for output in alone.generate(prompts, GREEDY)]
    with LLM(args(plane, 2)) as llm:
        (rank,) = ranks_of(os.getpid())
        assert [output.token_ids for output in llm.generate(prompts, GREEDY)] == expected
        assert len(list(directory.iterdir())) == 1
    assert not rank.is_running()
    assert list(directory.iterdir()) == []


@NATIVE
def test_a_killed_rank_ends_answers_with_its_name() -> None:
    llm = LLM(args("cpp", 2))
    (rank,) = ranks_of(os.getpid())
    with llm.generate_stream([1, 2, 3], SamplingParams(max_tokens=3000, temperature=2.0, seed=1)) as stream:
        next(iter(stream))
        rank.send_signal(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PocketLLMError, match="rank 1"):
            for _ in stream:
                pass
    with pytest.raises(PocketLLMError, match="rank 1"):
        llm.generate([[1, 2]], GREEDY)
    llm.close()
    assert time.monotonic() - began < 10
    assert ranks_of(os.getpid()) == []


@NATIVE
def test_ranks_end_with_the_program(directory: Path) -> None:
    code = f"""
import tempfile, time
tempfile.tempdir = {str(directory)!r}
from pocketllm import LLM
from tests.parallel.test_local_ranks import args
llm = LLM(args("cpp", 2))
print("loaded", flush=True)
time.sleep(60)
"""
    program = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert program.stdout is not None
    assert program.stdout.readline() == "loaded\n"
    (rank,) = ranks_of(program.pid)
    program.kill()
    program.wait()
    program.stdout.close()
    eventually(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)
    eventually(lambda: list(directory.iterdir()) == [])


@NATIVE
def test_a_program_that_never_closes_its_model_ends_its_ranks() -> None:
    code = """
import os
from pocketllm import LLM
from tests.parallel.test_local_ranks import GREEDY, args
llm = LLM(args("cpp", 2))
print(len(llm.generate([[1, 2]], GREEDY)), flush=True)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")
    assert time.monotonic() - began < 30


def test_a_rank_that_can_not_load_is_told_with_its_last_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, directory: Path) -> None:
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such thing >&2\nexit 3\n")
    broken.chmod(0o755)
    directory = tmp_path / "ranks"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(TensorParallelSupervisorError, match="rank 1 ended with exit code 3; it last said: no such thing, while the model loaded"):
        LLM(args("torch", 2))
    assert list(directory.iterdir()) == []
