"""Manifold-constrained hyper-connections (Xie et al., 2026): a residual stream of several lanes, mixed by matrices whose rows and columns sum to 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pocketllm.torch_engine.layers.compressor import normalize
from pocketllm.torch_engine.layers.device import Norm


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """How the lanes' own values decide their mixing.

    Args:
        matrix: [count, num_lanes * hidden_size] float32.
        base: [count] float32.
        scale: of each kind of coefficient, float32.
        norm_eps: of the lanes' norm.
        eps: keeps coefficients and sums above 0.
    """

    matrix: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm_eps: float
    eps: float

    @property
    def num_bytes(self) -> int:
        return self.matrix.nbytes + self.base.nbytes + self.scale.nbytes

    def coefficients(self, lanes: torch.Tensor) -> torch.Tensor:
        """lanes: [num_tokens, num_lanes, hidden_size] float32 -> [num_tokens, count]."""
        return F.linear(normalize(lanes.flatten(1), self.norm_eps), self.matrix)


class Lanes:
    """The residual stream of one step.

    Args:
        values: [num_tokens, num_lanes, hidden_size] float32, each lane's values adjacent.

    Attributes:
        values: without what the last block gave, until the next site, or the head, takes it in.
        mixing: what the last site found for its block: the lanes' shares of its result [num_tokens, num_lanes], and how they mix
            [num_tokens, num_lanes, num_lanes], float32; lane k takes mixing[j, k] of lane j.
        given: the last block's result [num_tokens, hidden_size], float32, until it is taken in.
    """

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.mixing: tuple[torch.Tensor, torch.Tensor] | None = None
        self.given: torch.Tensor | None = None

    @classmethod
    def of(cls, embedded: torch.Tensor, num_lanes: int) -> Lanes:
        """All lanes alike, embedded [num_tokens, hidden_size] float32."""
        return cls(embedded.unsqueeze(1).expand(-1, num_lanes, -1))

    def add(self, output: torch.Tensor) -> None:
        """The block's result [num_tokens, hidden_size]."""
        self.given = output.float()

    def settle(self) -> torch.Tensor:
        """The values, after what the last block gave."""
        if self.given is not None:
            assert self.mixing is not None
            shares, mixing = self.mixing
            self.values = torch.baddbmm(shares.unsqueeze(-1) * self.given.unsqueeze(1), mixing.transpose(1, 2), self.values)
            self.given = None
        return self.values


class HyperConnection:
    """One site: lanes are gathered into a block's input, and the block's result is spread over the mixed lanes.

    Args:
        weights: of 2 * n + n * n coefficients for n lanes: gather, spread, mix. Three scales.
        norm: of the block's input.
        dtype: of the block's input.
        num_iterations: of rows and columns brought to sum 1 in turn (Sinkhorn and Knopp, 1967).
    """

    def __init__(self, weights: HyperWeights, norm: Norm, dtype: torch.dtype, num_lanes: int, num_iterations: int) -> None:
        self._weights, self._norm, self._dtype, self._num_lanes, self._num_iterations = weights, norm, dtype, num_lanes, num_iterations
        sizes = [num_lanes, num_lanes, num_lanes * num_lanes]
        self._scale = torch.cat([weights.scale[place].expand(size) for place, size in enumerate(sizes)])
        self._sizes = sizes
        self.num_bytes = weights.num_bytes

    def gather(self, lanes: Lanes) -> torch.Tensor:
        """The block's input [num_tokens, hidden_size]; `lanes` then knows how its result is spread."""
        values, weights, eps = lanes.settle(), self._weights, self._weights.eps
        gather, spread, mix = (weights.coefficients(values) * self._scale + weights.base).split(self._sizes, dim=-1)
        mixing = mix.unflatten(-1, (self._num_lanes, self._num_lanes)).softmax(-1) + eps
        mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        for _ in range(self._num_iterations - 1):
            mixing = mixing / (mixing.sum(-1, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        lanes.mixing = 2 * spread.sigmoid(), mixing
        return (normalize(_collapse(gather.sigmoid() + eps, values), self._norm.eps) * self._norm.weight).to(self._dtype)


class HyperHead:
    """The lanes gathered into one at the end. weights: of num_lanes coefficients, one scale."""

    def __init__(self, weights: HyperWeights) -> None:
        self._weights = weights
        self.num_bytes = weights.num_bytes

    def __call__(self, lanes: Lanes) -> torch.Tensor:
        """[num_tokens, hidden_size] float32."""
        weights, values = self._weights, lanes.settle()
        return _collapse((weights.coefficients(values) * weights.scale + weights.base).sigmoid() + weights.eps, values)


def _collapse(shares: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
    return (shares.unsqueeze(1) @ lanes).squeeze(1)
