"""Manifold-constrained hyper-connections (Xie et al., 2026): a residual stream of several lanes, mixed by matrices whose rows and columns sum to 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pocketllm.torch_engine.layers.compressor import normalize


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


class HyperConnection:
    """One site: lanes are gathered into a block's input, and the block's result is spread over the mixed lanes.

    Args:
        weights: of 2 * n + n * n coefficients for n lanes: gather, spread, mix. Three scales.
        num_iterations: of rows and columns brought to sum 1 in turn (Sinkhorn and Knopp, 1967).
    """

    def __init__(self, weights: HyperWeights, num_lanes: int, num_iterations: int) -> None:
        self._weights, self._num_lanes, self._num_iterations = weights, num_lanes, num_iterations
        sizes = [num_lanes, num_lanes, num_lanes * num_lanes]
        self._scale = torch.cat([weights.scale[place].expand(size) for place, size in enumerate(sizes)])
        self._sizes = sizes
        self.num_bytes = weights.num_bytes

    def gather(self, lanes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """lanes: [num_tokens, num_lanes, hidden_size] float32.

        Returns:
            The block's input [num_tokens, hidden_size], and for `spread` its shares [num_tokens, num_lanes] and the mixing [num_tokens, num_lanes, num_lanes].
        """
        weights, eps = self._weights, self._weights.eps
        gather, spread, mix = (weights.coefficients(lanes) * self._scale + weights.base).split(self._sizes, dim=-1)
        mixing = mix.unflatten(-1, (self._num_lanes, self._num_lanes)).softmax(-1) + eps
        mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        for _ in range(self._num_iterations - 1):
            mixing = mixing / (mixing.sum(-1, keepdim=True) + eps)
            mixing = mixing / (mixing.sum(-2, keepdim=True) + eps)
        return _collapse(gather.sigmoid() + eps, lanes), 2 * spread.sigmoid(), mixing

    def spread(self, lanes: torch.Tensor, output: torch.Tensor, shares: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
        """The lanes after a block that gave `output` [num_tokens, hidden_size]; lane k takes mixing[j, k] of lane j."""
        return torch.baddbmm(shares.unsqueeze(-1) * output.float().unsqueeze(1), mixing.transpose(1, 2), lanes)


class HyperHead:
    """The lanes gathered into one at the end. weights: of num_lanes coefficients, one scale."""

    def __init__(self, weights: HyperWeights) -> None:
        self._weights = weights
        self.num_bytes = weights.num_bytes

    def __call__(self, lanes: torch.Tensor) -> torch.Tensor:
        """[num_tokens, num_lanes, hidden_size] -> [num_tokens, hidden_size], float32."""
        weights = self._weights
        return _collapse((weights.coefficients(lanes) * weights.scale + weights.base).sigmoid() + weights.eps, lanes)


def _collapse(shares: torch.Tensor, lanes: torch.Tensor) -> torch.Tensor:
    return (shares.unsqueeze(1) @ lanes).squeeze(1)
