"""Rotary position embedding."""

from __future__ import annotations

import torch


class RotaryEmbedding:
    """Rotates the pairs (x[i], x[i + head_dim / 2]) of a head by position * theta^(-2i / head_dim) (Su et al., 2021).

    Args:
        head_dim: even.
        theta: base of the frequencies.
        max_positions: positions are below this.
    """

    def __init__(self, head_dim: int, theta: float, max_positions: int) -> None:
        inverse = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
        angles = torch.outer(torch.arange(max_positions).float(), inverse)  # [max_positions, head_dim / 2]
        self._cos = angles.cos()
        self._sin = angles.sin()

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of a step's positions [num_tokens], each [num_tokens, 1, head_dim / 2] float32."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, num_heads, head_dim] -> the same shape, rotated, float32."""
    half = x.shape[-1] // 2
    x = x.float()
    first, second = x[..., :half], x[..., half:]
    rotated = torch.empty_like(x)
    torch.mul(first, cos, out=rotated[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated[..., half:]).addcmul_(first, sin)
    return rotated
