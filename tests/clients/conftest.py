"""One server on the embedded model for all clients, each of which is used as its documentation says to use it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server_process import serve, wait_until_ready

# What `pip install -e '.[clients]'` brings. Without it, the tests of this directory are left out by name.
CLIENTS = ("agents", "instructor", "langchain_openai", "langchain_tests", "litellm", "llm", "lm_eval", "openai", "pydantic_ai")
MISSING = [name for name in CLIENTS if importlib.util.find_spec(name) is None]
# Clients read their settings from the environment, and some report to their makers: nothing of the user's is read, and nothing is sent.
PREFIXES = ("OPENAI_", "LANGCHAIN_", "LANGSMITH_", "LITELLM_", "LLM_", "LOGFIRE_")
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # litellm would fetch a list when it is imported

collect_ignore_glob: list[str] = []
if MISSING:
    collect_ignore_glob.append("test_*.py")


def pytest_report_header() -> str | None:
    return f"tests/clients: left out, for there is no {', '.join(MISSING)} (pip install -e '.[clients]')" if MISSING else None


@pytest.fixture(scope="session")
def url(default_model: Path) -> Iterator[str]:
    """The URL of a server that gives answers without a budget 96 tokens, and draws the same ones in every run."""
    server = serve("--model", default_model, "--default-max-tokens", 96, "--seed", 1)
    try:
        yield wait_until_ready(server)
    finally:
        server.kill()


@pytest.fixture(scope="session")
def base_url(url: str) -> str:
    """What clients call the base URL, with the version."""
    return f"{url}/v1"


@pytest.fixture(scope="session")
def model_name(base_url: str) -> str:
    """The name of the served model."""
    name: str = httpx.get(f"{base_url}/models").json()["data"][0]["id"]
    return name


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(PREFIXES):
            monkeypatch.delenv(name)
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
