"""The torch plane on a tiny llama."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_llama import tiny_tensors, write_tiny_llama

from pocketllm.backends.torch import TorchBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs


@contextmanager
def tiny_backend(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **options: Any) -> Iterator[TorchBackend]:
    """A loaded float32 backend; `tensors` in place of tiny_tensors()."""
    write_tiny_llama(directory, tensors or tiny_tensors())
    backend = TorchBackend(EngineArgs(dtype="float32", backend_options={"num_threads": 1}, **options), open_checkpoint(directory))
    backend.load(lambda progress: None)
    try:
        yield backend
    finally:
        backend.close()
