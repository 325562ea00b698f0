"""What a GPU allows: how fast its memory is read and copied, how fast matrices multiply."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch
from product_rate import Product

_READ_BYTES = 4 * 2**30
_SMALL = 64  # sizes are divided by it on a CPU, where only the program is tried
_REPEATS = 20
_RESTED = 9  # products, each after a rest
_SUSTAINED = 0.25  # seconds


def measure_cuda_limits(device: str, rest: float) -> dict[str, float]:
    """Medians of several tries, on random numbers: `read_bytes_per_s` of 4 GiB summed, `copy_bytes_per_s` of 4 GiB copied, bytes read and written both
    counted, and the rate of a product of two 8192 x 8192 matrices in bf16: `bf16_flops_per_s` of one at a time, each after `rest_s` seconds of nothing, and
    `bf16_sustained_flops_per_s` of as many one after another as take `bf16_sustained_s`, longer than a prefill of 8,192 tokens, which power and heat slow down.

    The read is a plain Triton kernel, replayed as a CUDA graph; `read_block` says which block size was the fastest.
    """
    is_gpu = device != "cpu"
    share = 1 if is_gpu else _SMALL
    data = torch.randint(-(2**16), 2**16, (_READ_BYTES // 4 // share,), dtype=torch.int32, device=device)
    blocks = (4096, 8192, 16384) if is_gpu else (0,)
    seconds = {block: _median_seconds(_reader(data, block), device) for block in blocks}
    block = min(seconds, key=lambda one: seconds[one])
    target = torch.empty_like(data)
    copy = _median_seconds(lambda: target.copy_(data), device)
    product = Product(device)
    rested = []
    for _ in range(_RESTED):
        time.sleep(rest)
        rested.append(product.rate())
    count = product.count(1.2 * _SUSTAINED) if is_gpu else 1
    product.rate(count)  # the card is warm
    sustained = product.rate(count)
    return {
        "read_bytes_per_s": data.nbytes / seconds[block],
        "read_block": float(block),
        "copy_bytes_per_s": 2 * data.nbytes / copy,
        "bf16_flops_per_s": statistics.median(rested),
        "rest_s": rest,
        "bf16_sustained_flops_per_s": sustained,
        "bf16_sustained_s": product.flops * count / sustained,
    }


def ceilings(limits: Mapping[str, float], costs: Mapping[str, float]) -> dict[str, float]:
    """Most tokens a second of `prefill`, and steps a second of `decode`."""
    return {
        "prefill": limits["bf16_flops_per_s"] / costs["prefill_flops_per_token"],
        "decode": limits["read_bytes_per_s"] / costs["bytes_per_token"],
    }


def _reader(data: torch.Tensor, block: int) -> Callable[[], object]:
    if block == 0:
        return data.sum
    from cuda_read import sum_blocks

    sums = torch.empty(data.numel() // block, dtype=torch.int32, device=data.device)
    return lambda: sum_blocks(data, sums, block)


def _median_seconds(work: Callable[[], object], device: str) -> float:
    for _ in range(3):
        work()
    if device == "cpu":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    samples: list[float] = []
    for _ in range(_REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        graph.replay()
        after.record()
        torch.cuda.synchronize()
        samples.append(before.elapsed_time(after) / 1e3)
    return statistics.median(samples)
