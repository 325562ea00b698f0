"""Brings a checkpoint onto an NVIDIA GPU: which one, what it can't run, what fits into its memory, and the CUDA graphs."""

from __future__ import annotations

import importlib.util
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import torch

from pocketllm.backends.base import EngineRequest, LoadProgress
from pocketllm.checkpoint import TensorInfo
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.parallel.rank import Rank
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE, CachePlan, plan_caches
from pocketllm.torch_engine.cache_shape import CacheShape, cache_shape
from pocketllm.torch_engine.expert_placement import built_bytes, expert_cache, is_routed, loaded_tensors
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.models.model import Model
from pocketllm.torch_engine.plane import DTYPES, Order, Plane, build_scheduler, check_explicit, describe, log_limits
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.step_shape import StepShape, captured_shapes, chunk_beside_answers

if TYPE_CHECKING:
    from pocketllm.torch_engine.gpu_runner import GpuRunner

logger = logging.getLogger(__name__)

_OLDEST = (7, 5)
_ROWS, _CHUNK = 64, 8192
_LEAST_CHUNK = 512  # tokens; a chunk that nobody asked for is not made shorter to leave memory to the caches
_SPARE_BYTES = 2**29  # left to others, and to what the allocator wastes
_SHARE = 0.95  # of the rest
_SEVERAL = 16  # prompts that give attention work for a whole GPU, however short
_FAILED = -(2**62)  # less than any number of spare bytes
_EMBEDDINGS = ("embed_tokens.weight", "token_embd.weight")


def resolve_device(name: str, rank: Rank | None = None) -> torch.device:
    """The device that `name` ("auto", "cpu", "cuda" or "cuda:N") stands for; auto is the first GPU that can run models, else the CPU.

    Args:
        rank: one of several, which takes the GPU of its number on this machine; auto is the CPU for all of them where there are too few GPUs.

    Raises:
        ConfigurationError: no device has this name.
        UnsupportedFeatureError: this GPU, or this installation, does not run models.
    """
    if name == "cpu":
        return torch.device("cpu")
    if name == "auto":
        count = torch.cuda.device_count() if torch.cuda.is_available() and importlib.util.find_spec("triton") is not None else 0
        usable = [index for index in range(count) if torch.cuda.get_device_capability(index) >= _OLDEST]
        if rank is not None and len(usable) < rank.local_size:
            if usable:
                logger.warning(
                    "%d ranks need as many GPUs, and this machine has %d that run models: the ranks compute on the CPU", rank.local_size, len(usable)
                )
            return torch.device("cpu")
        if rank is not None:
            return torch.device("cuda", usable[rank.local_index])
        return torch.device("cuda", usable[0]) if usable else torch.device("cpu")
    if not torch.cuda.is_available():
        build = "this PyTorch finds no GPU" if torch.version.cuda else "this PyTorch is a build without CUDA"
        raise UnsupportedFeatureError(
            f'"device" = {name!r} can\'t be used: {build}. Install a CUDA build of torch and the driver, or send "cpu".', param="device"
        )
    index = int(name.partition(":")[2] or 0) if rank is None else rank.local_index
    if rank is not None and index >= torch.cuda.device_count():
        raise ConfigurationError(
            f'"tensor_parallel_size" = {rank.size} gives {rank.local_size} ranks of this machine a GPU each, and it has {torch.cuda.device_count()}: '
            'lower it, or send device "cpu".',
            param="tensor_parallel_size",
        )
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


def gpu_dtype(name: str, device: torch.device, option: str = "dtype") -> torch.dtype:
    """The dtype of `option` called `name`; "auto" is bfloat16 where the GPU has units for it, else float16.

    Raises:
        UnsupportedFeatureError: the GPU does not compute in it.
    """
    has_bfloat16 = device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)
    if name == "bfloat16" and not has_bfloat16:
        raise UnsupportedFeatureError(
            f'"{option}" = "bfloat16" needs a GPU of compute capability 8.0 (Ampere) or newer, and {device} is a {torch.cuda.get_device_name(device)}: '
            'use "float16" or "float32".',
            param=option,
        )
    return (torch.bfloat16 if has_bfloat16 else torch.float16) if name == "auto" else DTYPES[name]


