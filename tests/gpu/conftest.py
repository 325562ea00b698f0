"""Tests of the torch plane on a GPU, through the backend door. They need CUDA, torch, Triton and transformers, and no checkpoint.

TEST_DEVICE=cpu runs them on the CPU, which shows that the tests are right, and nothing about the kernels.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> str:
    """What EngineArgs.device is to be."""
    wanted = os.environ.get("TEST_DEVICE", "cuda")
    if wanted != "cpu" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return wanted


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The oracles are too small for more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
