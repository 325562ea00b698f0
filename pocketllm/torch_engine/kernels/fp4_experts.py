"""Experts in FP4 on a GPU, read as they are stored: the chosen ones alone, in two grouped products, and nothing is read on the host.

Pairs of token and expert are sorted as kernels/moe.py does it. A byte holds two neighbours of a row, so a step multiplies the even columns of x with
the low halves of a tile, and the odd ones with the high halves. A value times its power of two is exact in float16's range of exponents and in bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs
from pocketllm.torch_engine.kernels.moe import combine, sort_by_expert
from pocketllm.torch_engine.quant.fp4 import GROUP, dequantize_fp4


@dataclass(frozen=True, slots=True)
class Fp4Experts:
    """The same matrix of each expert.

    Args:
        values: uint8 [num_experts, N, K / 2], contiguous, the earlier of two values in the low bits.
        scales: uint8 [num_experts, N, K / 32], contiguous, exponents of 2 with a bias of 127.
    """

    values: torch.Tensor
    scales: torch.Tensor

    def __post_init__(self) -> None:
        experts, rows, half = self.values.shape
        if tuple(self.scales.shape) != (experts, rows, 2 * half // GROUP) or 2 * half % GROUP:
            raise ValueError(f"FP4 values {tuple(self.values.shape)} have a scale for each {GROUP // 2} bytes of a row, not {tuple(self.scales.shape)}.")

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes

    def matrix(self, expert: int) -> torch.Tensor:
        """[N, K] float32."""
        out = torch.empty(self.values.shape[1], 2 * self.values.shape[2], device=self.values.device)
        dequantize_fp4(self.values[expert].view(torch.int8), self.scales[expert].view(torch.float8_e8m0fnu), out)
        return out


def fp4_experts(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, gate_up: Fp4Experts, down: Fp4Experts, limit: float) -> torch.Tensor:
    """The sum of each token's experts, weighted: down(silu(min(gate x, limit)) * clamp(up x, -limit, limit)).

    Args:
        x: [T, K], any float dtype, its rows contiguous; products have its dtype and sums are float32.
        chosen: [T, top_k] integers.
        shares: [T, top_k] float32.
        gate_up: of [2 * N, K], gate rows first.
        down: of [K, N].
        limit: of gate and up.

    Returns:
        [T, K] in x's dtype.
    """
    (T, K), top_k = x.shape, chosen.shape[1]
    E, N = gate_up.values.shape[0], gate_up.values.shape[1] // 2
    assert down.values.shape == (E, K, N // 2)
    assert gate_up.values.shape[2] == K // 2
    assert x.stride(1) == 1
    out = torch.empty_like(x)
    if T == 0:
        return out
    options = launch_options(x.device)
    per_expert = T * top_k / E
    block_m = 16 if per_expert <= 8 else 32 if per_expert <= 24 else 64
    block_n, half = (32, 64) if block_m == 16 else (64, 32)
    if x.dtype == torch.float32:  # operands in registers
        block_n, half = 32, 16
    pairs, block_experts = sort_by_expert(chosen.to(torch.int32).contiguous(), E, block_m)
    total, num_blocks = T * top_k, block_experts.shape[0]
    inner = torch.empty((total, N), dtype=x.dtype, device=x.device)
    outer = torch.empty((total, K), dtype=x.dtype, device=x.device)
    tiles = {"BLOCK_M": block_m, "BLOCK_N": block_n, "HALF": half, "num_warps": 4, "num_stages": 3, **options}
    _gate_up_kernel[(num_blocks * triton.cdiv(N, block_n),)](
        x, x.stride(0), gate_up.values, gate_up.scales, inner, pairs, block_experts, total, N, K, limit, TOP_K=top_k, **tiles,
    )  # fmt: skip
    _down_kernel[(num_blocks * triton.cdiv(K, block_n),)](inner, down.values, down.scales, outer, pairs, block_experts, total, K, N, **tiles)
    return combine(outer, shares.contiguous(), out)


@triton.jit
def _scaled_pairs(stored, scale_bits):
    """Bytes and the exponents of their scales, as integers -> the values in their low and high bits, float32.

    E2M1 moved to a float16's place, whose exponent has a bias of 15 in place of 1, is the value divided by 2^14, that of a subnormal too.
    """
    bits = stored.to(tl.int32)
    low = (((bits & 0x7) << 9) | ((bits & 0x8) << 12)).to(tl.int16).to(tl.float16, bitcast=True)
    high = (((bits & 0x70) << 5) | ((bits & 0x80) << 8)).to(tl.int16).to(tl.float16, bitcast=True)
    scale = (scale_bits.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 16384.0
    return low.to(tl.float32) * scale, high.to(tl.float32) * scale


@triton.jit
def _load_pairs(values, scales, row, columns, place, half_width, has):
    """Two tiles [HALF, BLOCK_N] of the matrix whose rows begin at `row`: bytes `place` of its rows `columns`, float32."""
    at = (row + columns.to(tl.int64))[None, :] * half_width + place[:, None]
    stored = tl.load(values + at, mask=has, other=0)
    scale = tl.load(scales + (row + columns.to(tl.int64))[None, :] * (half_width // 16) + (place // 16)[:, None], mask=has, other=0)
    return _scaled_pairs(stored, scale)


@triton.jit
def _gate_up_kernel(
    x, x_stride, values, scales, out, pairs, block_experts, total, N, K, limit,
    TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_inputs(PDL)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        has_row = (pair < total)[:, None]
        has_column = (columns < N)[None, :]
        row = expert.to(tl.int64) * 2 * N
        x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K // 2, HALF):
            place = start + tl.arange(0, HALF)
            inside = place < K // 2
            even = tl.load(x_at + 2 * place[None, :], mask=has_row & inside[None, :], other=0.0)
            odd = tl.load(x_at + 2 * place[None, :] + 1, mask=has_row & inside[None, :], other=0.0)
            has = has_column & inside[:, None]
            low, high = _load_pairs(values, scales, row, columns, place, K // 2, has)
            gate = tl.dot(even, low.to(even.dtype), gate, input_precision="ieee")
            gate = tl.dot(odd, high.to(even.dtype), gate, input_precision="ieee")
            low, high = _load_pairs(values, scales, row + N, columns, place, K // 2, has)
            up = tl.dot(even, low.to(even.dtype), up, input_precision="ieee")
            up = tl.dot(odd, high.to(even.dtype), up, input_precision="ieee")
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        y = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out + pair.to(tl.int64)[:, None] * N + columns[None, :], y.to(out.dtype.element_ty), mask=has_row & has_column)


@triton.jit
def _down_kernel(
    x, values, scales, out, pairs, block_experts, total, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_inputs(PDL)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        has_row = (pair < total)[:, None]
        has_column = (columns < N)[None, :]
        x_at = x + pair.to(tl.int64)[:, None] * K
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K // 2, HALF):
            place = start + tl.arange(0, HALF)
            inside = place < K // 2
            even = tl.load(x_at + 2 * place[None, :], mask=has_row & inside[None, :], other=0.0)
            odd = tl.load(x_at + 2 * place[None, :] + 1, mask=has_row & inside[None, :], other=0.0)
            low, high = _load_pairs(values, scales, expert.to(tl.int64) * N, columns, place, K // 2, has_column & inside[:, None])
            y = tl.dot(even, low.to(even.dtype), y, input_precision="ieee")
            y = tl.dot(odd, high.to(even.dtype), y, input_precision="ieee")
        tl.store(out + pair.to(tl.int64)[:, None] * N + columns[None, :], y.to(out.dtype.element_ty), mask=has_row & has_column)


def fp4_experts_reference(x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, gate_up: Fp4Experts, down: Fp4Experts, limit: float) -> torch.Tensor:
    """`fp4_experts` in torch and float32, one token after the other: [T, K] float32."""
    out = torch.zeros(x.shape, device=x.device)
    for token, experts in enumerate(chosen.tolist()):
        for number, expert in enumerate(experts):
            gate, up = (x[token].float() @ gate_up.matrix(expert).T).chunk(2)
            inner = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
            out[token] += shares[token, number] * (inner @ down.matrix(expert).T)
    return out
