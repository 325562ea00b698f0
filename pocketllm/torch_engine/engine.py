"""The engine thread: schedule, launch, resolve, publish, until it is closed."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from pocketllm.backends.base import MAX_LOGPROBS, EngineRequest, EngineStats, Health, StepCallback, StepOutput
from pocketllm.errors import BackendUnavailableError, ConfigurationError, PocketLLMError
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.runner import Draw, Flight, Ranked, Runner
from pocketllm.torch_engine.scheduler import Row, RowUpdate, ScheduledRow, Scheduler

logger = logging.getLogger(__name__)

Build = Callable[[Callable[[], None]], tuple[Scheduler, Runner]]


class Engine:
    """One scheduler and one model runner on one thread, which begins at once; `wait_until_built` says when it takes requests.

    `submit`, `cancel`, `health`, `stats` and `close` may be called from any thread: they hand over to the loop or read what it left.
    A row whose logits, constraint or listener fail ends alone; an exception in a step ends every row, and the engine is dead.
    The thread is a daemon, and Python ends such a thread in the middle of an operator, which aborts the process: whoever owns an
    engine closes it before the interpreter exits.

    With a runner that runs ahead, a step is launched before the result of the one before is taken, so that choosing rows and telling
    listeners go on while the device computes. Ids are then missing for the choice, and where it needs them (`Scheduler.can_run_ahead`) the loop
    waits first, as it always does with other runners.

    Args:
        build: makes the scheduler and the runner. It runs on the engine's thread, so that this is the only thread on which
            torch computes: each computing thread has its own OpenMP team, and teams that together outnumber the cores stop spinning
            and sleep at every operator, which halves the speed of decoding. It is given a function that it calls now and then, and
            that raises once the engine is closed.
        on_death: told why, on the engine's thread, when a step has failed and every row has heard of it.
    """

    def __init__(self, build: Build, on_death: Callable[[str], None] | None = None) -> None:
        self._on_death = on_death
        self._loss: str | None = None  # of another rank, once it is known
        self._wake = threading.Condition()
        self._inbox: deque[Callable[[], None]] = deque()  # guarded by _wake
        self._active: dict[str, Row | None] = {}  # guarded by _wake; None until the loop has queued the request
        self._listeners: dict[str, StepCallback] = {}  # guarded by _wake
        self._telling = threading.RLock()  # held while a listener is called, so that nothing follows what another thread says at the end
        self._health = Health("loading")
        self._closing = False
        self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
        self._scheduler: Scheduler  # set by the thread, before it is ready
        self._masks: Masks  # likewise
        self._build: Build | None = build
        self._built: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name="pocketllm-engine", daemon=True)
        self._thread.start()

    def wait_until_built(self) -> None:
        """Return once requests are taken. An interrupt, such as Ctrl-C, closes the engine.

        Raises:
            What `build` raises.
        """
        try:
            self._built.result()
        except BaseException:
            self.close()
            raise

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        """Queue a request. Raises as Backend.submit does."""
        if self._is_lost():
            raise BackendUnavailableError("The engine did not come along into this process, a fork of the one that loaded the model: load it here.")
        with self._wake:
            if self._health.state != "ready" or self._closing:
                state = "closing" if self._health.state == "ready" else self._health.state
                raise BackendUnavailableError(f"The engine is {state}: {self._health.detail or 'it takes no more requests'}.")
            self._check_terms(request)
            if request.request_id in self._active:
                raise ConfigurationError(
                    f'"request_id" = {request.request_id!r} belongs to a request that is still active: send another id, or leave it out.', param="request_id"
                )
            self._active[request.request_id] = None
            self._listeners[request.request_id] = on_step
            self._inbox.append(lambda: self._add(request))
            self._wake.notify()

    def cancel(self, request_id: str) -> bool:
        """End a request at the next step boundary. False if it is not active."""
        if self._is_lost():
            return False
        with self._wake:
            if request_id not in self._active:
                return False
            self._inbox.append(lambda: self._cancel(request_id))
            self._wake.notify()
            return True

    def health(self) -> Health:
        return self._health

    def stats(self) -> EngineStats:
        if not self._built.done() or self._built.exception() is not None:
            return EngineStats()
        scheduler, pool = self._scheduler, self._scheduler.pool
        with self._wake:
            active = len(self._active)
        running = len(scheduler.running)
        return EngineStats(
            running=running,
            waiting=max(0, active - running),
            kv_blocks_total=pool.num_blocks,
            kv_blocks_used=pool.num_used,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
            cached_tokens=self._cached_tokens,
            preemptions=scheduler.num_preemptions,
        )

    def close(self) -> None:
        """Stop the loop after the step under way, or the build at its next check, and free the model; requests still active end with "cancelled"."""
        if self._is_lost():
            return
        with self._wake:
            self._closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread and self._loss is None:
            self._thread.join()

    def abandon(self, reason: str) -> None:
        """End every request with an error, from any thread and without waiting for the one that computes, which may never come back."""
        with self._wake:
            self._closing, self._loss = True, reason
            self._wake.notify()
        self._end_all(Health("dead", reason), None)

    def _check_terms(self, request: EngineRequest) -> None:
        """Refuse what would fail in a step, and take every row with it, or wait for blocks for ever."""
        pool, prompt_tokens = self._scheduler.pool, len(request.prompt_token_ids)
        if not prompt_tokens:
            raise ConfigurationError('"prompt" is empty: send at least one token id.', param="prompt")
        if request.max_tokens < (0 if request.prompt_logprobs is not None else 1):
            raise ConfigurationError(f'"max_tokens" = {request.max_tokens} is not valid: send a whole number of at least 1.', param="max_tokens")
        if prompt_tokens + request.max_tokens > pool.num_blocks * pool.block_size:
            raise ConfigurationError(
                f'"max_tokens" = {request.max_tokens} after a prompt of {prompt_tokens} tokens is more than the {pool.num_blocks * pool.block_size} tokens '
                "of the KV cache: send less, or start the engine with a larger kv_cache_memory.",
                param="max_tokens",
            )
        for name, count in (("logprobs", request.logprobs), ("prompt_logprobs", request.prompt_logprobs)):
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise ConfigurationError(f'"{name}" = {count} is not valid: send a whole number from 0 to {MAX_LOGPROBS}.', param=name)

    def _is_lost(self) -> bool:
        """Whether this process is a fork, which has the engine's memory and locks but not its thread."""
        return self._health.state in ("loading", "ready") and not self._thread.is_alive()

    def _check_open(self) -> None:
        if self._closing:
            raise BackendUnavailableError("The engine was closed while the model loaded.")

    def _main(self) -> None:
        # The runner is a variable of this thread alone, so that the model is freed when the thread ends.
        try:
            assert self._build is not None
            self._scheduler, runner = self._build(self._check_open)
        except BaseException as error:  # wait_until_built raises it
            self._health = Health("closed") if self._closing else Health("dead", f"the model could not be loaded: {error}")
            self._built.set_exception(error)
            return
        finally:
            self._build = None  # it may hold the engine's owner
        self._masks = Masks(runner.vocab_size)
        self._health = Health("ready")
        self._built.set_result(None)
        self._run(runner)

    def _run(self, runner: Runner) -> None:
        scheduler = self._scheduler
        scheduler.on_release = runner.release
        flying: tuple[list[ScheduledRow], Flight] | None = None  # the step that was advanced and not resolved
        try:
            while self._await_work(flying is not None):
                if flying is not None and not scheduler.can_run_ahead():
                    self._land(*flying)
                    flying = None
                    continue  # for what came meanwhile
                step = scheduler.schedule()
                flight = runner.launch(step, self._masks, scheduler.take_copies()) if step else None
                if flying is not None:
                    self._land(*flying)
                    flying = None
                if flight is not None:
                    scheduler.advance(step)
                    flying = step, flight
                if flying is not None and not runner.runs_ahead:
                    self._land(*flying)
                    flying = None
            if flying is not None:
                self._land(*flying)
        except BaseException as error:  # whatever ended the loop, no row may be left waiting for it
            if self._loss is None:  # else it is known why
                logger.exception("The engine failed")
            self._stop(Health("dead", f"a step failed with {type(error).__name__}: {error}"), error)
            self._let_go(runner, error)
        else:
            self._stop(Health("closed"), None)
            self._let_go(runner, None)
        finally:
            scheduler.on_release = None  # the scheduler outlives the model

    def _let_go(self, runner: Runner, error: BaseException | None) -> None:
        """End the runner; a death is told to whoever wants to know."""
        if self._loss is not None:  # the other ranks are ended by who told of the loss
            return
        if error is not None and self._on_death is not None:
            self._on_death(self._health.detail)  # before a close that may wait for ranks that don't come
        try:
            runner.close(has_failed=error is not None)
        except Exception:
            logger.exception("The runner could not be closed")

    def _land(self, step: Sequence[ScheduledRow], flight: Flight) -> None:
        """Wait for a step and hand what it gave to constraints, scheduler and listeners. A row with an error ends before the others are resolved."""
        results = flight.result()
        draws: dict[int, Draw] = {}
        for place, scheduled in enumerate(step):
            if scheduled.row.slot < 0:  # it ended while this was computed
                continue
            result = results.get(place)
            if isinstance(result, Draw | Ranked):
                scheduled.row.prompt_logprobs += result.prompt_logprobs
            error = self._masks.accept(scheduled.row, result.token_id) if isinstance(result, Draw) else result
            if isinstance(error, BaseException):
                self._end(scheduled.row, error)
            elif isinstance(result, Draw):
                draws[place] = result
        updates = self._scheduler.resolve(step, {place: draw.token_id for place, draw in draws.items()})
        for update, draw in zip(updates, draws.values(), strict=True):
            self._publish(update, draw)

    def _await_work(self, is_flying: bool) -> bool:
        """Take what other threads handed over; sleep while there is nothing to do, not even a step to land. False when the engine is to close."""
        while True:
            with self._wake:
                while not (self._inbox or self._closing or is_flying or self._scheduler.running or self._scheduler.waiting):
                    self._wake.wait()
                if self._closing:
                    return False
                # A swap, since a stream that the garbage collector finds between two steps of a copy would lose its cancel.
                messages, self._inbox = self._inbox, deque()
            for message in messages:
                message()
            if is_flying or self._scheduler.running or self._scheduler.waiting:
                return True

    def _add(self, request: EngineRequest) -> None:
        row = self._scheduler.add(request)
        with self._wake:
            self._active[request.request_id] = row
        self._masks.ask(row)
        self._prompt_tokens += len(request.prompt_token_ids)

    def _cancel(self, request_id: str) -> None:
        row = self._active.get(request_id)
        if row is not None:  # else it finished in the step before
            self._end(row, None)

    def _end(self, row: Row, error: BaseException | None) -> None:
        """Take a row out between two steps: it failed with `error`, or was cancelled."""
        self._scheduler.remove(row)
        self._masks.drop(row)
        self._emit(StepOutput(row.request.request_id, (), row.num_generated, "cancelled" if error is None else "error", error=error))

    def _publish(self, update: RowUpdate, draw: Draw) -> None:
        row = update.row
        self._generated_tokens += min(1, update.num_generated)
        cached = row.cached_tokens or 0
        if update.num_generated <= 1:
            self._cached_tokens += cached
        output = StepOutput(row.request.request_id, update.token_ids, update.num_generated, update.finish_reason, cached)
        output.logprobs = draw.logprobs if update.token_ids else ()
        if row.prompt_logprobs:
            output.prompt_logprobs, row.prompt_logprobs = tuple(row.prompt_logprobs), []
        self._emit(output)

    def _emit(self, output: StepOutput) -> None:
        with self._telling:
            with self._wake:
                listener = self._listeners.get(output.request_id)
                if listener is None:  # it was abandoned while this was computed
                    return
                if output.finish_reason is not None:
                    del self._active[output.request_id], self._listeners[output.request_id]
            try:
                listener(output)
            except Exception:
                logger.exception("The listener of request %s failed; the request is cancelled", output.request_id)
                self.cancel(output.request_id)

    def _stop(self, health: Health, error: BaseException | None) -> None:
        """End every request and refuse new ones."""
        self._masks.close()
        try:
            for row in list(self._scheduler.rows()):
                self._scheduler.remove(row)
        except Exception:  # what failed may have been the scheduler itself; its rows still hear of their end
            logger.exception("The rows of the engine could not be released")
        self._end_all(health, error)

    def _end_all(self, health: Health, error: BaseException | None) -> None:
        with self._wake:
            if self._loss is not None:  # whichever thread comes first
                health, error = Health("dead", self._loss), PocketLLMError(self._loss)
            if self._health.state in ("loading", "ready"):  # else it stays as it is
                self._health = health
            request_ids = list(self._active)
        for request_id in request_ids:
            active = self._active.get(request_id)
            generated = 0 if active is None else active.num_generated
            if error is None:
                self._emit(StepOutput(request_id, (), generated, "cancelled"))
            else:
                unavailable = BackendUnavailableError(f"The engine failed: {error}. Restart the server.")
                self._emit(StepOutput(request_id, (), generated, "error", error=unavailable))
