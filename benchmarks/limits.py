"""What the machine allows: how fast memory is read and how fast matrices multiply, and what one token costs of each."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

from gguf import GGUFReader

_REPEATS = 7


def measure_limits(threads: int) -> dict[str, float]:
    """Best of several tries: `read_bytes_per_s` of 1 GiB summed, `bf16_flops_per_s` of a 512x4096x4096 product.

    A process of its own measures them, so that its memory does not count as the engine's.
    """
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (threads,))


def token_costs(gguf_path: Path) -> dict[str, float]:
    """What one token needs of the weights in `gguf_path`, as the file stores them.

    `file_bytes_per_token` is what a decode step at batch 1 must read: every tensor, but of the embedding one row only unless it is
    also the output head. `prefill_flops_per_token` is two operations a weight of the layers' matrices; the head runs once a prompt.
    Attention's own cost, which grows with the context, is left out of both.
    """
    tensors = GGUFReader(gguf_path).tensors
    untied = any(tensor.name == "output.weight" for tensor in tensors)
    read = sum(int(tensor.n_bytes) for tensor in tensors if not (untied and tensor.name == "token_embd.weight"))
    weights = sum(int(tensor.n_elements) for tensor in tensors if tensor.name.startswith("blk.") and len(tensor.shape) == 2)
    return {"file_bytes_per_token": float(read), "prefill_flops_per_token": 2.0 * weights}


def _measure(threads: int) -> dict[str, float]:
    import torch

    torch.set_num_threads(threads)
    data = torch.ones(2**28, dtype=torch.float32)  # 1 GiB
    read = data.nbytes / _best_seconds(data.sum)
    left = torch.randn(512, 4096).to(torch.bfloat16)
    right = torch.randn(4096, 4096).to(torch.bfloat16)
    multiply = 2 * 512 * 4096 * 4096 / _best_seconds(lambda: left @ right)
    return {"read_bytes_per_s": read, "bf16_flops_per_s": multiply}


def _best_seconds(work: Callable[[], object]) -> float:
    work()
    best = float("inf")
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - start)
    return best
