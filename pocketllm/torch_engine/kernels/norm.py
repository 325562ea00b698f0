"""RMS normalisation of the residual stream on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs


@triton.jit
def _rms_norm_kernel(hidden, delta, weight, out, N, hidden_stride, delta_stride, out_stride, eps, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < N
    scale = tl.load(weight + columns, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    x = tl.load(hidden + row * hidden_stride + columns, mask=inside, other=0.0)
    if ADD:
        x += tl.load(delta + row * delta_stride + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(hidden + row * hidden_stride + columns, x, mask=inside)
    y = x * tl.rsqrt(tl.sum(x * x, axis=0) / N + eps) * scale
    tl.store(out + row * out_stride + columns, y.to(out.dtype.element_ty), mask=inside)


def _launch(hidden: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    T, N = hidden.shape
    out = torch.empty(T, N, dtype=out_dtype, device=hidden.device)
    if T:
        block = triton.next_power_of_2(N)
        other = hidden if delta is None else delta
        _rms_norm_kernel[(T,)](
            hidden, other, weight, out, N, hidden.stride(0), other.stride(0), out.stride(0), eps,
            ADD=delta is not None, BLOCK=block, num_warps=min(16, max(1, block // 512)), **launch_options(hidden.device),
        )  # fmt: skip
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, row by row, in float32.

    Args:
        x: [T, N] float32, its rows contiguous.
        weight: [N] float32.
        eps: added to the mean square.
        out_dtype: of the result [T, N].
    """
    return _launch(x, None, weight, eps, out_dtype)


def add_rms_norm(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """hidden += delta, in place, and `rms_norm` of the sum.

    Args:
        hidden: [T, N] float32, its rows contiguous.
        delta: [T, N] any float dtype, its rows contiguous.
        weight: [N] float32.
        eps: added to the mean square.
        out_dtype: of the result [T, N].
    """
    return _launch(hidden, delta, weight, eps, out_dtype)


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """`rms_norm` in torch."""
    return (x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight).to(out_dtype)


def add_rms_norm_reference(hidden: torch.Tensor, delta: torch.Tensor, weight: torch.Tensor, eps: float, out_dtype: torch.dtype) -> torch.Tensor:
    """`add_rms_norm` in torch, in place as well."""
    return rms_norm_reference(hidden.add_(delta), weight, eps, out_dtype)
