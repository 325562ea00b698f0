"""Brings a checkpoint onto an NVIDIA GPU: which one, what it can't run, what fits into its memory, and the CUDA graphs."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence

import psutil
import torch

from pocketllm.backends.base import EngineRequest, LoadProgress
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE, CachePlan, plan_caches
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.plane import DTYPES, CacheShape, Order, Plane, build_scheduler, check_explicit, describe
from pocketllm.torch_engine.scheduler import Row, ScheduledRow

logger = logging.getLogger(__name__)

_OLDEST = (7, 5)
_ROWS, _CHUNK, _CHUNK_BESIDE_ANSWERS = 64, 8192, 512
_SPARE_BYTES = 2**29  # left to others, and to what the allocator wastes
_SHARE = 0.95  # of the rest


def resolve_device(name: str) -> torch.device:
    """The device that `name` ("auto", "cpu", "cuda" or "cuda:N") stands for; auto is the first GPU that can run models, else the CPU.

    Raises:
        ConfigurationError: no device has this name.
        UnsupportedFeatureError: this GPU, or this installation, does not run models.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name == "auto":
        usable = torch.cuda.is_available() and torch.cuda.get_device_capability(0) >= _OLDEST and importlib.util.find_spec("triton") is not None
        return torch.device("cuda:0" if usable else "cpu")
    if not torch.cuda.is_available():
        build = "this PyTorch finds no GPU" if torch.version.cuda else "this PyTorch is a build without CUDA"
        raise UnsupportedFeatureError(
            f'"device" = {name!r} can\'t be used: {build}. Install a CUDA build of torch and the driver, or send "cpu".', param="device"
        )
    index = int(name.partition(":")[2] or 0)
    if index >= torch.cuda.device_count():
        raise ConfigurationError(f'"device" = {name!r} does not exist: this machine has {torch.cuda.device_count()} GPU(s), numbered from 0.', param="device")
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) < _OLDEST:
        raise UnsupportedFeatureError(
            f'"device" = {name!r} is a {torch.cuda.get_device_name(index)} of compute capability {major}.{minor}, '
            f'and the kernels need {_OLDEST[0]}.{_OLDEST[1]} (Turing) or newer: use another GPU, or send "cpu".',
            param="device",
        )
    if importlib.util.find_spec("triton") is None:
        raise UnsupportedFeatureError(f'"device" = {name!r} needs Triton, which is not installed: pip install triton, or send "cpu".', param="device")
    return torch.device("cuda", index)


def gpu_dtype(name: str, device: torch.device) -> torch.dtype:
    """The compute dtype: bfloat16 where the GPU has units for it, else float16, unless another is asked for.

    Raises:
        UnsupportedFeatureError: the GPU does not compute in it.
    """
    has_bfloat16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "bfloat16" and not has_bfloat16:
        raise UnsupportedFeatureError(
            f'"dtype" = "bfloat16" needs a GPU of compute capability 8.0 (Ampere) or newer, and {device} is a {torch.cuda.get_device_name(device)}: '
            'use "float16" or "float32".',
            param="dtype",
        )
    return (torch.bfloat16 if has_bfloat16 else torch.float16) if name == "auto" else DTYPES[name]


