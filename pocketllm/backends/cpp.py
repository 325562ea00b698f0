"""The cpp plane behind the backend door: one QwenBatchScheduler of the native engine. The native module is imported when the model loads."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
)
from pocketllm.backends.native_engine import NativeEngine, translate
from pocketllm.backends.terms import check_request, check_threads, context_length, read_backend_options
from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import BackendUnavailableError, ConfigurationError, UnsupportedFeatureError
from pocketllm.parallel.rank import DIRECTORY, Rank

if TYPE_CHECKING:
    import pocketllm_cpp

logger = logging.getLogger(__name__)

_MAX_INT = 2**31 - 1  # of the native module's whole numbers
_DEFAULT_CHUNK = 512  # prompt tokens a step
_GPU_CHUNK = 2048  # larger steps are hardly faster, and answers wait for them


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
        self._chunk = _DEFAULT_CHUNK if args.prefill_chunk_tokens is None else args.prefill_chunk_tokens  # on the CPU
        self._engine: NativeEngine | None = None
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
        native, loaded = self._load_native(progress)
        try:
            self._check_open()
            loaded.warmup()
            caps = loaded.capabilities()
            scheduler = native.QwenBatchScheduler(loaded, caps.max_slots)
        except native.Error as error:
            raise translate(error) from None
        say_death = weakref.WeakMethod(self._say_death)  # else the native engine's thread would keep this backend, which would then never be dropped

        def on_death(reason: str) -> None:
            if (say := say_death()) is not None:
                say(reason)

        self._engine = engine = NativeEngine(loaded, scheduler, on_death)
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
            chunked_prefill=caps.chunked_prefill and self._chunk > 0,
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

    def follow(self, progress: ProgressCallback, on_ready: Callable[[], None]) -> None:
        native, loaded = self._load_native(progress)
        on_ready()
        try:
            loaded.follow()
        except native.Error as error:
            raise translate(error) from None

    def _load_native(self, progress: ProgressCallback) -> tuple[Any, pocketllm_cpp.QwenEngine]:
        """The native module, and the model on it."""
        progress(LoadProgress(0.0, "importing the native engine"))
        native = import_native()

        def report(fraction: float, message: str) -> None:
            self._check_open()
            progress(LoadProgress(fraction, message))

        args = self._args
        rank = None if args.tensor_parallel_size == 1 else shared_memory_rank(self.rank or Rank.from_environment(args))
        device = native.linked_devices()[0] if args.device == "auto" else args.device
        if rank is not None and device == "cuda":
            device = f"cuda:{rank.local_index}"
        if args.prefill_chunk_tokens is None and device.startswith("cuda"):
            self._chunk = _GPU_CHUNK
        options = native.QwenEngineOptions(
            device=args.device if rank is None else device,
            dtype=args.dtype,
            kv_cache_dtype=args.kv_cache_dtype,
            max_model_len=args.max_model_len or 0,
            max_batch_size=min(args.max_batch_size or 0, _MAX_INT),
            kv_cache_memory=args.kv_cache_bytes or 0,
            num_threads=self._options.num_threads,
            prefill_chunk_tokens=min(self._chunk, _MAX_INT),
            enable_prefix_caching=args.enable_prefix_caching,
            tensor_parallel_size=args.tensor_parallel_size,
            tensor_parallel_rank=0 if rank is None else rank.index,
            rendezvous_dir="" if rank is None else str(rank.directory),
        )
        try:
            return native, native.QwenEngine.load(str(self._checkpoint.path), options, report)
        except native.Error as error:
            raise translate(error) from None

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

    def abandon(self, reason: str) -> None:
        if self._engine is None or self._args.tensor_parallel_size == 1:
            self.close()
        else:
            self._engine.abandon(reason)

    def _say_death(self, reason: str) -> None:
        if self.on_death is not None and self._args.tensor_parallel_size > 1:
            self.on_death(reason)

    def _check_open(self) -> None:
        if self._closed:
            raise BackendUnavailableError("The engine was closed while the model loaded.")


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


def shared_memory_rank(rank: Rank) -> Rank:
    """`rank`, which meets the others in a directory.

    Raises:
        UnsupportedFeatureError: the ranks are on several machines. ConfigurationError: they have no directory.
    """
    if rank.local_size != rank.size:
        raise UnsupportedFeatureError(
            f'"tensor_parallel_size" = {rank.size} over several machines is not supported on the cpp plane, whose ranks share memory: send backend "torch".',
            param="tensor_parallel_size",
        )
    if rank.directory is None:
        raise ConfigurationError(
            f"rank {rank.index} of {rank.size} has no directory to meet the others in: set {DIRECTORY} to one of this run alone, the same for each rank, "
            'as pocketllm serve does, or send backend "torch".',
            param="tensor_parallel_rank",
        )
    return rank


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


def _tokenizer_eos(checkpoint: Checkpoint) -> int | None:
    from pocketllm.text.tokenizer import load_tokenizer

    try:
        tokenizer = load_tokenizer(checkpoint)
    except ConfigurationError:  # a checkpoint without a tokenizer takes token ids all the same
        return None
    return None if tokenizer.eos_token is None else tokenizer.backend.token_to_id(tokenizer.eos_token)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
