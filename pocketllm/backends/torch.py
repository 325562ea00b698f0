"""The torch plane behind the backend door: options in, an engine thread out. torch is imported when the model loads."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from pocketllm import env
from pocketllm.backends.base import SAMPLER_FLAGS, Backend, Capabilities, EngineRequest, EngineStats, Health, LoadProgress, ProgressCallback, StepCallback
from pocketllm.backends.terms import check_request, check_threads, context_length, read_backend_options
from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import BackendUnavailableError, ConfigurationError
from pocketllm.parallel.rank import Rank
from pocketllm.torch_engine.kernels import NATIVE_LIBRARY

if TYPE_CHECKING:
    from pocketllm.torch_engine.engine import Engine
    from pocketllm.torch_engine.layers.expert_cache import ExpertCache
    from pocketllm.torch_engine.plane import Plane
    from pocketllm.torch_engine.rank_group import RankGroup
    from pocketllm.torch_engine.runner import Runner
    from pocketllm.torch_engine.scheduler import Scheduler


class TorchBackend(Backend):
    """One checkpoint on PyTorch.

    Args:
        args: options; `backend_options` may hold num_threads, the threads that a step on the CPU uses [all cores]; native_kernels, whether
            dtype auto may use the native CPU kernels where they are built and suit the model [true]; and cuda_graphs, whether steps on a
            GPU, but for long prompts, are captured as CUDA graphs [true].
        checkpoint: an open checkpoint whose architecture this plane runs.

    Raises:
        ConfigurationError, UnsupportedFeatureError: an option that this plane can't honour, before anything is loaded.
    """

    DECLARES = frozenset({"logprobs", "structured_outputs", "prompt_logprobs", *SAMPLER_FLAGS})

    def __init__(self, args: EngineArgs, checkpoint: Checkpoint) -> None:
        self._args = args
        self._checkpoint = checkpoint
        self._engine: Engine | None = None
        self._closed = False
        self._experts: ExpertCache | None = None
        self._options = _Options.read(args)
        self._context_length = context_length(args, checkpoint)
        vocab_size = int(checkpoint.config["vocab_size"])
        declared = dict.fromkeys(self.DECLARES, True)
        self._capabilities = Capabilities("torch", "cpu", args.max_batch_size or 0, self._context_length, vocab_size, **declared)  # type: ignore[arg-type]

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def load(self, progress: ProgressCallback) -> None:
        self._import_torch(progress)
        from pocketllm.torch_engine.engine import Engine

        say_death = weakref.WeakMethod(self._say_death)  # else the engine's thread would keep this backend, which would then never be dropped

        def on_death(reason: str) -> None:
            if (say := say_death()) is not None:
                say(reason)

        self._engine = engine = Engine(lambda check_open: self._build(progress, check_open), on_death)
        # Whoever drops this backend without closing it, or leaves the interpreter, still stops the thread.
        weakref.finalize(self, engine.close)
        if self._closed:  # while torch was imported
            engine.close()
        engine.wait_until_built()
        if self._closed:  # too late for the build to notice, which of a small model takes no time
            raise BackendUnavailableError("The engine was closed while the model loaded.")
        progress(LoadProgress(1.0, "ready"))

    def follow(self, progress: ProgressCallback, on_ready: Callable[[], None]) -> None:
        self._import_torch(progress)
        from pocketllm.torch_engine.ranked_runner import follow

        plane, group = self._load_plane(progress, lambda: None)
        assert group is not None, "a rank above 0 is one of several"
        on_ready()
        follow(plane.runner, group)

    def _import_torch(self, progress: ProgressCallback) -> None:
        progress(LoadProgress(0.0, "importing torch"))
        # Spinning, OpenMP's threads would take the cores of the native kernels' own.
        with env.resting_openmp_threads(self._args.dtype == "auto" and self._options.native_kernels and NATIVE_LIBRARY.exists()):
            import torch  # noqa: F401  (it reads the threads' setting now)

    def _build(self, progress: ProgressCallback, check_open: Callable[[], None]) -> tuple[Scheduler, Runner]:
        """Load the weights and make room for the caches, on the engine's thread."""
        plane, _ = self._load_plane(progress, check_open)
        self._capabilities = replace(
            self._capabilities,
            device=plane.device,
            max_slots=plane.max_rows,
            context_length=plane.context_length,
            chunked_prefill=plane.is_chunked,
            prefix_caching=self._args.enable_prefix_caching,
            details=dict(plane.details),
        )
        self._experts = plane.experts
        return plane.scheduler, plane.runner

    def _load_plane(self, progress: ProgressCallback, check_open: Callable[[], None]) -> tuple[Plane, RankGroup | None]:
        from pocketllm.torch_engine.gpu_plane import load_on_gpu, resolve_device
        from pocketllm.torch_engine.plane import Order, load_on_cpu

        rank = (self.rank or Rank.from_environment(self._args)) if self._args.tensor_parallel_size > 1 else None
        device, group, num_threads = resolve_device(self._args.device, rank), None, self._options.num_threads
        if rank is not None:
            from pocketllm.torch_engine.rank_group import RankGroup

            progress(LoadProgress(0.0, f"waiting for the other ranks of {rank.size}"))
            group = RankGroup(rank, device, check_open)
            if "num_threads" not in self._args.backend_options:
                num_threads = max(1, num_threads // rank.local_size)
        order = Order(self._args, self._checkpoint, self._context_length, progress, check_open, group)
        try:
            if device.type == "cpu":
                plane = load_on_cpu(order, num_threads, native_kernels=self._options.native_kernels)
            else:
                plane = load_on_gpu(order, device, cuda_graphs=self._options.cuda_graphs)
            order.agreed(0)  # every rank has loaded its part
        except BaseException:
            if group is not None:
                group.close()  # else the others wait for this one
            raise
        return plane, group

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        if self._engine is None or self._engine.health().state == "loading":
            raise BackendUnavailableError("The model is still loading: try again when /ready answers 200.")
        check_request(request, self._capabilities)
        self._engine.submit(request, on_step)

    def cancel(self, request_id: str) -> bool:
        return self._engine is not None and self._engine.cancel(request_id)

    def health(self) -> Health:
        if self._engine is None:
            return Health("closed" if self._closed else "loading")
        return self._engine.health()

    def stats(self) -> EngineStats:
        stats = EngineStats() if self._engine is None else self._engine.stats()
        if (experts := self._experts) is None:
            return stats
        hits = experts.hits  # first: the engine goes on counting, and no hit is without its lookup
        return replace(stats, expert_lookups=experts.lookups, expert_hits=hits, expert_bytes=experts.num_bytes)

    def _say_death(self, reason: str) -> None:
        if self.on_death is not None:
            self.on_death(reason)

    def abandon(self, reason: str) -> None:
        if self._engine is not None:
            self._engine.abandon(reason)

    def close(self) -> None:
        self._closed = True
        if self._engine is not None:
            self._engine.close()
        self._experts = None  # the engine has let go of the model, of which this is the larger part


@dataclass(frozen=True, slots=True)
class _Options:
    """What `backend_options` may hold.

    Args:
        num_threads: threads that a step on the CPU uses.
        native_kernels: dtype auto may use the native kernels where they are built and suit the model.
        cuda_graphs: steps on a GPU, but for long prompts, are captured as CUDA graphs.
    """

    num_threads: int
    native_kernels: bool
    cuda_graphs: bool

    @classmethod
    def read(cls, args: EngineArgs) -> _Options:
        """Raises:
        ConfigurationError: a name is unknown, or a value makes no sense.
        """
        names = [field.name for field in fields(cls)]
        options = read_backend_options(args, "torch", names)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        threads = check_threads(options.get("num_threads", cores))
        switches = {name: options.get(name, True) for name in names[1:]}
        for name, value in switches.items():
            if not isinstance(value, bool):
                raise ConfigurationError(f'"{name}" = {value!r} in "backend_options" is not valid: send true or false.', param="backend_options")
        return cls(threads, **switches)
