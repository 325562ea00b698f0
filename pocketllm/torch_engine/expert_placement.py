"""Where the routed experts of a mixture lie, decided before the model is loaded."""

from __future__ import annotations

import logging
import math

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.models.registry import COMPRESSED

logger = logging.getLogger(__name__)

_SHARE = 0.5  # of the free memory, for experts that nobody set a size for
_BITS = {"FP4": 4, "MXFP4": 4, "F8_E4M3": 8}


def expert_cache(args: EngineArgs, checkpoint: Checkpoint, dtype: torch.dtype, free: int, *, on_gpu: bool) -> ExpertCache | None:
    """The cache of routed experts that stay in their file; None where all of them are loaded.

    routed_experts_device says which; auto loads them where they take at most half of what is free.

    Args:
        dtype: in which experts are kept once they are built, on the CPU.
        free: bytes of the device's memory.
        on_gpu: the model runs on a GPU.

    Raises:
        ConfigurationError: experts on a GPU are asked for, and the model runs on the CPU.
    """
    if checkpoint.architecture not in COMPRESSED:
        return None
    where, budget = args.routed_experts_device, args.routed_experts_bytes
    if where == "gpu" and not on_gpu:
        raise ConfigurationError(
            '"routed_experts_device" = "gpu" needs a model on a GPU, and this one runs on the CPU: send "cpu", or leave it out.', param="routed_experts_device"
        )
    size = sum(_built_bytes(tensor.type, math.prod(tensor.shape), dtype, on_gpu=on_gpu) for tensor in checkpoint.tensors if _is_routed(tensor.name))
    fits = size <= free * _SHARE
    if where == "gpu" or (where == "auto" and fits and budget is None):
        return None
    cache = ExpertCache(min(size, int(free * _SHARE)) if budget is None else budget)
    logger.info("routed experts stay in %s: %.1f GiB of them at most are kept in memory", checkpoint.path, cache.budget / 2**30)
    return cache


def _is_routed(name: str) -> bool:
    return ".ffn.experts." in name or name.endswith("_exps.weight")


def _built_bytes(kind: str, count: int, dtype: torch.dtype, *, on_gpu: bool) -> int:
    """Bytes of a stored tensor of `count` elements once its expert is built: a GPU keeps quantized weights as they are."""
    values = count * 2 if kind in ("I8", "F4") else count
    if on_gpu and kind in ("I8", "F4"):
        return count
    if on_gpu and kind in _BITS:
        return count * _BITS[kind] // 8
    return 0 if kind == "F8_E8M0" else values * dtype.itemsize
