"""The npm packages `openai` and `ai`, in Node.js. What they give is checked here."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.questions import Animal

NODE = Path(__file__).parent / "node"
CITIES = ("Paris", "Rome", "Oslo")


@pytest.fixture(scope="session")
def node() -> str:
    """The node program, with the packages of node/package-lock.json installed."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("there is no Node.js on this machine")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.lstrip("v").split(".")[0]) < 20:
        pytest.skip(f"Node.js {version} is older than 20")
    installed = NODE / "node_modules" / ".package-lock.json"
    if not installed.exists() or installed.stat().st_mtime < (NODE / "package-lock.json").stat().st_mtime:
        done = subprocess.run([npm, "ci", "--no-audit", "--no-fund"], cwd=NODE, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr
    return node


def run(node: str, script: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run([node, NODE / script, *arguments], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_openai(node: str, base_url: str, model_name: str) -> None:
    found = run(node, "openai.mjs", base_url, model_name)
    assert found["chat"]
    assert found["stream"]
    assert found["usage"] > 0
    assert found["call"]["finish_reason"] == "tool_calls"
    assert found["call"]["name"] == "get_weather"
    assert found["call"]["arguments"]["city"] in CITIES
    assert found["streamed_call"]["city"] in CITIES
    assert found["answer"]
    Animal.model_validate(found["animal"])
    assert found["model"] == model_name
    assert found["error"] == {"is_bad_request": True, "param": "temperature", "type": "invalid_request_error"}


def test_ai_sdk(node: str, base_url: str, model_name: str) -> None:
    found = run(node, "ai.mjs", base_url, model_name)
    assert found["chat"]
    assert found["stream"]
    assert found["usage"] > 0
    for call in (found["call"], found["streamed_call"]):
        assert len(call["cities"]) == 1
        assert call["cities"][0] in CITIES
        assert call["text"]
    for animal in (found["animal"], found["streamed_animal"], found["output"]):
        Animal.model_validate(animal)
