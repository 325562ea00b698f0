"""A server over the fake backend, in a process of its own, and the schema of every report."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.fake_serving import LETTERS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def fake_url() -> Iterator[str]:
    """URL of the server; it makes 200 tokens a second."""
    options = {"server": {"port": 0}, "fake": {"tokens_per_second": 200.0, "alphabet": LETTERS, "context_length": 4096}}
    command = [sys.executable, str(ROOT / "tests" / "server" / "fake_server.py"), json.dumps(options)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield next(line for line in process.stderr if "is ready at" in line).split("is ready at ")[1].split()[0]
    finally:
        process.terminate()
        process.communicate()


@pytest.fixture(scope="session")
def read_report() -> Callable[[Path], dict[str, Any]]:
    """Reads a report, checked against docs/bench-report.schema.json."""
    schema = json.loads((ROOT / "docs" / "bench-report.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)

    def read(path: Path) -> dict[str, Any]:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        validator.validate(report)
        return report

    return read
