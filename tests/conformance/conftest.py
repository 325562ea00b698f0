"""The prompts, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.tokenizer import load_tokenizer
from tests.conformance.prompts import prompts


@pytest.fixture(scope="session")
def prompt_ids(default_model: Path) -> list[list[int]]:
    return prompts(load_tokenizer(open_checkpoint(default_model, "auto"), None))
