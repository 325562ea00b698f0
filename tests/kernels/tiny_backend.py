"""The torch plane on a tiny llama, and requests run together on it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tiny_llama import tiny_tensors, write_tiny_llama

from pocketllm.backends.base import EngineRequest, StepOutput, TokenLogprobs
from pocketllm.backends.torch import TorchBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs

WAIT = 30.0


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


class Listener:
    """Collects one row's outputs."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, output: StepOutput) -> None:
        self.outputs.append(output)
        self.started.set()
        if output.finish_reason is not None:
            self.ended.set()

    def end(self) -> StepOutput:
        assert self.ended.wait(WAIT)
        return self.outputs[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        return [entry for output in self.outputs for entry in output.logprobs]


def run(backend: TorchBackend, *requests: EngineRequest) -> list[Listener]:
    """Submit all of `requests`, and wait for their ends."""
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        backend.submit(request, listener)
    for listener in listeners:
        listener.end()
    return listeners
