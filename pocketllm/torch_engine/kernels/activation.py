"""Gated activations on a GPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs

ACTIVATIONS = {"silu": 1, "gelu_tanh": 2}  # name -> the constexpr that kernels know it by


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """SiLU (1) or the tanh form of GELU (2) of a float32 tensor."""
    # 0.5 (1 + tanh(u)) = sigmoid(2u)
    return x * tl.sigmoid(x if ACTIVATION == 1 else 1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _gated_activation_kernel(x, out, size, x_stride, out_stride, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_inputs(PDL)
    gate = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * out_stride + columns, (activate(gate, ACTIVATION) * up).to(out.dtype.element_ty), mask=inside)


def gated_activation(x: torch.Tensor, activation: str) -> torch.Tensor:
    """activation(gate) * up of x = [gate | up], computed in float32.

    Args:
        x: [T, 2 * size] any float dtype, its rows contiguous.
        activation: "silu" or "gelu_tanh".

    Returns:
        [T, size] in x's dtype.
    """
    T, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(T, size, dtype=x.dtype, device=x.device)
    if T:
        block = min(2048, triton.next_power_of_2(size))
        _gated_activation_kernel[(T, triton.cdiv(size, block))](
            x, out, size, x.stride(0), out.stride(0), ACTIVATION=ACTIVATIONS[activation], BLOCK=block, num_warps=4, **launch_options(x.device)
        )
    return out


def gated_activation_reference(x: torch.Tensor, activation: str) -> torch.Tensor:
    """`gated_activation` in torch."""
    gate, up = x.float().chunk(2, dim=-1)
    return ((F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up).to(x.dtype)
