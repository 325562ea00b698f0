"""Hyper-connections on a GPU: two kernels a site where tokens are few."""

from __future__ import annotations

import torch

from pocketllm.torch_engine.kernels.hyper import LaneScores, gather_and_mix, gather_lanes, spread_and_score
from pocketllm.torch_engine.layers.device import Norm
from pocketllm.torch_engine.layers.hyper_connection import HyperConnection, HyperHead, HyperWeights, Lanes

_MOST_TOKENS = 64  # more of them make the scores a product for cuBLAS


class GpuHyperConnection(HyperConnection):
    """See HyperConnection."""

    def __init__(self, weights: HyperWeights, norm: Norm, dtype: torch.dtype, num_lanes: int, num_iterations: int) -> None:
        super().__init__(weights, norm, dtype, num_lanes, num_iterations)
        self._suits = _is_power_of_two(num_lanes)

    def gather(self, lanes: Lanes) -> torch.Tensor:
        if not self._suits or lanes.values.shape[0] > _MOST_TOKENS:
            return super().gather(lanes)
        weights, norm = self._weights, self._norm
        scores = _take_in(lanes, weights)
        x, *mixing = gather_and_mix(
            lanes.values, scores, self._scale, weights.base, weights.norm_eps, weights.eps, (norm.weight, norm.eps, self._dtype), self._num_iterations
        )
        lanes.mixing = mixing[0], mixing[1]
        return x


class GpuHyperHead(HyperHead):
    """See HyperHead."""

    def __init__(self, weights: HyperWeights) -> None:
        super().__init__(weights)
        self._scale = weights.scale.expand(weights.base.shape[0]).contiguous()
        self._suits = _is_power_of_two(weights.base.shape[0])

    def __call__(self, lanes: Lanes) -> torch.Tensor:
        if not self._suits or lanes.values.shape[0] > _MOST_TOKENS:
            return super().__call__(lanes)
        weights = self._weights
        scores = _take_in(lanes, weights)
        return gather_lanes(lanes.values, scores, self._scale, weights.base, weights.norm_eps, weights.eps, None)


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def _take_in(lanes: Lanes, weights: HyperWeights) -> LaneScores:
    """What the last block gave, into the lanes; and their scores."""
    given = None
    if lanes.given is not None:
        assert lanes.mixing is not None
        given = lanes.given.contiguous(), *lanes.mixing
    lanes.values, scores = spread_and_score(lanes.values, weights.matrix, given)
    lanes.given = None
    return scores
