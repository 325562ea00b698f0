"""FakeBackend: a test double for the server. It runs no model, is no default anywhere, and only tests import it.

Its answers are scripted, or a fixed function of the prompt ids and the seed; its speed is settable, and it fails on command.
"""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pocketllm.backends.base import (
    MAX_LOGPROBS,
    Backend,
    Capabilities,
    EngineFinishReason,
    EngineRequest,
    EngineStats,
    Health,
    LoadProgress,
    ProgressCallback,
    StepCallback,
    StepOutput,
    TokenConstraint,
    TokenLogprobs,
)
from pocketllm.errors import BackendUnavailableError, ConfigurationError, PocketLLMError

Answers = Sequence[Sequence[int]] | Callable[[EngineRequest], Sequence[int]]


@dataclass(slots=True, eq=False)
class _Row:
    request: EngineRequest
    on_step: StepCallback
    uniform: Callable[[], float]
    script: Sequence[int] | None
    generated: int = 0
    is_running: bool = False
    is_cancelled: bool = False


class FakeBackend(Backend):
    """A test double with a real engine thread, queue and slots, and no model.

    A row under a constraint draws what it would have drawn, where that is allowed; else an allowed id of `alphabet`, else an allowed EOS
    id, else the lowest allowed one. Where it would have ended, an allowed EOS id comes first. An EOS id ends every row.

    Args:
        vocab_size: ids are in [0, vocab_size).
        alphabet: ids that answers are made of [all].
        context_length: most tokens of prompt and answer together.
        max_slots: most rows that run at once; more wait.
        tokens_per_second: speed of each row, by a steady clock; None is as fast as the thread runs.
        tokens_per_step: most ids in one StepOutput.
        answers: ids of each request, after which it ends with "stop": in order of submission and from the start again after the last, or by a function.
        eos_after: every row ends with "stop" after so many tokens; the EOS step is counted and left out.
        fail_after: every row fails with "error" after so many tokens.
        die_after: the whole engine dies once a row has so many tokens.
        load_gate: `load` waits until it is set.
        load_error: `load` raises it.
        capabilities: what to declare in place of the defaults.
    """

    def __init__(
        self,
        vocab_size: int = 256,
        *,
        alphabet: Sequence[int] | None = None,
        context_length: int = 1024,
        max_slots: int = 4,
        tokens_per_second: float | None = None,
        tokens_per_step: int = 1,
        answers: Answers | None = None,
        eos_after: int | None = None,
        fail_after: int | None = None,
        die_after: int | None = None,
        load_gate: threading.Event | None = None,
        load_error: Exception | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self._capabilities = capabilities or Capabilities(
            "fake", "none", max_slots, context_length, vocab_size, logprobs=True, structured_outputs=True, prompt_logprobs=True
        )
        self._alphabet = tuple(alphabet) if alphabet is not None else tuple(range(vocab_size))
        self._ranked = tuple(dict.fromkeys((*self._alphabet, *range(min(vocab_size, MAX_LOGPROBS)))))[:MAX_LOGPROBS]
        self._tokens_per_step = tokens_per_step
        self._pause = tokens_per_step / tokens_per_second if tokens_per_second else 0.0
        self._answer = answers if answers is None or callable(answers) else _in_turn(answers)
        self._eos_after, self._fail_after, self._die_after = eos_after, fail_after, die_after
        self._faults = {count for count in (fail_after, die_after) if count is not None}
        self._load_gate, self._load_error = load_gate, load_error
        self._changed = threading.Condition()
        self._rows: dict[str, _Row] = {}  # active ones; guarded by _changed
        self._waiting: deque[_Row] = deque()
        self._running: list[_Row] = []  # the engine thread's own, as what follows
        self._health = Health("loading")
        self._prompt_tokens = self._generated_tokens = 0
        self._thread: threading.Thread | None = None

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, progress: ProgressCallback) -> None:
        progress(LoadProgress(0.5, "weights 1/2"))
        if self._load_gate is not None:
            self._load_gate.wait()
        if self._load_error is not None:
            raise self._load_error
        progress(LoadProgress(1.0, "weights 2/2"))
        self._health = Health("ready")
        self._thread = threading.Thread(target=self._run, name="fake-engine", daemon=True)
        self._thread.start()

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        with self._changed:
            if self._health.state != "ready":
                raise BackendUnavailableError(f"The engine is {self._health.state}. {self._health.detail}".strip())
            if request.request_id in self._rows:
                raise ConfigurationError(
                    f'"request_id" = "{request.request_id}" is active already: send another one, or wait until that request has ended.', param="request_id"
                )
            seed = request.seed if request.temperature > 0 else 0
            row = _Row(request, on_step, random.Random(repr((seed, request.prompt_token_ids))).random, self._answer and self._answer(request))
            self._rows[request.request_id] = row
            self._waiting.append(row)
            self._changed.notify()

    def cancel(self, request_id: str) -> bool:
        with self._changed:
            row = self._rows.get(request_id)
            if row is None or row.is_cancelled:
                return False
            row.is_cancelled = True
            if not row.is_running:  # to the front, where it ends without waiting for a slot
                self._waiting.remove(row)
                self._waiting.appendleft(row)
            return True

    def health(self) -> Health:
        return self._health

    def stats(self) -> EngineStats:
        running, slots = len(self._running), self._capabilities.max_slots
        return EngineStats(running, len(self._waiting), slots, running, self._prompt_tokens, self._generated_tokens)

    def close(self) -> None:
        with self._changed:
            if self._health.state != "dead":
                self._health = Health("closed")
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        due = time.monotonic()
        while self._health.state == "ready":
            if not self._running and not self._waiting:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._health.state != "ready")
                due = time.monotonic()
                continue
            if self._waiting:
                self._admit()
            self._step()
            due += self._pause
            if self._pause and (early := due - time.monotonic()) > 0:
                time.sleep(early)
        with self._changed:
            rows = list(self._rows.values())
            self._rows, self._running = {}, []
            self._waiting.clear()
        dead = self._health.state == "dead"
        error = BackendUnavailableError(self._health.detail) if dead else None
        for row in rows:
            row.on_step(StepOutput(row.request.request_id, (), row.generated, "error" if dead else "cancelled", error=error))

    def _admit(self) -> None:
        """Waiting rows take free slots; cancelled ones end."""
        cancelled: list[_Row] = []
        with self._changed:
            while self._waiting and (self._waiting[0].is_cancelled or len(self._running) < self._capabilities.max_slots):
                row = self._waiting.popleft()
                if row.is_cancelled:
                    cancelled.append(row)
                else:
                    row.is_running = True
                    self._running.append(row)
                    self._prompt_tokens += len(row.request.prompt_token_ids)
        for row in cancelled:
            self._finish(row, _cancelled(row))

    def _step(self) -> None:
        """Up to `tokens_per_step` ids for each running row. No lock is taken for a row that goes on."""
        finished: dict[_Row, StepOutput] = {}
        for row in self._running:
            if row.generated == self._die_after:
                self._health = Health("dead", "The engine failed: a fault was asked for. Restart the server.")
                break
            output = _cancelled(row) if row.is_cancelled else self._advance(row)
            if output.finish_reason is None:
                row.on_step(output)
            else:
                finished[row] = output
        if finished:  # they run no more once anybody hears of it
            self._running = [row for row in self._running if row not in finished]
            for row, output in finished.items():
                self._finish(row, output)

    def _finish(self, row: _Row, output: StepOutput) -> None:
        with self._changed:
            del self._rows[row.request.request_id]
        row.on_step(output)

    def _advance(self, row: _Row) -> StepOutput:
        request, before = row.request, row.generated
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        finish: EngineFinishReason | None = "length" if request.max_tokens == 0 else None
        error: Exception | None = None
        while finish is None and len(token_ids) < self._tokens_per_step and not (token_ids and row.generated in self._faults):
            try:
                if row.generated == self._fail_after:
                    raise RuntimeError("a fault was asked for")
                token_id = self._wanted(row) if request.constraint is None else self._allowed(row, request.constraint)
                is_eos = token_id is None or token_id in request.eos_token_ids
                if request.constraint is not None and token_id is not None and not is_eos:
                    request.constraint.accept(token_id)
                    finish = "stop" if request.constraint.is_complete else None
            except Exception as caught:  # of a constraint, or the fault
                finish, error = "error", caught
                break
            row.generated += 1
            if token_id is None or is_eos:
                finish = "stop"
                break
            token_ids.append(token_id)
            if request.logprobs is not None:
                logprobs.append(self._rank(token_id, request.logprobs))
            if finish is None and row.generated == request.max_tokens:
                finish = "length"
        self._generated_tokens += row.generated - before
        asked = request.prompt_logprobs
        prompt = tuple(self._rank(token_id, asked) for token_id in request.prompt_token_ids[1:]) if asked is not None and before == 0 else ()
        return StepOutput(request.request_id, tuple(token_ids), row.generated, finish, 0, error, tuple(logprobs), prompt)

    def _wanted(self, row: _Row) -> int | None:
        """What `row` draws next without a constraint; None is the step that ends it."""
        if row.script is not None:
            return row.script[row.generated] if row.generated < len(row.script) else None
        if self._eos_after is not None and row.generated >= self._eos_after:
            return None
        return self._alphabet[int(row.uniform() * len(self._alphabet))]

    def _allowed(self, row: _Row, constraint: TokenConstraint) -> int:
        """What `row` draws next under its constraint."""
        vocab_size = self._capabilities.vocab_size
        words = np.zeros(-(-vocab_size // 32), np.uint32)
        constraint.fill(words)
        allowed = set(np.flatnonzero(np.unpackbits(words.astype("<u4").view(np.uint8), count=vocab_size, bitorder="little")).tolist())
        if not allowed:
            raise PocketLLMError("The constraint on this answer allows no token here, so it can be neither continued nor ended.")
        wanted, ends = self._wanted(row), sorted(allowed & row.request.eos_token_ids)
        if wanted in allowed:
            return wanted
        if wanted is None and ends:
            return ends[0]
        letters = [token_id for token_id in self._alphabet if token_id in allowed]
        if letters:
            return letters[int(row.uniform() * len(letters))]
        return ends[0] if ends else min(allowed)

    def _rank(self, token_id: int, count: int) -> TokenLogprobs:
        """Made-up probabilities: 1/2 of the drawn id, then 1/4, 1/8, ... of the alphabet's others and the rest of the vocabulary, in their order."""
        ranked = [token_id, *(other for other in self._ranked if other != token_id)][:count]
        return TokenLogprobs(-math.log(2), tuple((other, -(place + 1) * math.log(2)) for place, other in enumerate(ranked)))


def _cancelled(row: _Row) -> StepOutput:
    return StepOutput(row.request.request_id, (), row.generated, "cancelled")


def _in_turn(answers: Sequence[Sequence[int]]) -> Callable[[EngineRequest], Sequence[int]]:
    turns = itertools.cycle(answers)
    return lambda _request: next(turns)
