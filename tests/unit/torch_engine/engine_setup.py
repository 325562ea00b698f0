"""An engine thread with a real scheduler over a fake model, and a listener, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

from fake_model import VOCAB_SIZE, FakeModel

from pocketllm.backends.base import EngineRequest, StepOutput, TokenConstraint, TokenLogprobs
from pocketllm.errors import PocketLLMError
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.engine import Engine
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.model_runner import Draw, ModelRunner
from pocketllm.torch_engine.scheduler import Row, ScheduledRow, Scheduler
from pocketllm.torch_engine.state_pool import StateCopy

WAIT = 20.0


class GatedModel(FakeModel):
    """A fake model as a runner, which computes a step only once `gate` is set, so that a test can act between steps."""

    vocab_size = VOCAB_SIZE

    def __init__(self, num_blocks: int, block_size: int, **options: int | None) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.gate.set()

    def execute(self, step: Sequence[ScheduledRow], masks: Masks, copies: Sequence[StateCopy]) -> dict[int, Draw | BaseException]:
        assert not copies
        self.entered.set()
        assert self.gate.wait(WAIT)
        return {place: self._result(step[place].row, token_id, masks) for place, token_id in self.compute(step).items()}

    def _result(self, row: Row, token_id: int | None, masks: Masks) -> Draw | BaseException:
        """What `row` gets that would draw `token_id`: under a constraint the next allowed id, counted from it in a circle."""
        if row.request.constraint is not None:
            words = masks.take(row)
            if isinstance(words, BaseException):
                return words
            if token_id is not None:
                ids = [(token_id + step) % VOCAB_SIZE for step in range(VOCAB_SIZE)]
                token_id = next((other for other in ids if words[other // 32] >> (other % 32) & 1), None)
        if token_id is None:
            return PocketLLMError("not finite, or nothing allowed")
        logprobs = () if row.request.logprobs is None or token_id in row.request.eos_token_ids else (TokenLogprobs(-float(token_id)),)
        return Draw(token_id, logprobs)


class Answer:
    """Listens to one request."""

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
        assert self.ended.wait(WAIT), f"no end after {self.outputs}"
        return self.outputs[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]


class Setup:
    """An engine over a small pool."""

    def __init__(self, *, slots: int = 4, num_blocks: int = 64, chunk: int = 0, **model_options: int | None) -> None:
        self.model = GatedModel(num_blocks, 4, **model_options)
        self.scheduler = Scheduler(BlockPool(num_blocks, 4), slots, chunk)
        self.engine = Engine(lambda _check_open: (self.scheduler, cast(ModelRunner, self.model)))
        self.engine.wait_until_built()

    def submit(self, request: EngineRequest) -> Answer:
        answer = Answer()
        self.engine.submit(request, answer)
        return answer


@contextmanager
def running(**options: int | None) -> Iterator[Setup]:
    setup = Setup(**options)  # type: ignore[arg-type]
    try:
        yield setup
    finally:
        setup.model.gate.set()
        setup.engine.close()


def request(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 4,
    eos: frozenset[int] = frozenset(),
    *,
    logprobs: int | None = None,
    constraint: TokenConstraint | None = None,
) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), max_tokens, eos_token_ids=eos, logprobs=logprobs, constraint=constraint)


def eventually(holds: object) -> None:
    """Wait until `holds()` is true."""
    deadline = time.monotonic() + WAIT
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.001)
