"""Brings a checkpoint onto a device: a scheduler and a runner that are made for each other."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from pocketllm.backends.base import LoadProgress, ProgressCallback
from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE, CacheNeeds, CachePlan, plan_caches
from pocketllm.torch_engine.cache_shape import cache_shape
from pocketllm.torch_engine.expert_placement import expert_cache
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.cpu import CpuDevice
from pocketllm.torch_engine.layers.device import Device
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.layers.linear import default_dtype, has_bfloat16_units, has_float16_packing
from pocketllm.torch_engine.model_runner import ModelRunner
from pocketllm.torch_engine.models.model import Model
from pocketllm.torch_engine.models.registry import kv_sizes, model_class
from pocketllm.torch_engine.rank_group import RankGroup
from pocketllm.torch_engine.ranked_runner import LeadingRunner
from pocketllm.torch_engine.runner import Runner
from pocketllm.torch_engine.scheduler import Scheduler
from pocketllm.torch_engine.share import ALONE, Share
from pocketllm.torch_engine.state_pool import StatePool

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CPU_ROWS, _CPU_CHUNK = 8, 512


@dataclass(frozen=True, slots=True)
class Plane:
    """What the engine needs, and facts for people.

    Args:
        scheduler, runner: of one model.
        device: such as "cpu" or "cuda:0".
        context_length: most tokens of a row.
        max_rows: most running rows.
        is_chunked: long prompts are computed in pieces.
        details: as Capabilities has them.
        experts: the cache of routed experts that are not all loaded, or None.
    """

    scheduler: Scheduler
    runner: Runner
    device: str
    context_length: int
    max_rows: int
    is_chunked: bool
    details: Mapping[str, Any]
    experts: ExpertCache | None = None


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be loaded, and who hears of it.

    Args:
        args: the user's options.
        checkpoint: open.
        context_length: that was asked for, or that the model was made for.
        progress: told what was done.
        check_open: called now and then; raises to end the load.
        group: the ranks that share the model, or None for one.
    """

    args: EngineArgs
    checkpoint: Checkpoint
    context_length: int
    progress: ProgressCallback
    check_open: Callable[[], None]
    group: RankGroup | None = None

    @property
    def share(self) -> Share:
        """What this rank holds."""
        return ALONE if self.group is None else self.group.share

    @property
    def ranks_here(self) -> int:
        """How many share the memory of this machine."""
        return 1 if self.group is None else self.group.rank.local_size

    def agreed(self, number: int) -> int:
        """The least of what the ranks have found each for itself, so that all decide alike."""
        return number if self.group is None else self.group.least(number)

    def led(self, runner: Runner) -> Runner:
        """The runner that the engine uses."""
        return LeadingRunner(runner, self.group) if self.group is not None and self.share.index == 0 else runner

    def build_model(self, device: Device) -> Model:
        """The model on `device`.

        Raises:
            ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the key of the config.
        """
        num_layers = kv_sizes(self.checkpoint)[0]

        def on_layer(done: int) -> None:
            self.check_open()
            self.progress(LoadProgress(done / num_layers, f"loading weights: layer {done} of {num_layers}"))

        return model_class(self.checkpoint)(self.checkpoint, device, self.context_length, on_layer)


def build_scheduler(args: EngineArgs, plan: CachePlan, is_hybrid: bool, chunk_tokens: int, chunk_beside_answers: int | None) -> Scheduler:
    pool = BlockPool(plan.num_blocks, BLOCK_SIZE, enable_prefix_caching=args.enable_prefix_caching)
    states = StatePool(plan.max_rows, plan.num_snapshots, plan.interval_blocks) if is_hybrid else None
    return Scheduler(pool, plan.max_rows, chunk_tokens, states, prefill_chunk_beside_answers=chunk_beside_answers)


def describe(model: Model, cache: KVCache, plan: CachePlan, experts: ExpertCache | None) -> dict[str, Any]:
    """Facts for Capabilities.details."""
    states = {"state_bytes": plan.state_bytes, "state_snapshots": plan.num_snapshots, "snapshot_interval": plan.interval_blocks * BLOCK_SIZE}
    return {
        "compute_dtype": str(model.compute_dtype).removeprefix("torch."),
        "kv_cache_dtype": str(cache.dtype).removeprefix("torch."),
        "native_kernels": model.native_kernels,
        "weight_bytes": model.num_bytes,
        "kv_cache_bytes": cache.num_bytes,
        "kv_blocks": plan.num_blocks,
        "block_size": BLOCK_SIZE,
        **({} if cache.states is None else states),
        **({} if experts is None else {"expert_cache_bytes": experts.budget}),
    }


