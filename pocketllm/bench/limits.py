"""What the machine allows: how fast memory is read and copied and how fast matrices multiply; and what one token costs of each."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import PocketLLMError

_REPEATS = 5
_CPU_SIZES = (2**30, 512, 4096)  # bytes of memory, rows of the product, its other two sides
_GPU_SIZES = (2**32, 8192, 8192)


def measure_limits(device: str = "cpu", threads: int | None = None) -> dict[str, float]:
    """Best of several tries, on this machine and now.

    `read_bytes_per_s`: a sum over 1 GiB (on a GPU 4 GiB). `copy_bytes_per_s`: a copy of half of it to the other half, bytes read and written both
    counted. `bf16_flops_per_s` and `f32_flops_per_s`: a product of 512x4096 and 4096x4096 (on a GPU 8192 on each side). A process of its own measures
    them, so that its memory does not count as the engine's.

    Args:
        device: "cpu", or what torch calls a GPU.
        threads: that torch uses on a CPU; None is its own choice.
    """
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, device, threads, _CPU_SIZES if device == "cpu" else _GPU_SIZES).result()
        except BrokenProcessPool:
            raise PocketLLMError("The process that measures this machine's limits was ended, mostly for want of memory: free some and try again.") from None


def best_of(limits: list[dict[str, float]]) -> dict[str, float]:
    """Of several measurements the largest of each rate."""
    return {key: max(one[key] for one in limits) for key in limits[0]}


def token_costs(checkpoint: Checkpoint) -> dict[str, float]:
    """What one token needs of the weights, as the files store them.

    `bytes_per_token` is what a decode step at batch 1 must read: every tensor, but not the embedding table unless it is the output head too, and of a
    mixture's experts those of one token. `prefill_flops_per_token` is two operations a weight of the layers' matrices that a token goes through; the
    head runs once a prompt. Attention's own cost, which grows with the context, is left out of both.
    """
    config = checkpoint.config
    experts = config.get("num_experts") or config.get("n_routed_experts")
    share = float(config.get("num_experts_per_tok") or 1) / float(experts) if experts else 1.0
    untied = any(tensor.name in ("output.weight", "lm_head.weight", "head.weight") for tensor in checkpoint.tensors)
    read = weights = 0.0
    for tensor in checkpoint.tensors:
        if "tid2eid" in tensor.name or tensor.name.startswith("mtp."):  # of a table one row, and of further tokens nothing
            continue
        used = share if _is_expert(tensor.name) else 1.0
        if not (untied and ("token_embd" in tensor.name or "embed_tokens" in tensor.name or tensor.name == "embed.weight")):
            read += tensor.num_bytes * used
        is_matrix = len(tensor.shape) == 2 or (len(tensor.shape) == 3 and _is_expert(tensor.name))
        if is_matrix and (tensor.name.startswith("blk.") or "layers." in tensor.name) and not tensor.name.endswith(("_scale_inv", ".scale")):
            count = 2 if tensor.type == "I8" else 1  # FP4: two values a byte
            for size in tensor.shape:
                count *= size
            weights += count * used
    return {"bytes_per_token": read, "prefill_flops_per_token": 2.0 * weights}


def prefill_ceiling(limits: Mapping[str, float], costs: Mapping[str, float]) -> float:
    """Most prompt tokens a second: by the rate of the products."""
    return max(limits["bf16_flops_per_s"], limits["f32_flops_per_s"]) / costs["prefill_flops_per_token"]


def decode_ceiling(limits: Mapping[str, float], costs: Mapping[str, float], rows: int = 1, kv_bytes_per_row: float = 0.0) -> float:
    """Most tokens a second of `rows` rows that decode together: a step reads the weights once and each row's keys and values, and multiplies for each row."""
    by_reading = limits["read_bytes_per_s"] / (costs["bytes_per_token"] + rows * kv_bytes_per_row)
    return min(rows * by_reading, prefill_ceiling(limits, costs))


def _is_expert(name: str) -> bool:
    return ".experts." in name or "_exps" in name


def _measure(device: str, threads: int | None, sizes: tuple[int, int, int]) -> dict[str, float]:
    import torch

    if threads is not None:
        torch.set_num_threads(threads)
    is_cpu = torch.device(device).type == "cpu"
    size, rows, side = sizes
    synchronize: Callable[[], object] = (lambda: None) if is_cpu else (lambda: torch.cuda.synchronize(device))
    data = torch.ones(size // 4, dtype=torch.float32, device=device)
    read = size / _seconds(data.sum, synchronize)
    half = data.numel() // 2
    copy = size / _seconds(lambda: data[:half].copy_(data[half:]), synchronize)
    flops = {}
    for name, dtype in (("bf16", torch.bfloat16), ("f32", torch.float32)):
        left, right = torch.randn(rows, side, device=device).to(dtype), torch.randn(side, side, device=device).to(dtype)
        flops[f"{name}_flops_per_s"] = 2.0 * rows * side * side / _seconds(lambda left=left, right=right: left @ right, synchronize)  # type: ignore[misc]
    return {"read_bytes_per_s": read, "copy_bytes_per_s": copy, **flops}


def _seconds(work: Callable[[], Any], synchronize: Callable[[], object]) -> float:
    """The shortest of several calls, after one that warms up."""
    samples = []
    for _ in range(_REPEATS + 1):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        samples.append(time.perf_counter() - start)
    return min(samples[1:])
