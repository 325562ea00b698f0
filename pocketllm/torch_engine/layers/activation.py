"""Gated activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (SwiGLU; Shazeer, 2020) of x = [gate | up]: [num_tokens, 2 * size] -> [num_tokens, size] in x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
