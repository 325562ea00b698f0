"""FakeBackend: a test double for the server. It runs no model, is no default anywhere, and only tests import it.

Its answers are a fixed function of the prompt ids and the seed, its speed is settable, and it fails on command.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pocketllm.backends.base import Backend, Capabilities, EngineRequest, EngineStats, Health, LoadProgress, ProgressCallback, StepCallback, StepOutput
from pocketllm.errors import BackendUnavailableError, ConfigurationError


@dataclass(slots=True)
class _Row:
    request: EngineRequest
    on_step: StepCallback
    random: random.Random
    generated: int = 0
    cancelled: bool = False


class FakeBackend(Backend):
    """A test double with a real engine thread, queue and slots, and no model.

    Args:
        vocab_size: ids are in [0, vocab_size).
        alphabet: ids that answers are made of [all].
        context_length: most tokens of prompt and answer together.
        max_slots: most rows that run at once; more wait.
        tokens_per_second: speed of each row; None is as fast as the thread runs.
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
        eos_after: int | None = None,
        fail_after: int | None = None,
        die_after: int | None = None,
        load_gate: threading.Event | None = None,
        load_error: Exception | None = None,
        capabilities: Capabilities | None = None,
    ) -> None:
        self._capabilities = capabilities or Capabilities(
            backend="fake", device="none", max_slots=max_slots, context_length=context_length, vocab_size=vocab_size
        )
        self._alphabet = tuple(alphabet) if alphabet is not None else tuple(range(vocab_size))
        self._pause = 1 / tokens_per_second if tokens_per_second else 0.0
        self._eos_after, self._fail_after, self._die_after = eos_after, fail_after, die_after
        self._load_gate, self._load_error = load_gate, load_error
        self._changed = threading.Condition()
        self._waiting: list[_Row] = []
        self._running: list[_Row] = []
        self._health = Health("loading")
        self._totals = EngineStats()
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
            if any(row.request.request_id == request.request_id for row in self._waiting + self._running):
                raise ConfigurationError(
                    f'"request_id" = "{request.request_id}" is active already: send another one, or wait until that request has ended.', param="request_id"
                )
            seed = request.seed if request.temperature > 0 else 0
            self._waiting.append(_Row(request, on_step, random.Random(repr((seed, request.prompt_token_ids)))))
            self._changed.notify()

    def cancel(self, request_id: str) -> bool:
        with self._changed:
            for row in self._waiting + self._running:
                if row.request.request_id == request_id and not row.cancelled:
                    row.cancelled = True
                    self._changed.notify()
                    return True
        return False

    def health(self) -> Health:
        return self._health

    def stats(self) -> EngineStats:
        with self._changed:
            return replace(
                self._totals,
                running=len(self._running),
                waiting=len(self._waiting),
                kv_blocks_total=self._capabilities.max_slots,
                kv_blocks_used=len(self._running),
            )

    def close(self) -> None:
        with self._changed:
            if self._health.state != "dead":
                self._health = Health("closed")
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._running or self._health.state != "ready")
                if self._health.state != "ready":
                    break
                outputs = self._step()
            for on_step, output in outputs:
                on_step(output)
            if self._pause:
                time.sleep(self._pause)
        with self._changed:
            rows, self._waiting, self._running = self._running + self._waiting, [], []
        dead = self._health.state == "dead"
        for row in rows:
            row.on_step(
                StepOutput(
                    row.request.request_id,
                    (),
                    row.generated,
                    "error" if dead else "cancelled",
                    error=BackendUnavailableError(self._health.detail) if dead else None,
                )
            )

    def _step(self) -> list[tuple[StepCallback, StepOutput]]:
        """One token for each running row. The lock is held."""
        outputs: list[tuple[StepCallback, StepOutput]] = []
        for row in [row for row in self._waiting + self._running if row.cancelled]:
            (self._running if row in self._running else self._waiting).remove(row)
            outputs.append((row.on_step, StepOutput(row.request.request_id, (), row.generated, "cancelled")))
        while self._waiting and len(self._running) < self._capabilities.max_slots:
            row = self._waiting.pop(0)
            self._running.append(row)
            self._totals = replace(self._totals, prompt_tokens=self._totals.prompt_tokens + len(row.request.prompt_token_ids))
        for row in list(self._running):
            if row.generated == self._die_after:
                self._health = Health("dead", "The engine failed: a fault was asked for. Restart the server.")
                return outputs
            output = self._advance(row)
            if output.finish_reason is not None:
                self._running.remove(row)
            outputs.append((row.on_step, output))
        return outputs

    def _advance(self, row: _Row) -> StepOutput:
        request_id = row.request.request_id
        if row.generated == self._fail_after:
            return StepOutput(request_id, (), row.generated, "error", error=RuntimeError("a fault was asked for"))
        is_eos = row.generated == self._eos_after
        row.generated += 1
        self._totals = replace(self._totals, generated_tokens=self._totals.generated_tokens + 1)
        if is_eos:
            return StepOutput(request_id, (), row.generated, "stop")
        token = row.random.choice(self._alphabet)
        return StepOutput(request_id, (token,), row.generated, "length" if row.generated == row.request.max_tokens else None)
