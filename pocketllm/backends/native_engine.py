"""A running scheduler of the native engine, whose requests have the ids of the backend door, and its errors as the project's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pocketllm.backends.base import EngineRequest, EngineStats, Health, StepCallback, StepOutput, TokenLogprobs
from pocketllm.errors import BackendUnavailableError, ConfigurationError, PocketLLMError, UnsupportedFeatureError

if TYPE_CHECKING:
    import pocketllm_cpp

# The native engine's words for what EngineArgs and requests call otherwise.
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "prompt_token_ids": "prompt",
    "prompt_tokens": "prompt",
    "checkpoint": "model",
    "rendezvous_dir": "tensor_parallel_rendezvous_dir",
}


@dataclass(slots=True)
class _ActiveRequest:
    native_id: int | None = None  # None until submit_request returned it
    is_cancelled: bool = False  # before that


class NativeEngine:
    """It knows no backend, so that a backend which is dropped can stop it.

    Args:
        engine: with the model, on rank 0 where there are several.
        scheduler: runs on `engine`.
        on_death: told why, on the scheduler's thread, when a step has failed of itself.
    """

    def __init__(self, engine: pocketllm_cpp.QwenEngine, scheduler: pocketllm_cpp.QwenBatchScheduler, on_death: Callable[[str], None]) -> None:
        self._engine, self._scheduler, self._on_death = engine, scheduler, on_death
        self._lost: str | None = None  # why another rank is
        self._has_died = False
        self._lock = threading.Lock()
        self._active: dict[str, _ActiveRequest] = {}  # it and what it holds are guarded by _lock

    def submit(self, request: EngineRequest, eos: frozenset[int], on_step: StepCallback) -> None:
        import pocketllm_cpp as native

        if self._lost is not None:
            raise BackendUnavailableError(f"The engine is dead: {self._lost}.")
        request_id = request.request_id
        sampling = native.QwenBatchSamplingParams(
            max_new_tokens=request.max_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k,
            seed=request.seed,
            stop_token_ids=sorted(eos),
            logprobs=request.logprobs,
            constraint=request.constraint,
            terms=None if request.terms is None else native.LogitTerms(**{field.name: getattr(request.terms, field.name) for field in fields(request.terms)}),
            priority=request.priority,
            prompt_logprobs=request.prompt_logprobs,
        )
        with self._lock:
            if request_id in self._active:
                raise ConfigurationError(
                    f'"request_id" = {request_id!r} belongs to a request that is still active: send another id, or leave it out.', param="request_id"
                )
            self._active[request_id] = active = _ActiveRequest()
        try:
            native_id = self._scheduler.submit_request(request.prompt_token_ids, sampling, callback=_ignore, on_step=self._listener(request_id, on_step))
        except BaseException as error:
            with self._lock:
                del self._active[request_id]
            if isinstance(error, native.Error):
                raise translate(error) from None
            raise
        with self._lock:
            active.native_id = native_id
        if active.is_cancelled:
            self._scheduler.cancel(native_id)

    def cancel(self, request_id: str) -> bool:
        with self._lock:
            active = self._active.get(request_id)
            if active is None:
                return False
            if active.native_id is None:
                active.is_cancelled = True
                return True
        return self._scheduler.cancel(active.native_id)

    def health(self) -> Health:
        if self._lost is not None:
            return Health("dead", self._lost)
        if (failure := self._scheduler.failure) is not None:
            return Health("dead", f"a step failed: {failure}")
        return Health("closed" if self._scheduler.is_stopped else "ready")

    def stats(self) -> EngineStats:
        found = self._scheduler.stats()
        return EngineStats(
            **{field.name: getattr(found, field.name) for field in fields(EngineStats) if not field.name.startswith("expert_")}
        )  # it has no experts

    def abandon(self, reason: str) -> None:
        """Another rank is lost. A step that waits for it fails, and its rows hear of that."""
        self._lost = reason
        self._engine.abandon(reason)

    def close(self) -> None:
        self._scheduler.stop()
        self._engine.dismiss()

    def _listener(self, request_id: str, on_step: StepCallback) -> Callable[[pocketllm_cpp.QwenBatchStep], None]:
        def listen(step: pocketllm_cpp.QwenBatchStep) -> None:
            finish, error = step.finish_reason, step.error
            if finish is not None:
                with self._lock:
                    del self._active[request_id]
                if error is not None and not isinstance(error, PocketLLMError):
                    error = self._row_error(error)
            try:
                on_step(
                    StepOutput(
                        request_id,
                        tuple(step.token_ids),
                        step.num_generated,
                        finish,
                        step.cached_tokens,
                        error,
                        _ranks(step.logprobs),
                        _ranks(step.prompt_logprobs),
                    )
                )
            except Exception:
                self.cancel(request_id)  # nobody listens to the rest of it
                raise
            finally:
                self._look_for_death(finish)

        return listen

    def _look_for_death(self, finish: str | None) -> None:
        """Tell of a step that failed, once. Only the engine's thread calls this."""
        if finish != "error" or self._has_died or (failure := self._scheduler.failure) is None:
            return
        self._has_died = True
        if self._lost is None:  # else it is known
            self._on_death(failure)

    def _row_error(self, error: BaseException) -> BaseException:
        import pocketllm_cpp as native

        if (failure := self._scheduler.failure) is not None:
            return BackendUnavailableError(f"The engine failed: {self._lost or failure}. Restart the server.")
        return translate(error) if isinstance(error, native.Error) else error


def _ranks(found: Sequence[pocketllm_cpp.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(one.logprob, tuple(one.top)) for one in found)


def translate(error: Any) -> PocketLLMError:
    """The project's error for one of the native engine's."""
    message, param = str(error), None if error.field is None else _FIELDS.get(error.field, error.field)
    if error.kind == "unsupported":
        return UnsupportedFeatureError(message, param=param)
    if error.kind == "configuration":
        return ConfigurationError(message, param=param)
    return BackendUnavailableError(message, param=param)


def _ignore(_result: pocketllm_cpp.QwenBatchResult) -> None:
    """on_step has told it all."""
