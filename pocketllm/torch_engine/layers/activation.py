"""Gated activations."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (SwiGLU; Shazeer, 2020) of x = [gate | up]: [num_tokens, 2 * size] -> [num_tokens, size] in x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_and_mul(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up, with the tanh form of GELU, of x = [gate | up]: [num_tokens, 2 * size] -> [num_tokens, size] in x's dtype."""
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


# config.json's name -> the gated form
GATED_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"silu": silu_and_mul, "gelu_pytorch_tanh": gelu_tanh_and_mul}
