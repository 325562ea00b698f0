"""DeepSeek-V4's experts on a GPU where they are stored in FP4: chosen and computed without the host."""

from __future__ import annotations

import torch

from pocketllm.torch_engine.kernels.fp4_experts import Fp4Experts, fp4_experts
from pocketllm.torch_engine.kernels.fp4_rows import fp4_down_rows, fp4_gate_up_rows
from pocketllm.torch_engine.kernels.fp8 import Fp8Weight
from pocketllm.torch_engine.kernels.grouped_linear import clamped_gated_row
from pocketllm.torch_engine.kernels.linear import DenseWeight, linear
from pocketllm.torch_engine.kernels.route import clamped_gate, route_by_softplus
from pocketllm.torch_engine.layers.gpu_linear import GpuLinear
from pocketllm.torch_engine.layers.routed_experts import RoutedExperts, Router

_FEW_TOKENS = 64  # more of them make the router's product one for cuBLAS
_APART = 4  # tokens whose experts are read for each by itself: hardly two of them have an expert in common


class GpuClampedGate:
    """See feed_forward.TokenWise: the expert that every token has."""

    def __init__(self, gate_up: GpuLinear, down: GpuLinear, limit: float) -> None:
        self._gate_up, self._down, self._limit = gate_up, down, limit
        self.num_bytes = gate_up.num_bytes + down.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.inner(x), x.dtype)

    def down(self, inner: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The second half, of what the first gave."""
        return self._down(inner, dtype)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        """The first half."""
        weight = self._gate_up.single
        if x.shape[0] == 1 and isinstance(weight, Fp8Weight) and weight.shape[1] % 16 == 0:
            return clamped_gated_row(x, weight, self._limit)
        return clamped_gate(self._gate_up(x), self._limit)


class GpuRoutedExperts(RoutedExperts):
    """See RoutedExperts.

    Args:
        router: chooses.
        gate_up, down: of all experts.
        shared: every token's.
        limit: of gate and up.
    """

    is_capturable = True

    def __init__(self, router: Router, gate_up: Fp4Experts, down: Fp4Experts, shared: GpuClampedGate, limit: float) -> None:
        super().__init__(router, self._mix_experts, shared, gate_up.num_bytes + down.num_bytes)
        self._gate_up, self._down, self._own, self._limit = gate_up, down, shared, limit
        self._scores = DenseWeight(router.weight)

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        count, router = x.shape[0], self._router
        if count > _FEW_TOKENS:
            return super().__call__(x, token_ids)
        # The shared expert's weights are on their way while few programs prepare x, and while one chooses: those of the others can't be before that.
        shared = self._own.inner(x)
        scores = linear(x if count == 1 else x.float(), self._scores, out_dtype=torch.float32)
        chosen, shares = route_by_softplus(scores, router.bias, router.by_token, token_ids, router.top_k, router.scale)
        output = self._own.down(shared, torch.float32)
        if count > _APART:
            return output.add_(self._mix_experts(x, chosen, shares))
        inner = fp4_gate_up_rows(x, chosen, self._gate_up.values, self._gate_up.scales, self._limit)
        return fp4_down_rows(inner, chosen, shares, self._down.values, self._down.scales, output)

    def _mix_experts(self, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        return fp4_experts(x, chosen, shares, self._gate_up, self._down, self._limit)
