"""The torch plane behind the backend door: options in, an engine thread out. torch is imported when the model loads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from pocketllm import env
from pocketllm.backends.base import Backend, Capabilities, EngineRequest, EngineStats, Health, LoadProgress, ProgressCallback, StepCallback
from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import BackendUnavailableError, ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.kernels import NATIVE_LIBRARY

if TYPE_CHECKING:
    import torch

    from pocketllm.torch_engine.engine import Engine
    from pocketllm.torch_engine.model_runner import ModelRunner
    from pocketllm.torch_engine.scheduler import Scheduler
    from pocketllm.torch_engine.state_pool import StatePool

BLOCK_SIZE = 16
_SNAPSHOTS_A_ROW = 4
_LEAST_SNAPSHOT_INTERVAL = 512  # tokens
_UNCHUNKED_SNAPSHOT_INTERVAL = 8192  # tokens; each snapshot cuts a prompt that would be computed in one step
_MAX_THREADS = 1024  # far more than help; OpenMP ends the process when the system refuses it a thread
_OPTIONS = ("num_threads", "native_kernels")


class TorchBackend(Backend):
    """One checkpoint on PyTorch.

    Args:
        args: options; `backend_options` may hold num_threads, the threads that a step uses [all cores], and native_kernels, whether
            dtype auto may use the native kernels where they are built and suit the model [true].
        checkpoint: an open checkpoint whose architecture this plane runs.

    Raises:
        ConfigurationError, UnsupportedFeatureError: an option that this plane can't honour, before anything is loaded.
    """

    def __init__(self, args: EngineArgs, checkpoint: Checkpoint) -> None:
        self._args = args
        self._checkpoint = checkpoint
        self._engine: Engine | None = None
        self._closed = False
        self._num_threads, self._native_kernels = _plane_options(args)
        self._context_length = _context_length(args, checkpoint)
        vocab_size = int(checkpoint.config["vocab_size"])
        self._capabilities = Capabilities("torch", "cpu", args.max_batch_size, self._context_length, vocab_size, logprobs=True, structured_outputs=True)

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, progress: ProgressCallback) -> None:
        progress(LoadProgress(0.0, "importing torch"))
        # Spinning, OpenMP's threads would take the cores of the native kernels' own.
        with env.resting_openmp_threads(self._args.dtype == "auto" and self._native_kernels and NATIVE_LIBRARY.exists()):
            from pocketllm.torch_engine.engine import Engine

        self._engine = engine = Engine(lambda check_open: self._build(progress, check_open))
        # Whoever drops this backend without closing it, or leaves the interpreter, still stops the thread.
        weakref.finalize(self, engine.close)
        if self._closed:  # while torch was imported
            engine.close()
        engine.wait_until_built()
        if self._closed:  # too late for the build to notice, which of a small model takes no time
            raise BackendUnavailableError("The engine was closed while the model loaded.")
        progress(LoadProgress(1.0, "ready"))

    def _build(self, progress: ProgressCallback, check_open: Callable[[], None]) -> tuple[Scheduler, ModelRunner]:
        """Load the weights and make room for the KV cache, on the engine's thread."""
        import torch

        from pocketllm.torch_engine.block_pool import BlockPool
        from pocketllm.torch_engine.layers.attention import KVCache
        from pocketllm.torch_engine.layers.cpu import CpuDevice
        from pocketllm.torch_engine.layers.state_cache import HybridCache, StateCache
        from pocketllm.torch_engine.model_runner import ModelRunner
        from pocketllm.torch_engine.models.registry import HYBRIDS, MODELS
        from pocketllm.torch_engine.scheduler import Scheduler

        args, config = self._args, self._checkpoint.config
        torch.set_num_threads(self._num_threads)  # of this thread alone
        dtype = _compute_dtype(args.dtype)
        kv_dtype = _kv_dtype(args.kv_cache_dtype, dtype)
        num_layers, num_kv_heads, head_dim = config["num_hidden_layers"], config["num_key_value_heads"], config["head_dim"]
        read = HYBRIDS.get(self._checkpoint.architecture)
        hybrid = None if read is None else read(self._checkpoint)
        states, state_bytes = None, 0
        if hybrid is not None:
            states, state_bytes = self._plan_states(hybrid.num_state_layers * hybrid.delta_net.state_shape.num_bytes)
        num_kv_layers = num_layers if hybrid is None else hybrid.num_attention_layers
        num_blocks = self._num_blocks(2 * num_kv_layers * num_kv_heads * head_dim * kv_dtype.itemsize, state_bytes)

        def on_layer(done: int) -> None:
            check_open()
            progress(LoadProgress(done / num_layers, f"loading weights: layer {done} of {num_layers}"))

        with torch.inference_mode():
            build = MODELS[self._checkpoint.architecture]
            device = CpuDevice(dtype, self._num_threads if self._native_kernels else 0)
            model = build(self._checkpoint, device, self._context_length, on_layer)
            sizes = (num_kv_layers, num_blocks, BLOCK_SIZE, num_kv_heads, head_dim, kv_dtype)
            if hybrid is None or states is None:
                cache = KVCache(*sizes)
            else:
                cache = HybridCache(*sizes, StateCache(hybrid.num_state_layers, states.num_slots, hybrid.delta_net.state_shape))
        pool = BlockPool(num_blocks, BLOCK_SIZE, enable_prefix_caching=args.enable_prefix_caching)
        self._capabilities = replace(
            self._capabilities,
            chunked_prefill=args.prefill_chunk_tokens > 0,
            prefix_caching=args.enable_prefix_caching,
            details={
                "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
                "kv_cache_dtype": str(kv_dtype).removeprefix("torch."),
                "native_kernels": model.native_kernels,
                "weight_bytes": model.num_bytes,
                "kv_cache_bytes": cache.num_bytes,
                "kv_blocks": num_blocks,
                "block_size": BLOCK_SIZE,
                **({} if states is None else _state_details(states, state_bytes)),
                "num_threads": self._num_threads,
            },
        )
        return Scheduler(pool, args.max_batch_size, args.prefill_chunk_tokens, states), ModelRunner(model, cache, BLOCK_SIZE, self._num_threads)

    def _plan_states(self, slot_bytes: int) -> tuple[StatePool, int]:
        """State slots and their bytes: one a row, and snapshots in at most a quarter of what that leaves of the cache's memory."""
        from pocketllm.torch_engine.state_pool import StatePool

        args, rows = self._args, self._args.max_batch_size
        total = args.kv_cache_bytes or psutil.virtual_memory().available // 4
        num_snapshots = max(0, min(_SNAPSHOTS_A_ROW * rows, (total - rows * slot_bytes) // 4 // slot_bytes)) if args.enable_prefix_caching else 0
        interval = max(args.prefill_chunk_tokens, _LEAST_SNAPSHOT_INTERVAL) if args.prefill_chunk_tokens else _UNCHUNKED_SNAPSHOT_INTERVAL
        return StatePool(rows, num_snapshots, -(-interval // BLOCK_SIZE)), (rows + num_snapshots) * slot_bytes

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        if self._engine is None or self._engine.health().state == "loading":
            raise BackendUnavailableError("The model is still loading: try again when /ready answers 200.")
        vocab_size = self._capabilities.vocab_size
        if request.prompt_token_ids and not 0 <= min(request.prompt_token_ids) <= max(request.prompt_token_ids) < vocab_size:
            raise ConfigurationError(f'"prompt" holds an id that is no token of this model: ids are whole numbers from 0 to {vocab_size - 1}.', param="prompt")
        self._engine.submit(request, on_step)

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

    def _num_blocks(self, bytes_per_token: int, state_bytes: int = 0) -> int:
        """KV blocks that the options and the memory allow beside `state_bytes`, at least one full context."""
        block_bytes = bytes_per_token * BLOCK_SIZE
        per_row = -(-self._context_length // BLOCK_SIZE)
        wanted = per_row * self._args.max_batch_size
        if (explicit := self._args.kv_cache_bytes) is not None:
            total = psutil.virtual_memory().total
            if explicit > total:
                raise ConfigurationError(
                    f'"kv_cache_memory" = {self._args.kv_cache_memory!r} is more than the {total / 2**20:.0f} MiB of memory that this machine has: lower it.',
                    param="kv_cache_memory",
                )
            wanted = max(0, explicit - state_bytes) // block_bytes
            remedy = "raise kv_cache_memory, or lower max_model_len or max_batch_size" if state_bytes else "raise kv_cache_memory or lower max_model_len"
        else:
            wanted = min(wanted, max(0, psutil.virtual_memory().available // 4 - state_bytes) // block_bytes)
            remedy = "free some memory, set kv_cache_memory, or lower max_model_len"
        if wanted < per_row:
            beside = f" beside {state_bytes / 2**20:.0f} MiB of recurrent states" if state_bytes else ""
            needed, allowed = per_row * block_bytes / 2**20, wanted * block_bytes / 2**20
            raise ConfigurationError(
                f"A context of {self._context_length} tokens needs {needed:.0f} MiB of KV cache and {allowed:.0f} MiB may be used{beside}: {remedy}.",
                param="kv_cache_memory",
            )
        return wanted


def _state_details(states: StatePool, num_bytes: int) -> dict[str, int]:
    return {
        "state_bytes": num_bytes,
        "state_snapshots": states.num_slots - states.num_rows,
        "snapshot_interval": states.interval_blocks * BLOCK_SIZE,
    }


def _plane_options(args: EngineArgs) -> tuple[int, bool]:
    """num_threads and native_kernels of `backend_options`."""
    options: dict[str, Any] = dict(args.backend_options)
    for name in options:
        if name not in _OPTIONS:
            raise ConfigurationError(
                f'"backend_options" holds {name!r}, which the torch plane does not know: it takes {", ".join(_OPTIONS)}.', param="backend_options"
            )
    threads = options.get("num_threads", len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MAX_THREADS:
        raise ConfigurationError(
            f'"num_threads" = {threads!r} in "backend_options" is not valid: send a whole number from 1 to {_MAX_THREADS}.', param="backend_options"
        )
    native = options.get("native_kernels", True)
    if not isinstance(native, bool):
        raise ConfigurationError(f'"native_kernels" = {native!r} in "backend_options" is not valid: send true or false.', param="backend_options")
    return threads, native


def _context_length(args: EngineArgs, checkpoint: Checkpoint) -> int:
    trained = checkpoint.context_length
    if args.max_model_len is None:
        return trained
    if args.max_model_len > trained:
        raise ConfigurationError(
            f'"max_model_len" = {args.max_model_len} is more than the {trained} tokens that {checkpoint.name} was made for: lower it, or leave it out.',
            param="max_model_len",
        )
    return args.max_model_len


def _compute_dtype(name: str) -> torch.dtype | None:
    """The dtype that was asked for; None leaves the choice to the model."""
    import torch

    from pocketllm.torch_engine.layers.linear import has_bfloat16_units, has_float16_packing

    if name == "auto":
        return None
    if name == "bfloat16" and not has_bfloat16_units():
        raise UnsupportedFeatureError('"dtype" = "bfloat16" needs a processor with AVX-512 BF16 or AMX: use "float16" or "float32".', param="dtype")
    if name == "float16" and not has_float16_packing():
        raise UnsupportedFeatureError('"dtype" = "float16" needs an x86 processor here: use "float32".', param="dtype")
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def _kv_dtype(name: str, compute: torch.dtype | None) -> torch.dtype:
    import torch

    from pocketllm.torch_engine.layers.linear import default_dtype

    return compute or default_dtype() if name == "auto" else {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