def load_on_cpu(order: Order, num_threads: int, *, native_kernels: bool) -> Plane:
    """Load the weights and make room for the caches, on the thread that will compute.

    Args:
        num_threads: threads that a step uses.
        native_kernels: dtype auto may use the native kernels where they are built and suit the model.

    Raises:
        ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
    """
    args = order.args
    torch.set_num_threads(num_threads)  # of this thread alone
    dtype = _cpu_dtype(args.dtype)
    kv_dtype = dtype or default_dtype() if args.kv_cache_dtype == "auto" else DTYPES[args.kv_cache_dtype]
    shape = cache_shape(order.checkpoint, kv_dtype, keeps_ring=False, share=order.share)
    chunk = _CPU_CHUNK if args.prefill_chunk_tokens is None else args.prefill_chunk_tokens
    needs = shape.needs(args, order.context_length, args.max_batch_size or _CPU_ROWS, chunk)
    if (explicit := args.kv_cache_bytes) is None:
        free = order.agreed(psutil.virtual_memory().available // order.ranks_here)
        plan = plan_caches(needs, free // 4, fills=False, remedy="free some memory, set kv_cache_memory")
    else:
        where = "this machine has" if order.ranks_here == 1 else f"this machine has for each of its {order.ranks_here} ranks"
        check_explicit(args, explicit, psutil.virtual_memory().total // order.ranks_here, where)
        plan = plan_caches(needs, explicit, fills=True, remedy="raise kv_cache_memory")
    log_limits(args, needs, plan, "a quarter of the free memory")
    memory = psutil.virtual_memory()
    experts = expert_cache(args, order.checkpoint, dtype or default_dtype(), memory.available, memory.total, on_gpu=False)
    with torch.inference_mode():
        model = order.build_model(CpuDevice(dtype, num_threads if native_kernels else 0, order.group, experts))
        cache = shape.build(plan, torch.device("cpu"))
    scheduler = build_scheduler(args, plan, shape.slot_bytes > 0, chunk, None)
    runner = ModelRunner(model, cache, BLOCK_SIZE, num_threads, order.group)
    details = {**describe(model, cache, plan, experts), "num_threads": num_threads}
    return Plane(scheduler, order.led(runner), "cpu", plan.context_length, plan.max_rows, chunk > 0, details, experts)


def check_explicit(args: EngineArgs, asked: int, room: int, where: str) -> None:
    """Refuse a kv_cache_memory of `asked` bytes that is more than the `room` that there is.

    Args:
        where: "this machine has", or what else has it.

    Raises:
        ConfigurationError: with the figures.
    """
    if asked > room:
        raise ConfigurationError(
            f'"kv_cache_memory" = {args.kv_cache_memory!r} is more than the {room / 2**20:.0f} MiB of memory that {where}: lower it.', param="kv_cache_memory"
        )


def log_limits(args: EngineArgs, needs: CacheNeeds, plan: CachePlan, memory: str) -> None:
    """Say in the log what is less than the model or the device would allow.

    Args:
        memory: what the caches were fitted into where the user named no size, such as "a quarter of the free memory".
    """
    where = memory if args.kv_cache_memory is None else f"kv_cache_memory = {args.kv_cache_memory}"
    if plan.context_length < needs.context_length:
        made_for = needs.context_length
        logger.warning("max_model_len is %d: the model was made for %d, whose KV cache does not fit into %s", plan.context_length, made_for, where)
    if plan.max_rows < needs.max_rows:
        logger.warning("max_batch_size is %d: the recurrent states of %d rows leave too little of %s to the KV cache", plan.max_rows, needs.max_rows, where)


def _cpu_dtype(name: str) -> torch.dtype | None:
    """The dtype that was asked for; None leaves the choice to the model."""
    if name == "auto":
        return None
    if name == "bfloat16" and not has_bfloat16_units():
        raise UnsupportedFeatureError('"dtype" = "bfloat16" needs a processor with AVX-512 BF16 or AMX: use "float16" or "float32".', param="dtype")
    if name == "float16" and not has_float16_packing():
        raise UnsupportedFeatureError('"dtype" = "float16" needs an x86 processor here: use "float32".', param="dtype")
    return DTYPES[name]
