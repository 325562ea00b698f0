"""The samples of the README and of examples/, as written, against a live server or a library over the fake backend."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pocketllm.config import EngineArgs
from pocketllm.generation import GenerationService
from tests.fake_serving import StartServer, fake, make_service

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
DEFAULT_URL = "http://127.0.0.1:8000"


def block(heading: str) -> str:
    """The first code block under a heading of the README."""
    match = re.search(rf"^## {heading}\n.*?```\w*\n(.*?)```", README, re.DOTALL | re.MULTILINE)
    assert match is not None
    return match[1]


def output(*command: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("POCKETLLM_")}
    run = subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT, env={**inherited, **environment}, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.parametrize("sample", [block("The openai client"), (ROOT / "examples/openai_client.py").read_text()], ids=["README", "examples"])
def test_openai_client(start_server: StartServer, sample: str) -> None:
    server = start_server(fake(eos_after=30))
    assert DEFAULT_URL in sample
    assert re.search(r"[a-z]{30}", output(sys.executable, "-c", sample.replace(DEFAULT_URL, server.url)))


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(start_server: StartServer) -> None:
    server = start_server()
    sample = block("curl")
    assert DEFAULT_URL in sample
    assert json.loads(output("bash", "-c", sample.replace(DEFAULT_URL, server.url)))["usage"]["completion_tokens"] == 32


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("key", [None, "secret"])
def test_chat_script(start_server: StartServer, key: str | None) -> None:
    server = start_server(api_key=key)
    answer, *stream = output("examples/chat.sh", SERVER=server.url, POCKETLLM_API_KEY=key or "").splitlines()
    assert json.loads(answer)["object"] == "chat.completion"
    assert [line for line in stream if line][-1] == "data: [DONE]"


@pytest.mark.parametrize("name", ["README", "examples/quickstart.py", "examples/async_stream.py"])
def test_library(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def open_(args: EngineArgs, progress: Any = None) -> GenerationService:
        assert args.model is None
        return make_service(fake(eos_after=30), progress or (lambda _progress: None))

    monkeypatch.setattr(GenerationService, "open", open_)
    monkeypatch.setattr(sys, "argv", [name])
    path = ROOT / name
    if name == "README":
        path = tmp_path / "sample.py"
        path.write_text(block("Python"))
    runpy.run_path(str(path), run_name="__main__")
    assert len(re.findall(r"[a-z]{30}", capsys.readouterr().out)) == 3
