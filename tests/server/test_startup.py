"""What a user sees when a model can't be started or inspected: one line and exit code 2."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.conftest import WriteGGUF
from tests.server_process import ROOT, ServerProcess, serve


def run(*arguments: str) -> tuple[int, str, list[str]]:
    """Exit code, stdout, and lines of stderr of `python -m pocketllm`."""
    done = subprocess.run([sys.executable, "-m", "pocketllm", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr.splitlines()


def missing(default_model: Path, directory: Path) -> Path:
    return directory / "missing.gguf"


def empty(default_model: Path, directory: Path) -> Path:
    (directory / "empty.gguf").touch()
    return directory / "empty.gguf"


def truncated_in_the_header(default_model: Path, directory: Path) -> Path:
    with default_model.open("rb") as source:
        (directory / "half.gguf").write_bytes(source.read(1_000_000))
    return directory / "half.gguf"


def truncated_in_the_tensors(default_model: Path, directory: Path) -> Path:
    with default_model.open("rb") as source:
        (directory / "most.gguf").write_bytes(source.read(20_000_000))
    return directory / "most.gguf"


def corrupt(default_model: Path, directory: Path) -> Path:
    with default_model.open("rb") as source:
        header = bytearray(source.read(1_000_000))
    header[24:] = bytes((7 * place + place // 251) % 256 for place in range(len(header) - 24))
    (directory / "corrupt.gguf").write_bytes(header)
    return directory / "corrupt.gguf"


def another_kind_of_file(default_model: Path, directory: Path) -> Path:
    (directory / "page.gguf").write_text("<!DOCTYPE html><html><body>Not found</body></html>" * 100)
    return directory / "page.gguf"


def directory_without_a_config(default_model: Path, directory: Path) -> Path:
    (directory / "checkpoint").mkdir()
    return directory / "checkpoint"


FAULTS = {
    missing: "does not exist",
    empty: "is empty",
    truncated_in_the_header: "truncated or corrupt",
    truncated_in_the_tensors: "truncated or corrupt",
    corrupt: "truncated or corrupt",
    another_kind_of_file: "GGUF",
    directory_without_a_config: "config.json",
}


@pytest.mark.parametrize("command", [("inspect",), ("serve", "--port", "0")], ids=["inspect", "serve"])
@pytest.mark.parametrize("make", FAULTS, ids=lambda make: make.__name__)
def test_a_model_that_cannot_be_opened_is_one_line(default_model: Path, tmp_path: Path, make: Callable[[Path, Path], Path], command: tuple[str, ...]) -> None:
    path = make(default_model, tmp_path)
    code, output, lines = run(*command, "--model", str(path))
    assert code == 2
    assert output == ""
    if command[0] == "serve":
        assert lines.pop(0).startswith("pocketllm: Listening on http://127.0.0.1:")
    (line,) = lines
    assert line.startswith("pocketllm: error: ")
    assert str(path) in line
    assert FAULTS[make] in line
    assert len(line) < 400


def test_an_architecture_that_no_plane_runs(write_gguf: WriteGGUF) -> None:
    path = write_gguf(architecture="mamba9")
    code, _, lines = run("serve", "--port", "0", "--model", str(path))
    assert code == 2
    assert len(lines) == 2
    assert lines[1].startswith("pocketllm: error: ")
    assert "mamba9" in lines[1]

    # To inspect reports, and what no plane runs is a fact like the others.
    code, output, lines = run("inspect", str(path))
    assert (code, lines) == (0, [])
    assert "mamba9" in output
    assert "torch plane    no: " in output


def test_a_file_that_lacks_a_tensor(write_gguf: WriteGGUF) -> None:
    path = write_gguf()
    code, _, lines = run("serve", "--port", "0", "--model", str(path))
    assert code == 2
    assert lines[-1].startswith(f"pocketllm: error: {path} lacks the tensor ")
    assert not [line for line in lines if "Traceback" in line]


def test_busy_port(default_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = serve("--model", default_model, "--port", port)
        try:
            assert server.end(60) == 2
            assert server.lines == [f"pocketllm: error: port {port} is in use: choose another with --port"]
        finally:
            server.kill()


LOADING = """
import sys, threading
import torch
from pocketllm.cli.main import main
from pocketllm.generation import GenerationService

def compute():
    print("pocketllm: computing", file=sys.stderr, flush=True)
    while True:
        torch.ones(300, 300) @ torch.ones(300, 300)

def open_(args, progress=None):
    engine = threading.Thread(target=compute, daemon=True)
    engine.start()
    engine.join()

torch.set_num_threads(1)
GenerationService.open = open_
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("arguments", "number", "code"),
    [(("serve", "--port", "0"), signal.SIGTERM, 0), (("serve", "--port", "0"), signal.SIGINT, 0), (("chat",), signal.SIGINT, 130)],
)
def test_a_signal_while_native_code_loads_the_model(arguments: tuple[str, ...], number: signal.Signals, code: int) -> None:
    process = ServerProcess("-c", LOADING, *arguments)
    try:
        process.wait_for("computing", 60)
        process.process.send_signal(number)
        assert process.end() == code
        assert not [line for line in process.lines if not line.startswith("pocketllm: ")]
    finally:
        process.kill()


def test_sigterm_while_the_weights_are_loaded(default_model: Path) -> None:
    server = serve("--model", default_model)
    try:
        url = server.wait_for(r"Listening on (http\S+)")
        server.wait_for("importing torch")
        end = time.monotonic() + 60
        while "loading weights" not in httpx.get(f"{url}/ready").json()["detail"]:
            assert time.monotonic() < end
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        assert server.end() == 0
        assert not [line for line in server.lines if not line.startswith("pocketllm: ")]
    finally:
        server.kill()
