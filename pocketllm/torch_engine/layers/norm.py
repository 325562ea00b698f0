"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """y = x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich, 2019), in float32, given out in `dtype`.

    PyTorch has no fused CPU kernel for it, but has one for layer normalisation; over the row (x, -x), whose mean is zero and
    whose variance is mean(x^2), that is the same thing in one pass.

    Args:
        weight: [hidden_size] float32.
        eps: added to the mean square.
        dtype: of the result.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self.size = weight.shape[0]
        self.weight = torch.cat([weight, weight])
        self.eps = eps
        self.dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] float32 -> the same shape in `dtype`."""
        mirrored = torch.cat([x, -x], dim=-1)
        return F.layer_norm(mirrored, (2 * self.size,), self.weight, None, self.eps)[:, : self.size].to(self.dtype)


class HeadNorm:
    """RMSNorm of each head by itself, query heads with one weight and key heads with another.

    Args:
        query, key: weights [head_dim] float32.
        num_heads, num_kv_heads: heads of either kind.
        eps: added to the mean square.
    """

    def __init__(self, query: torch.Tensor, key: torch.Tensor, num_heads: int, num_kv_heads: int, eps: float) -> None:
        self.size = query.shape[0]
        self.weight = torch.cat([query.expand(num_heads, -1), key.expand(num_kv_heads, -1)])  # [num_heads + num_kv_heads, head_dim]
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, num_heads + num_kv_heads, head_dim], query heads first -> the same shape, float32."""
        x = x.float()
        mirrored = torch.cat([x, -x], dim=-1)
        return F.layer_norm(mirrored, (2 * self.size,), None, None, self.eps)[..., : self.size] * self.weight
