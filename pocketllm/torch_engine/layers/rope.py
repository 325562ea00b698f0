"""Rotary position embedding, with the ways of stretching it that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

ROPE_TYPES = ("linear", "dynamic", "llama3", "yarn", "frequency_factors")


class RotaryEmbedding:
    """Rotates the pairs (x[i], x[i + rotary_dim / 2]) of a head by position * theta^(-2i / rotary_dim) (Su et al., 2021).

    Args:
        rotary_dim: leading values of a head that are rotated; even.
        theta: base of the frequencies.
        max_positions: positions are below this.
        scaling: None, or config.json's `rope_scaling`, a mapping with "rope_type", one of ROPE_TYPES, and that type's numbers.
        factors: [rotary_dim / 2] float32, divisors of the frequencies, for the type "frequency_factors".
        device: where the tables lie; they are computed on the CPU, to the same numbers for every device.

    Attributes:
        cos, sin: [max_positions, rotary_dim / 2] float32.
    """

    def __init__(
        self,
        rotary_dim: int,
        theta: float,
        max_positions: int,
        scaling: Mapping[str, Any] | None = None,
        factors: torch.Tensor | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        inverse = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).float() / rotary_dim)
        magnitude = 1.0
        kind = None if scaling is None else scaling["rope_type"]
        if scaling is not None and kind == "linear":
            inverse /= scaling["factor"]
        elif scaling is not None and kind == "llama3":
            inverse = _llama3(inverse, scaling)
        elif scaling is not None and kind == "yarn":
            inverse, magnitude = _yarn(inverse, rotary_dim, theta, scaling)
        elif kind == "frequency_factors":
            assert factors is not None
            inverse = inverse / factors
        else:
            # "dynamic" stretches only past max_position_embeddings, and no row gets that far.
            assert kind in (None, "dynamic"), kind
        angles = torch.outer(torch.arange(max_positions).float(), inverse)  # [max_positions, rotary_dim / 2]
        self.cos = angles.cos().mul_(magnitude).to(device)
        self.sin = angles.sin().mul_(magnitude).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a step's positions [num_tokens], each [num_tokens, 1, rotary_dim / 2] float32."""
        return self.cos[positions].unsqueeze(1), self.sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, num_heads, head_dim] -> the same shape, its first 2 * cos.shape[-1] values rotated, float32."""
    half = cos.shape[-1]
    x = x.float()
    first, second = x[..., :half], x[..., half : 2 * half]
    rotated = torch.empty_like(x)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half : 2 * half]).addcmul_(first, sin)
    if 2 * half < x.shape[-1]:
        rotated[..., 2 * half :] = x[..., 2 * half :]
    return rotated


def _llama3(inverse: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Llama 3.1: slow frequencies are divided by the factor, fast ones stay, those between are blended by their turns in the old context."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * inverse / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    blended: torch.Tensor = inverse * kept + inverse / factor * (1 - kept)
    return blended


def _yarn(inverse: torch.Tensor, rotary_dim: int, theta: float, scaling: Mapping[str, Any]) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al., 2023): frequencies, and the factor of cosines and sines."""
    factor, original = scaling["factor"], scaling["original_max_position_embeddings"]

    def place(turns: float) -> float:
        """Pair, counted as a fraction, that turns this often in the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = place(scaling.get("beta_fast") or 32), place(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotary_dim - 1)
    stretched = ((torch.arange(rotary_dim // 2).float() - first) / (last - first or 0.001)).clamp(0, 1)
    magnitude = scaling.get("attention_factor")
    if magnitude is None:
        above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
        magnitude = _yarn_magnitude(factor, above) / _yarn_magnitude(factor, below) if above and below else _yarn_magnitude(factor, 1.0)
    return inverse / factor * stretched + inverse * (1 - stretched), float(magnitude)


def _yarn_magnitude(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
