"""The cpp plane behind the backend door: one QwenBatchScheduler of the native engine. The native module is imported when the model loads."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from pocketllm.backends.base import (
    MAX_LOGPROBS,
    SAMPLER_FLAGS,
    Backend,
    Capabilities,
    EngineRequest,
    EngineStats,
    Health,
    LoadProgress,
    ProgressCallback,
    StepCallback,
    StepOutput,
    TokenLogprobs,
)
from pocketllm.backends.terms import check_request, check_threads, context_length, read_backend_options
from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import BackendUnavailableError, ConfigurationError, PocketLLMError, UnsupportedFeatureError

if TYPE_CHECKING:
    import pocketllm_cpp

logger = logging.getLogger(__name__)

_MAX_INT = 2**31 - 1  # of the native module's whole numbers
_DEFAULT_CHUNK = 512  # prompt tokens a step
_GPU_CHUNK = 2048  # larger steps are hardly faster, and answers wait for them
# The native engine's words for what EngineArgs and requests call otherwise.
_FIELDS = {"max_new_tokens": "max_tokens", "prompt_token_ids": "prompt", "prompt_tokens": "prompt", "checkpoint": "model"}


class CppBackend(Backend):
    """One Qwen3.5 checkpoint on the native engine.

    Args:
        args: options; `backend_options` may hold num_threads, the threads that a step on the CPU uses [all cores], and eos_token_id, an id or a
            list of them that ends answers in place of the checkpoint's own.
        checkpoint: an open checkpoint that this plane runs.

    Raises:
        ConfigurationError: an option that this plane can't honour, before anything is loaded.
    """

    DECLARES = frozenset({"logprobs", "structured_outputs", "prompt_logprobs", *SAMPLER_FLAGS})

    def __init__(self, args: EngineArgs, checkpoint: Checkpoint) -> None:
        self._args = args
        self._checkpoint = checkpoint
        self._options = _Options.read(args, int(checkpoint.config["vocab_size"]))
        self._context_length = context_length(args, checkpoint)
        self._engine: _Engine | None = None
        self._closed = False
        self._replaced_eos: frozenset[int] = frozenset()  # by backend_options
        self._fallback_eos: frozenset[int] = frozenset()  # of the tokenizer, where the checkpoint names none
        declared = dict.fromkeys(self.DECLARES, True)
        vocab_size = int(checkpoint.config["vocab_size"])
        self._capabilities = Capabilities("cpp", "cpu", args.max_batch_size or 0, self._context_length, vocab_size, **declared)  # type: ignore[arg-type]

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, progress: ProgressCallback) -> None:
        progress(LoadProgress(0.0, "importing the native engine"))
        native = import_native()

        def report(fraction: float, message: str) -> None:
            self._check_open()
            progress(LoadProgress(fraction, message))

        args = self._args
        device = native.linked_devices()[0] if args.device == "auto" else args.device
        usual = _GPU_CHUNK if device.startswith("cuda") else _DEFAULT_CHUNK
        chunk = usual if args.prefill_chunk_tokens is None else args.prefill_chunk_tokens
        options = native.QwenEngineOptions(
            device=args.device,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=args.max_model_len or 0,
            max_batch_size=min(args.max_batch_size or 0, _MAX_INT),
            kv_cache_memory=args.kv_cache_bytes or 0,
            num_threads=self._options.num_threads,
            prefill_chunk_tokens=min(chunk, _MAX_INT),
            enable_prefix_caching=args.enable_prefix_caching,
        )
        try:
            loaded = native.QwenEngine.load(str(self._checkpoint.path), options, report)
            self._check_open()
            loaded.warmup()
            caps = loaded.capabilities()
            scheduler = native.QwenBatchScheduler(loaded, caps.max_slots)
        except native.Error as error:
            raise translate(error) from None
        self._engine = engine = _Engine(scheduler)
        # Whoever drops this backend without closing it still stops the thread.
        weakref.finalize(self, engine.close)
        config = loaded.config
        eos, source = resolve_eos(self._options.eos_token_ids, config, self._checkpoint)
        self._replaced_eos = eos if source == "backend_options" else frozenset()
        self._fallback_eos = frozenset() if self._checkpoint.generation_defaults.eos_token_ids else eos
        self._capabilities = Capabilities(
            "cpp",
            config.device,
            caps.max_slots,
            config.max_model_len,
            config.vocab_size,
            per_request_sampling=caps.per_request_sampling,
            per_request_top_k=caps.per_request_top_k,
            continuous_batching=caps.continuous_batching,
            chunked_prefill=caps.chunked_prefill and chunk > 0,
            paged_kv=caps.paged_kv,
            prefix_caching=caps.prefix_caching,
            logprobs=caps.max_logprobs >= MAX_LOGPROBS,
            structured_outputs=caps.structured_outputs,
            **dict.fromkeys(SAMPLER_FLAGS, caps.logit_terms),
            prompt_logprobs=caps.prompt_logprobs,
            speculative_methods=tuple(caps.speculative_methods),
            details={
                "compute_dtype": config.dtype,
                "kv_cache_dtype": config.kv_cache_dtype,
                "device": config.device_description,
                "linked_backend": native.backend,
                "num_threads": config.num_threads,
                "weight_bytes": config.weight_bytes,
                "kv_cache_bytes": config.kv_cache_bytes,
                "kv_blocks": config.kv_blocks,
                "block_size": config.block_size,
                "state_bytes": config.state_bytes,
                "state_snapshots": config.state_snapshots,
                "snapshot_interval": config.snapshot_interval,
                "eos_source": source,
                "eos_token_ids": sorted(eos),
            },
        )
        if self._closed:  # while the last of it was made
            engine.close()
            self._check_open()
        for limit in config.limits:
            logger.warning("%s", limit)
        progress(LoadProgress(1.0, "ready"))

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        if self._engine is None:
            state = "The engine is closed: it takes no more requests." if self._closed else "The model is still loading: try again when /ready answers 200."
            raise BackendUnavailableError(state)
        eos = request.eos_token_ids - request.stop_token_ids
        if not request.ignores_eos:
            eos = eos or self._fallback_eos
            if self._replaced_eos and eos:
                # A grammar ends on the ids that it was made with, so those still end its row.
                eos = self._replaced_eos if request.constraint is None else self._replaced_eos | eos
        eos |= request.stop_token_ids
        check_request(request, self._capabilities)
        self._engine.submit(request, eos, on_step)

    def cancel(self, request_id: str) -> bool:
        return self._engine is not None and self._engine.cancel(request_id)

    def health(self) -> Health:
        if self._engine is None:
            return Health("closed" if self._closed else "loading")
        return self._engine.health()

    def stats(self) -> EngineStats:
        return EngineStats() if self._engine is None else self._engine.stats()

    def close(self) -> None:
        self._closed = True
        if self._engine is not None:
            self._engine.close()

    def _check_open(self) -> None:
        if self._closed:
            raise BackendUnavailableError("The engine was closed while the model loaded.")


@dataclass(slots=True)
class _ActiveRequest:
    native_id: int | None = None  # None until submit_request returned it
    is_cancelled: bool = False  # before that


class _Engine:
    """A running scheduler, whose requests have the door's ids. It knows no backend, so that a backend which is dropped can stop it."""

    def __init__(self, scheduler: pocketllm_cpp.QwenBatchScheduler) -> None:
        self._scheduler = scheduler
        self._lock = threading.Lock()
        self._active: dict[str, _ActiveRequest] = {}  # it and what it holds are guarded by _lock

    def submit(self, request: EngineRequest, eos: frozenset[int], on_step: StepCallback) -> None:
        import pocketllm_cpp as native

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
        if (failure := self._scheduler.failure) is not None:
            return Health("dead", f"a step failed: {failure}")
        return Health("closed" if self._scheduler.is_stopped else "ready")

    def stats(self) -> EngineStats:
        found = self._scheduler.stats()
        return EngineStats(
            **{field.name: getattr(found, field.name) for field in fields(EngineStats) if not field.name.startswith("expert_")}
        )  # it has no experts

    def close(self) -> None:
        self._scheduler.stop()

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

        return listen

    def _row_error(self, error: BaseException) -> BaseException:
        import pocketllm_cpp as native

        if self._scheduler.failure is not None:
            return BackendUnavailableError(f"The engine failed: {error}. Restart the server.")
        return translate(error) if isinstance(error, native.Error) else error


