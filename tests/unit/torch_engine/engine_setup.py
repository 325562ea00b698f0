"""An engine thread with a real scheduler over a fake model, and a listener, for tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fake_model import VOCAB_SIZE, FakeModel, Work

from pocketllm.backends.base import EngineRequest, StepOutput, TokenConstraint, TokenLogprobs
from pocketllm.errors import PocketLLMError
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.engine import Engine
from pocketllm.torch_engine.masks import Masks, Words
from pocketllm.torch_engine.runner import Draw
from pocketllm.torch_engine.scheduler import Row, ScheduledRow, Scheduler
from pocketllm.torch_engine.state_pool import StateCopy

WAIT = 20.0


class GatedModel(FakeModel):
    """A fake model as a runner, which computes a step only once `gate` is set, so that a test can act between steps.

    One that `runs_ahead` computes when it is asked for the result, long after the launch of the step.
    """

    vocab_size = VOCAB_SIZE
    closed_after_failure: bool | None = None

    def __init__(self, num_blocks: int, block_size: int, *, runs_ahead: bool, **options: int | None) -> None:
        super().__init__(num_blocks, block_size, **options)
        self.runs_ahead = runs_ahead
        self.num_flying = self.most_flying = 0
        self.gate = threading.Event()
        self.entered = threading.Event()
        self.gate.set()
        self.held: dict[int, Row] = {}  # by slot, since its first step

    def launch(self, step: Sequence[ScheduledRow], masks: Masks, copies: Sequence[StateCopy]) -> GatedFlight:
        assert step
        for scheduled in step:
            assert self.held.setdefault(scheduled.row.slot, scheduled.row) is scheduled.row, "nobody said that a row has left"
        constrained = {place: one.row for place, one in enumerate(step) if one.row.request.constraint is not None}
        assert not (constrained and self.num_flying), "a mask depends on an id that is not known"
        self.num_flying += 1
        self.most_flying = max(self.most_flying, self.num_flying)
        assert self.num_flying <= 2
        flight = GatedFlight(self, self.prepare(step, copies))
        self.entered.set()
        if not self.runs_ahead:
            flight.compute()
        flight.words = {place: masks.take(row) for place, row in constrained.items() if step[place].samples}
        return flight

    def release(self, row: Row) -> None:
        assert row.slot >= 0
        held = self.held.pop(row.slot, row)  # a row that is preempted in the step in which it starts has had none
        assert held is row

    def close(self, *, has_failed: bool) -> None:
        self.closed_after_failure = has_failed


class GatedFlight:
    """One step of a GatedModel."""

    def __init__(self, model: GatedModel, work: Work) -> None:
        self._model = model
        self._work = work
        self._sampled: dict[int, int | None] | None = None
        self.words: dict[int, Words | BaseException] = {}

    def compute(self) -> None:
        assert self._model.gate.wait(WAIT)
        self._sampled = self._model.run(self._work)

    def result(self) -> dict[int, Draw | BaseException]:
        if self._sampled is None:
            self.compute()
        assert self._sampled is not None
        self._model.num_flying -= 1
        return {place: self._draw(place, token_id) for place, token_id in self._sampled.items()}

    def _draw(self, place: int, token_id: int | None) -> Draw | BaseException:
        """What the row gets that would draw `token_id`: under a constraint the next allowed id, counted from it in a circle."""
        request = self._work.rows[place].row.request
        if request.constraint is not None:
            words = self.words[place]
            if isinstance(words, BaseException):
                return words
            if token_id is not None:
                ids = [(token_id + step) % VOCAB_SIZE for step in range(VOCAB_SIZE)]
                token_id = next((other for other in ids if words[other // 32] >> (other % 32) & 1), None)
        if token_id is None:
            return PocketLLMError("not finite, or nothing allowed")
        logprobs = () if request.logprobs is None or token_id in request.eos_token_ids else (TokenLogprobs(-float(token_id)),)
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
    """An engine over a small pool, whose runner runs ahead where the fixture `either_runner` says so."""

    runs_ahead = False

    def __init__(self, *, slots: int = 4, num_blocks: int = 64, chunk: int = 0, **model_options: int | None) -> None:
        self.model = GatedModel(num_blocks, 4, runs_ahead=self.runs_ahead, **model_options)
        self.scheduler = Scheduler(BlockPool(num_blocks, 4), slots, chunk)
        self.deaths: list[str] = []
        self.engine = Engine(lambda _check_open: (self.scheduler, self.model), self.deaths.append)
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