def load_on_gpu(order: Order, device: torch.device, *, cuda_graphs: bool) -> Plane:
    """Load the weights, compute once as much as a step may, give the caches what is left, and capture the steps that are not long.

    Args:
        cuda_graphs: capture steps; without, every kernel is launched by itself.

    Raises:
        ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
    """
    from pocketllm.torch_engine.gpu_runner import GpuRunner
    from pocketllm.torch_engine.layers.gpu import GpuDevice

    args, is_cuda = order.args, device.type == "cuda"
    dtype = gpu_dtype(args.dtype, device)
    kv_dtype = dtype if args.kv_cache_dtype == "auto" else gpu_dtype(args.kv_cache_dtype, device, "kv_cache_dtype")
    if is_cuda:
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.backends.cuda.matmul.allow_tf32 = False
    experts = expert_cache(args, order.checkpoint, dtype, *_memory(device), on_gpu=True)
    if is_cuda:
        _check_weights_fit(order, device, dtype, experts)
    shape = cache_shape(order.checkpoint, kv_dtype, keeps_ring=True, share=order.share)
    with torch.inference_mode(), _memory_is_enough(order, device):
        model = order.build_model(GpuDevice(device, dtype, order.group, experts))
        chunk, step_bytes = _choose_chunk(order, model, shape, device, experts)
        needs = shape.needs(args, order.context_length, args.max_batch_size or _ROWS, chunk)
        captures = cuda_graphs and is_cuda and model.is_capturable
        if captures:
            step_bytes += _measure_graphs(order, model, shape, device, _shapes(order, model, needs.max_rows, chunk))
        # Beside logits of all rows, what a prompt takes, and experts that will be built.
        free = order.agreed(_free_for_caches(device, step_bytes + needs.max_rows * model.vocab_size * 4 + (experts.room if experts else 0)))
        if (explicit := args.kv_cache_bytes) is not None:
            check_explicit(args, explicit, free, f"{device} has free beside the weights and what a step takes")
            plan = plan_caches(needs, explicit, fills=True, remedy="raise kv_cache_memory")
        else:
            room = int(max(0, free - _SPARE_BYTES) * _SHARE) if is_cuda else free // 4
            plan = plan_caches(needs, room, fills=False, remedy="free memory of the GPU, use a smaller or quantized model")
        log_limits(args, needs, plan, f"the memory of {device}")
        order.check_open()
        cache = shape.build(plan, device)
        runner = GpuRunner(model, cache, BLOCK_SIZE, plan.max_rows, -(-plan.context_length // BLOCK_SIZE))
        if is_cuda:
            order.progress(LoadProgress(1.0, "compiling kernels for steps of other sizes"))
            _compile_other_steps(runner, plan, captures)
        shapes = _shapes(order, model, plan.max_rows, chunk) if captures else []
        if shapes:
            _capture(order, runner, shapes)
    if experts is not None:
        experts.forget_counts()  # of the steps above
    beside = None if args.prefill_chunk_tokens is not None else min(chunk_beside_answers(plan.max_rows), chunk)
    scheduler = build_scheduler(args, plan, shape.slot_bytes > 0, chunk, beside)
    details = {**describe(model, cache, plan, experts), "cuda_graphs": _describe_shapes(shapes)}
    return Plane(scheduler, order.led(runner), str(device), plan.context_length, plan.max_rows, chunk > 0, details, experts)


def _shapes(order: Order, model: Model, max_rows: int, chunk: int) -> list[StepShape]:
    """What is captured of a plane whose steps have at most `chunk` prompt tokens."""
    shapes = captured_shapes(max_rows, chunk, chunk if order.args.prefill_chunk_tokens is not None else min(chunk_beside_answers(max_rows), chunk))
    return shapes if model.captures_prompts else [shape for shape in shapes if not shape.num_prompts]


def _describe_shapes(shapes: Sequence[StepShape]) -> dict[str, Any]:
    """The captured shapes for Capabilities.details: rows where all decode, prompt tokens alone, and [rows that decode, prompt tokens] beside them."""
    return {
        "decode": [shape.num_decode for shape in shapes if shape.all_sample],
        "prefill": [shape.num_prompt_tokens for shape in shapes if not shape.num_decode],
        "mixed": [[shape.num_decode, shape.num_prompt_tokens] for shape in shapes if shape.num_decode and shape.num_prompts],
    }


def _capture(order: Order, runner: GpuRunner, shapes: Sequence[StepShape]) -> None:
    def on_graph(done: int) -> None:
        order.check_open()
        order.progress(LoadProgress(1.0, f"capturing CUDA graphs: {done} of {len(shapes)}"))

    began, before = time.perf_counter(), _free_for_caches(runner.device, 0)
    runner.capture(shapes, on_graph)
    taken = before - _free_for_caches(runner.device, 0)
    logger.info("captured %d CUDA graphs in %.1f s, which take %.0f MiB", len(shapes), time.perf_counter() - began, taken / 2**20)


def _memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes; in Triton's interpreter, which computes on the CPU, the machine's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    memory = psutil.virtual_memory()
    return memory.available, memory.total


def _check_weights_fit(order: Order, device: torch.device, dtype: torch.dtype, experts: ExpertCache | None = None) -> None:
    """Refuse what can't be loaded: all weights, or without the routed experts and with their cache."""
    free, total = _memory(device)
    tensors = [tensor for tensor in loaded_tensors(order.checkpoint) if experts is None or not is_routed(tensor)]
    size = _weight_bytes(tensors, dtype, order.share.size)
    if experts is not None and size + experts.budget + _SPARE_BYTES > free:
        raise ConfigurationError(
            f"{order.checkpoint.path} takes {size / 2**30:.1f} GiB beside its routed experts, whose cache has {experts.budget / 2**30:.1f}, and "
            f"{free / 2**30:.1f} of the {total / 2**30:.1f} GiB of {device} are free: send a smaller routed_experts_memory, or free memory of the GPU.",
            param="routed_experts_memory",
        )
    if size + _SPARE_BYTES > free:
        part = "" if order.share.size == 1 else f"a rank's part of {order.share.size} of "
        raise ConfigurationError(
            f"{part}{order.checkpoint.path} takes {size / 2**30:.1f} GiB, and {free / 2**30:.1f} of the {total / 2**30:.1f} GiB of {device} are free: "
            'free its memory, use a smaller or quantized model, or send device "cpu".',
            param="model",
        )


def _weight_bytes(tensors: Iterable[TensorInfo], dtype: torch.dtype, num_ranks: int) -> int:
    """Bytes of `tensors` on the GPU of one of `num_ranks` ranks: the embeddings are on each, and what is dealt out is nearly all of the rest."""
    whole = dealt = 0
    for tensor in tensors:
        size = built_bytes(tensor, dtype, on_gpu=True)
        if tensor.name.endswith(_EMBEDDINGS):
            whole += size
        else:
            dealt += size
    return whole + dealt // num_ranks


@contextmanager
def _memory_is_enough(order: Order, device: torch.device) -> Iterator[None]:
    """Turns a refusal of memory into an error that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"{order.checkpoint.path} and its caches don't fit into the {_memory(device)[1] / 2**30:.1f} GiB of {device}: free its memory, "
            'lower kv_cache_memory or max_batch_size, use a smaller or quantized model, or send device "cpu".',
            param="model",
        ) from error


def _choose_chunk(order: Order, model: Model, shape: CacheShape, device: torch.device, experts: ExpertCache | None = None) -> tuple[int, int]:
    """Most prompt tokens of a step, and the bytes that such a step takes beside weights, caches and the experts that it built.

    Where nobody asked for a number, it is halved until the step takes at most a quarter of what the weights leave.
    """
    asked = order.args.prefill_chunk_tokens
    chunk = _CHUNK if asked is None else asked
    while True:
        num_tokens = min(chunk or order.context_length, order.context_length)
        order.progress(LoadProgress(1.0, f"compiling kernels, and computing {num_tokens} tokens to see what a step takes"))
        order.check_open()
        room = experts.room if experts else 0
        step_bytes = _measure_step(model, shape, device, num_tokens)
        if experts and step_bytes is not None:
            step_bytes = max(0, step_bytes - (room - experts.room))
            room = experts.room
        can_shrink = asked is None and num_tokens > _LEAST_CHUNK
        if step_bytes is None and order.group is not None:
            # The other ranks may be in the middle of the step, where nothing that this one says reaches them: it ends, which does.
            raise ConfigurationError(
                f"A step of {num_tokens} prompt tokens does not fit into the memory of {device} beside the weights: set prefill_chunk_tokens to "
                f"{max(1, num_tokens // 2)} or less, or lower max_model_len.",
                param="prefill_chunk_tokens",
            )
        spare = _FAILED if step_bytes is None else _free_for_caches(device, room) // 4 - step_bytes
        spare = order.agreed(spare)
        if step_bytes is not None and spare != _FAILED and not (can_shrink and spare < 0):
            if asked is None and chunk < _CHUNK:
                logger.warning("prefill_chunk_tokens is %d: longer steps would leave too little of the memory of %s to the caches", chunk, device)
            return chunk, step_bytes
        if not can_shrink:
            remedy = "free its memory, use a smaller or quantized model" if asked is None else f"set prefill_chunk_tokens to {num_tokens // 2} or less"
            raise ConfigurationError(
                f"A step of {num_tokens} prompt tokens does not fit into the memory of {device} beside the weights: {remedy}, or lower max_model_len.",
                param="prefill_chunk_tokens",
            )
        chunk = max(_LEAST_CHUNK, num_tokens // 2)


def _measure_step(model: Model, shape: CacheShape, device: torch.device, num_tokens: int) -> int | None:
    """Compute one prompt of `num_tokens` tokens, which compiles the kernels too.

    Returns:
        Bytes that it takes beside weights and caches at most, 0 in Triton's interpreter; None where they are not there.
    """
    from pocketllm.torch_engine.gpu_runner import GpuRunner

    plan = CachePlan(-(-num_tokens // BLOCK_SIZE), 1, num_tokens, 0, 1, 0)
    row = Row(EngineRequest("warm-up", (0,) * num_tokens, 1))
    row.slot, row.block_table = 0, list(range(plan.num_blocks))
    masks = Masks(model.vocab_size)
    try:
        runner = GpuRunner(model, shape.build(plan, device), BLOCK_SIZE, 1, plan.num_blocks)
        before = 0
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
        runner.launch([ScheduledRow(row, num_tokens, True)], masks, ()).result()
        return torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    except torch.OutOfMemoryError:
        return None
    finally:
        masks.close()


def _measure_graphs(order: Order, model: Model, shape: CacheShape, device: torch.device, shapes: Sequence[StepShape]) -> int:
    """Bytes that the graphs of `shapes` take: those of the largest, whose memory they share."""
    largest = max(shape.num_tokens for shape in shapes)
    num_tokens = min(largest, order.context_length)
    step_bytes = _measure_step(model, shape, device, num_tokens) or 0  # a longer step was there before
    return step_bytes * largest // num_tokens


def _compile_other_steps(runner: GpuRunner, plan: CachePlan, captures: bool) -> None:
    """Steps whose kernels a long prompt and captured steps have not compiled: short prompts, alone and beside a row that decodes, few and several;
    answers, where steps are not captured; and every way of drawing.

    They leave nothing behind that a row could read: no block is known as a prefix, and a row's state is set when it starts.
    """
    masks = Masks(runner.vocab_size)
    several = min(plan.max_rows, _SEVERAL)
    answers = [] if captures else [(1,) * rows for rows in (1, 2, 5, 9, 17, 33, 64) if rows <= plan.max_rows]
    for lengths in ((2,), (17,), (40,), (100,), (1, 50), (1, 17, 33), (2,) * several, (17,) * several, *answers):
        if len(lengths) > plan.max_rows or sum(lengths) > plan.context_length or 8 * len(lengths) > plan.num_blocks:
            continue
        step = []
        for slot, num_tokens in enumerate(lengths):
            row = Row(EngineRequest("warm-up", (0,) * num_tokens, 1))
            row.slot, row.block_table = slot, list(range(8 * slot, 8 * slot + 7))
            step.append(ScheduledRow(row, num_tokens, True))
        runner.launch(step, masks, ()).result()
        for scheduled in step:
            runner.release(scheduled.row)
    masks.close()
    runner.compile_sampler()


def _free_for_caches(device: torch.device, step_bytes: int) -> int:
    """Bytes that are free beside what a step takes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
    return max(0, _memory(device)[0] - step_bytes)
