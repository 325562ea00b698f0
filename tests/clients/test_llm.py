"""The `llm` command with a model of extra-openai-models.yaml, and the library under it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import llm
import pytest
from llm.default_plugins.openai_models import Chat

from tests.clients.questions import ASK_ANIMAL, ASK_WEATHER, HELLO, REPORT, Animal, City


@pytest.fixture
def registered(tmp_path: Path, base_url: str, model_name: str) -> str:
    """The name under which the model is registered."""
    entry = {"model_id": "pocket", "model_name": model_name, "api_base": base_url, "supports_tools": True, "supports_schema": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML
    return "pocket"


def run(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "llm", *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stream(registered: str) -> None:
    """The command streams, with usage, where it is not told otherwise."""
    assert run("-m", registered, HELLO).strip()
    (logged,) = json.loads(run("logs", "--json"))
    assert logged["input_tokens"] > 0
    assert logged["output_tokens"] > 0


def test_chat(registered: str) -> None:
    assert run("-m", registered, "--no-stream", HELLO).strip()


def test_structured_answer(registered: str) -> None:
    Animal.model_validate_json(run("-m", registered, "--schema", json.dumps(Animal.model_json_schema()), ASK_ANIMAL))


class _Forced(Chat):
    """`llm` can't ask for a call, and leaves the choice to a model that knows no call syntax."""

    def build_kwargs(self, prompt: Any, stream: bool) -> dict[str, Any]:
        given: dict[str, Any] = super().build_kwargs(prompt, stream)
        return given if prompt.tool_results else {**given, "tool_choice": "required"}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_tool_round_trip(base_url: str, model_name: str, stream: bool) -> None:
    cities: list[str] = []

    def get_weather(city: City) -> str:
        """The weather in a city."""
        cities.append(city)
        return REPORT

    tool = llm.Tool.function(get_weather)
    model = _Forced("pocket", key="none", model_name=model_name, api_base=base_url, supports_tools=True)
    first, second = model.chain(ASK_WEATHER, tools=[tool], stream=stream).responses()
    assert len(cities) == 1
    assert first.tool_calls()[0].tool_call_id
    assert second.text().strip()