def load_on_gpu(order: Order, device: torch.device, *, cuda_graphs: bool) -> Plane:
    """Load the weights, compute once as much as a step may, give the caches what is left, and capture decoding.

    Args:
        cuda_graphs: capture decoding; without, every kernel is launched by itself.

    Raises:
        ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
    """
    from pocketllm.torch_engine.gpu_runner import GpuRunner
    from pocketllm.torch_engine.layers.gpu import GpuDevice

    args, is_cuda = order.args, device.type == "cuda"
    dtype = gpu_dtype(args.dtype, device)
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else DTYPES[args.kv_cache_dtype]
    if is_cuda:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.backends.cuda.matmul.allow_tf32 = False
        _check_weights_fit(order, device)
    shape = CacheShape.of(order.checkpoint, kv_dtype, keeps_ring=True)
    max_rows = args.max_batch_size or _ROWS
    chunk = _CHUNK if args.prefill_chunk_tokens is None else args.prefill_chunk_tokens
    beside = min(_CHUNK_BESIDE_ANSWERS, chunk) if args.prefill_chunk_tokens is None else None
    with torch.inference_mode():
        model = order.build_model(GpuDevice(device, dtype))
        warm_tokens = min(chunk or order.context_length, order.context_length)
        order.progress(LoadProgress(1.0, f"compiling kernels, and computing {warm_tokens} tokens to see what a step takes"))
        warm_plan = CachePlan(-(-warm_tokens // BLOCK_SIZE), order.context_length, 0, 1, 0)
        warm = GpuRunner(model, shape.build(warm_plan, 1, device), BLOCK_SIZE, 1, warm_plan.num_blocks)
        order.check_open()
        _compute_once(warm, warm_tokens)
        del warm
        needs = shape.needs(args, order.context_length, max_rows, chunk)
        if (explicit := args.kv_cache_bytes) is not None:
            check_explicit(args, explicit, _memory(device)[1], str(device))
            plan = plan_caches(needs, explicit, fills=True, remedy="raise kv_cache_memory")
        else:
            plan = plan_caches(needs, _free_for_caches(device), fills=False, remedy="free memory of the GPU, use a smaller or quantized model")
        if plan.context_length < order.context_length:
            logger.warning(
                "max_model_len is %d: the model was made for %d, which don't fit into the memory of %s", plan.context_length, order.context_length, device
            )
        order.check_open()
        cache = shape.build(plan, max_rows, device)
        runner = GpuRunner(model, cache, BLOCK_SIZE, max_rows, -(-plan.context_length // BLOCK_SIZE))
        sizes = _graph_sizes(max_rows) if cuda_graphs and is_cuda and model.is_capturable else []

        def on_graph(done: int) -> None:
            order.check_open()
            order.progress(LoadProgress(1.0, f"capturing CUDA graphs: {done} of {len(sizes)}"))

        runner.capture(sizes, on_graph)
    scheduler = build_scheduler(args, plan, shape.state is not None, max_rows, chunk, beside)
    details = {**describe(model, cache, plan), "cuda_graphs": sizes}
    return Plane(scheduler, runner, str(device), plan.context_length, max_rows, chunk > 0, details)


def _graph_sizes(max_rows: int) -> Sequence[int]:
    """Numbers of rows with a graph of their own: rows that stand for none cost little where there are few, and memory traffic where there are many."""
    sizes = [1, 2, 4, 8, *range(16, max_rows, 8 if max_rows <= 128 else 16), max_rows]
    return sorted({size for size in sizes if size <= max_rows})


def _memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes; in Triton's interpreter, which computes on the CPU, the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _check_weights_fit(order: Order, device: torch.device) -> None:
    free, total = _memory(device)
    size = order.checkpoint.num_bytes
    if size + _SPARE_BYTES > free:
        raise ConfigurationError(
            f"{order.checkpoint.path} has {size / 2**30:.1f} GiB of weights, and {free / 2**30:.1f} of the {total / 2**30:.1f} GiB of {device} are free: "
            'free its memory, use a smaller or quantized model, or send device "cpu".',
            param="model",
        )


def _free_for_caches(device: torch.device) -> int:
    """Bytes for the caches: what is free, less what the largest step took beside the weights."""
    if device.type != "cuda":
        return _memory(device)[0] // 4
    torch.cuda.synchronize(device)
    step = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    torch.cuda.empty_cache()
    return max(0, int((torch.cuda.mem_get_info(device)[0] - step - _SPARE_BYTES) * _SHARE))


def _compute_once(runner: object, num_tokens: int) -> None:
    """One prompt of `num_tokens` tokens through the runner: it compiles the kernels, and its memory is the largest that a step takes."""
    from pocketllm.torch_engine.gpu_runner import GpuRunner

    assert isinstance(runner, GpuRunner)
    row = Row(EngineRequest("warm-up", (0,) * num_tokens, 1))
    row.slot, row.block_table = 0, list(range(-(-num_tokens // BLOCK_SIZE)))
    masks = Masks(runner.vocab_size)
    runner.launch([ScheduledRow(row, num_tokens, True)], masks, ()).result()
    masks.close()
