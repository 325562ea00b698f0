"""How fast a GPU multiplies two large matrices of bf16, as prefill does, by the clock of the GPU."""

from __future__ import annotations

import math
import statistics
import time

import torch

SIDE = 8192
_SIDE_TRIED = 512  # on a CPU, where only the program is tried


class Product:
    """The product of two random square matrices of bf16, SIDE on a side, of sums in float32.

    Args:
        device: "cuda", or "cpu", where only the program is tried.
    """

    def __init__(self, device: str) -> None:
        side = _SIDE_TRIED if device == "cpu" else SIDE
        self.flops = 2 * side**3
        self._left, self._right = (torch.randn(side, side, dtype=torch.bfloat16, device=device) for _ in range(2))
        self._out = torch.empty_like(self._left)
        self._graph: torch.cuda.CUDAGraph | None = None
        for _ in range(3):
            self._multiply()
        if device != "cpu":
            torch.cuda.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._multiply()

    def rate(self, count: int = 1) -> float:
        """Operations a second of `count` products one after another."""
        return self.flops * count / self._seconds(count)

    def count(self, seconds: float) -> int:
        """How many products take about `seconds`, at least 1."""
        return max(1, math.ceil(seconds / statistics.median(self._seconds(1) for _ in range(5))))

    def _multiply(self) -> None:
        torch.mm(self._left, self._right, out=self._out)

    def _seconds(self, count: int) -> float:
        if self._graph is None:
            start = time.perf_counter()
            for _ in range(count):
                self._multiply()
            return time.perf_counter() - start
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(count):
            self._graph.replay()
        after.record()
        torch.cuda.synchronize()
        seconds: float = before.elapsed_time(after) / 1e3
        return seconds
