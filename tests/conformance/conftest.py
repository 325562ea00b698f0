"""The oracle and the prompts, made once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.tokenizer import load_tokenizer
from tests.conformance.llama_oracle import Oracle, load_oracle
from tests.conformance.prompts import prompts


@pytest.fixture(scope="session")
def oracle(default_model: Path) -> Oracle:
    torch.set_num_threads(1)
    return load_oracle(default_model)


@pytest.fixture(scope="session")
def prompt_ids(default_model: Path) -> list[list[int]]:
    return prompts(load_tokenizer(open_checkpoint(default_model, "auto"), None))
