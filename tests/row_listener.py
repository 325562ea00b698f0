"""Collects what a backend says of rows, for tests of any plane."""

from __future__ import annotations

import threading

from pocketllm.backends.base import Backend, EngineRequest, StepOutput, TokenLogprobs

WAIT = 20.0


class Listener:
    """Collects one row's outputs."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.started, self.ended = threading.Event(), threading.Event()

    def __call__(self, output: StepOutput) -> None:
        assert not self.ended.is_set(), "something follows a finish"
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


def run(backend: Backend, *requests: EngineRequest) -> list[Listener]:
    """Submit all of `requests`, and wait for their ends."""
    listeners = [Listener() for _ in requests]
    for request, listener in zip(requests, listeners, strict=True):
        backend.submit(request, listener)
    for listener in listeners:
        listener.end()
    return listeners
