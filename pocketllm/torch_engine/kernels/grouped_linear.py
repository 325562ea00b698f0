"""Products that DeepSeek-V4 has beside the usual ones: by a matrix of blocks along the diagonal, which are all that is stored; gated within a limit."""

from __future__ import annotations

import torch
import triton

from pocketllm.torch_engine.kernels.fp8 import Fp8Weight, decode_mode
from pocketllm.torch_engine.kernels.fp8_row import fp8_row_kernel
from pocketllm.torch_engine.kernels.launch import device_limits, launch_options
from pocketllm.torch_engine.kernels.linear import DenseWeight, Weight, linear
from pocketllm.torch_engine.kernels.linear_config import vector_config


def grouped_linear(x: torch.Tensor, weight: Weight, groups: int) -> torch.Tensor:
    """Each group's product.

    Args:
        x: [T, groups * K], contiguous, in a dtype that `linear` takes.
        weight: [groups * N, K]; scales are not shared by rows of two groups.
        groups: number of them.

    Returns:
        [T, groups * N] in x's dtype.
    """
    (rows, K), T = weight.shape, x.shape[0]
    N = rows // groups
    out = torch.empty(T, rows, dtype=x.dtype, device=x.device)
    if T == 1 and isinstance(weight, Fp8Weight) and K % 16 == 0 and weight.values.is_contiguous():
        _one_row(x, weight, out, N, ACTIVATION=0, GROUP_ROWS=N)
        return out
    for group in range(groups):
        linear(x[:, group * K : (group + 1) * K], _rows(weight, group * N, N), out=out[:, group * N : (group + 1) * N])
    return out


def clamped_gated_row(x: torch.Tensor, gate_up: Fp8Weight, limit: float) -> torch.Tensor:
    """silu(min(gate x, limit)) * clamp(up x, -limit, limit), as one kernel.

    Args:
        x: [1, K], contiguous, any float dtype. K is a multiple of 16.
        gate_up: [2 * N, K], its rows contiguous, gate rows first.
        limit: above 0.

    Returns:
        [1, N] in x's dtype.
    """
    N = gate_up.shape[0] // 2
    out = torch.empty(1, N, dtype=x.dtype, device=x.device)
    _one_row(x, gate_up, out, N, gated=True, ACTIVATION=1, LIMIT=limit)
    return out


def _one_row(x: torch.Tensor, weight: Fp8Weight, out: torch.Tensor, group_rows: int, *, gated: bool = False, **terms: float) -> None:
    """The product of one row, to `out`; a program's rows are all in one of the parts of `group_rows`, and in one block of scales."""
    N, K = out.shape[1], weight.shape[1]
    config, words, block = vector_config(N, K, 1, gated, device_limits(x.device)), weight.values.view(torch.int32), weight.block
    block_n = config.block_n
    while group_rows % block_n or block[0] % block_n:
        block_n //= 2
    assembly = x.is_cuda and x.data_ptr() % 16 == 0
    fp8_row_kernel[(triton.cdiv(N, block_n),)](
        x, x, words, weight.scales, words, out, N, weight.scales.stride(0), 0.0,
        K=K, STRIDE=words.stride(0), FULL=N % block_n == 0, NORM=False, BIAS=False, ADD=False, MODE=decode_mode(x.device), ASSEMBLY=assembly,
        BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1], BLOCK_N=block_n, BLOCK_K=config.block_k, WORDS=config.words, num_warps=config.num_warps,
        **terms, **launch_options(x.device),
    )  # fmt: skip


def _rows(weight: Weight, first: int, count: int) -> Weight:
    values = weight.values[first : first + count]
    if isinstance(weight, DenseWeight):
        return DenseWeight(values)
    size = weight.block[0]
    if first % size == 0 or count >= weight.shape[0]:
        return Fp8Weight(values, weight.scales[first // size : -(-(first + count) // size)].contiguous(), weight.block)
    scales = weight.scales.repeat_interleave(size, 0)[first : first + count].contiguous()
    return Fp8Weight(values, scales, (1, weight.block[1]))
