"""Where the routed experts of a mixture lie, decided before the model is loaded."""

from __future__ import annotations

import logging
import math

import torch

from pocketllm.checkpoint import Checkpoint, TensorInfo
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.models.deepseek_v4_names import predictor_names
from pocketllm.torch_engine.models.registry import COMPRESSED

logger = logging.getLogger(__name__)

_SHARE = 0.5  # of the free memory, for experts that nobody set a size for
_FLOAT_TYPES = frozenset({"F32", "F16", "BF16"})  # of stored tensors that are brought to the compute dtype


def expert_cache(args: EngineArgs, checkpoint: Checkpoint, dtype: torch.dtype, free: int, total: int, *, on_gpu: bool) -> ExpertCache | None:
    """The cache of routed experts that stay in their file; None where all of them are loaded.

    routed_experts_device says which; auto loads them where they take at most half of what is free.

    Args:
        dtype: in which experts are kept once they are built, on the CPU.
        free, total: bytes of the device's memory.
        on_gpu: the model runs on a GPU.

    Raises:
        ConfigurationError: experts on a GPU are asked for, and the model runs on the CPU; or a cache larger than the memory.
    """
    if checkpoint.architecture not in COMPRESSED:
        return None
    where, budget = args.routed_experts_device, args.routed_experts_bytes
    if where == "gpu" and not on_gpu:
        raise ConfigurationError(
            '"routed_experts_device" = "gpu" needs a model on a GPU, and this one runs on the CPU: send "cpu", or leave it out.', param="routed_experts_device"
        )
    size = sum(built_bytes(tensor, dtype, on_gpu=on_gpu) for tensor in loaded_tensors(checkpoint) if is_routed(tensor))
    fits = size <= free * _SHARE
    if where == "gpu" or (where == "auto" and fits and budget is None):
        return None
    if budget is not None and budget > total:
        raise ConfigurationError(
            f'"routed_experts_memory" = {args.routed_experts_memory!r} is more than the {total / 2**20:.0f} MiB of memory that there are: lower it.',
            param="routed_experts_memory",
        )
    cache = ExpertCache(min(size, int(free * _SHARE) if budget is None else budget))
    config = COMPRESSED[checkpoint.architecture](checkpoint)
    if cache.budget < (needed := size * config.num_experts_per_tok // config.n_routed_experts):
        logger.warning(
            "the routed experts of one token take %.2f GiB, and their cache has %.2f: every step reads them from the file; raise routed_experts_memory",
            needed / 2**30,
            cache.budget / 2**30,
        )
    logger.info("routed experts stay in %s: %.1f GiB of them at most are kept in memory", checkpoint.path, cache.budget / 2**30)
    return cache


def loaded_tensors(checkpoint: Checkpoint) -> list[TensorInfo]:
    """The stored tensors without those of DeepSeek-V4's layers that predict further tokens, which its model skips."""
    skipped = predictor_names(checkpoint) if checkpoint.architecture in COMPRESSED else frozenset()
    return [tensor for tensor in checkpoint.tensors if tensor.name not in skipped]


def is_routed(tensor: TensorInfo) -> bool:
    """Whether it belongs to routed experts."""
    return ".ffn.experts." in tensor.name or tensor.name.endswith("_exps.weight")


def built_bytes(tensor: TensorInfo, dtype: torch.dtype, *, on_gpu: bool) -> int:
    """Bytes that a stored tensor takes once it is loaded: a GPU keeps quantized weights as they are, a CPU brings those of experts to `dtype`."""
    count = math.prod(tensor.shape)
    if on_gpu:
        return count * dtype.itemsize if tensor.type in _FLOAT_TYPES else tensor.num_bytes
    if tensor.type == "F8_E8M0":
        return 0
    return (2 * count if tensor.type == "I8" else count) * dtype.itemsize