def _ranks(found: Sequence[pocketllm_cpp.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(one.logprob, tuple(one.top)) for one in found)


@dataclass(frozen=True, slots=True)
class _Options:
    """What `backend_options` may hold.

    Args:
        num_threads: threads that a step on the CPU uses; 0 is all cores.
        eos_token_ids: ids that end answers in place of the checkpoint's own; empty without the option eos_token_id.
    """

    num_threads: int
    eos_token_ids: frozenset[int]

    @classmethod
    def read(cls, args: EngineArgs, vocab_size: int) -> _Options:
        """Raises:
        ConfigurationError: a name is unknown, or a value makes no sense for a model of `vocab_size` tokens.
        """
        options = read_backend_options(args, "cpp", ("num_threads", "eos_token_id"))
        threads = options.get("num_threads")
        num_threads = 0 if threads is None else check_threads(threads)
        eos = options.get("eos_token_id")
        ids: Sequence[Any] = () if eos is None else list(eos) if isinstance(eos, (list, tuple)) else [eos]
        if eos is not None and not (ids and all(_is_int(id_) and id_ >= 0 for id_ in ids)):
            raise ConfigurationError(
                f'"eos_token_id" = {eos!r} in "backend_options" is not valid: send a token id, or a list of token ids.', param="backend_options"
            )
        if beyond := [id_ for id_ in ids if id_ >= vocab_size]:
            raise ConfigurationError(
                f'"eos_token_id" = {beyond[0]} in "backend_options" is no token of this model: ids are whole numbers from 0 to {vocab_size - 1}.',
                param="backend_options",
            )
        return cls(num_threads, frozenset(ids))


def import_native() -> Any:
    """The native module.

    Raises:
        BackendUnavailableError: it is not installed, or does not fit this Python; with the remedy.
    """
    try:
        import pocketllm_cpp
    except ImportError as error:
        raise BackendUnavailableError(
            f"The native module pocketllm_cpp can't be imported ({error}): build it with POCKETLLM_BUILD_CPP=1 pip install, or send backend = torch."
        ) from error
    return pocketllm_cpp


def resolve_eos(replaced: frozenset[int], config: pocketllm_cpp.QwenConfig, checkpoint: Checkpoint) -> tuple[frozenset[int], str]:
    """The ids that end an answer, and who named them: backend_options, the native engine, the checkpoint's files, or its tokenizer.

    Where nobody does, the source is "none", and only the token budget ends an answer.
    """
    if replaced:
        return replaced, "backend_options"
    if config.eos_token_ids:
        return frozenset(config.eos_token_ids), "engine"
    if checkpoint.generation_defaults.eos_token_ids:
        return frozenset(checkpoint.generation_defaults.eos_token_ids), "checkpoint"
    if (id_ := _tokenizer_eos(checkpoint)) is not None:
        return frozenset({id_}), "tokenizer"
    return frozenset(), "none"


def translate(error: Any) -> PocketLLMError:
    """The project's error for one of the native engine's."""
    message, param = str(error), None if error.field is None else _FIELDS.get(error.field, error.field)
    if error.kind == "unsupported":
        return UnsupportedFeatureError(message, param=param)
    if error.kind == "configuration":
        return ConfigurationError(message, param=param)
    return BackendUnavailableError(message, param=param)


def _tokenizer_eos(checkpoint: Checkpoint) -> int | None:
    from pocketllm.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(checkpoint)
    except ConfigurationError:  # a checkpoint without a tokenizer takes token ids all the same
        return None
    return None if tokenizer.eos_token is None else tokenizer.backend.token_to_id(tokenizer.eos_token)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _ignore(_result: pocketllm_cpp.QwenBatchResult) -> None:
    """on_step has told it all."""
