"""Experts in FP4 for few tokens on a GPU: each chosen expert's matrices are read once for its token, on the ordinary arithmetic units.

A thread carries the weights as 32-bit words, eight values of a row each. A value's three low bits, moved to where a float32 has the end of its exponent
and the begin of its mantissa, are the value divided by 2^126, that of a subnormal too: three instructions, and one for the product. x is multiplied by
2^100 beforehand, so that no product is subnormal, and a group's scale makes up for both. Products and sums are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.fp8_row import after_inputs, load_fours
from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs

_VALUES_AT_ONCE = 4096  # of a row, that a program's threads hold


def fp4_gate_up_rows(x: torch.Tensor, chosen: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, limit: float) -> torch.Tensor:
    """silu(min(gate x, limit)) * clamp(up x, -limit, limit) of each token's experts.

    Args:
        x: [T, K], any float dtype, contiguous.
        chosen: [T, top_k] integers, contiguous.
        values, scales: of the experts' [2 * N, K], as in fp4_experts.Fp4Experts.
        limit: of gate and up.

    Returns:
        [T, top_k, N] in x's dtype.
    """
    (T, K), top_k = x.shape, chosen.shape[1]
    N = values.shape[1] // 2
    out = torch.empty(T, top_k, N, dtype=x.dtype, device=x.device)
    block_n, block_k = 4, max(128, min(_VALUES_AT_ONCE, triton.next_power_of_2(K)))
    _gate_up_rows_kernel[(triton.cdiv(N, block_n), T * top_k)](
        x, chosen, values.view(torch.int32), scales, out, N, limit, K=K, TOP_K=top_k, ASSEMBLY=_in_assembly(x),
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=_num_warps(block_k), **launch_options(x.device),
    )  # fmt: skip
    return out


def fp4_down_rows(inner: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The weighted sum of what each token's experts give.

    Args:
        inner: [T, top_k, N], any float dtype, contiguous.
        chosen: [T, top_k] integers, contiguous.
        shares: [T, top_k] float32, contiguous.
        values, scales: of the experts' [K, N], as in fp4_experts.Fp4Experts.

    Returns:
        [T, K] float32.
    """
    T, top_k, N = inner.shape
    K = values.shape[1]
    out = torch.empty(T, K, dtype=torch.float32, device=inner.device)
    block_n, block_k = 4, max(128, min(_VALUES_AT_ONCE, triton.next_power_of_2(N)))
    _down_rows_kernel[(triton.cdiv(K, block_n), T)](
        inner, chosen, shares, values.view(torch.int32), scales, out, K, K=N, TOP_K=top_k, ASSEMBLY=_in_assembly(inner),
        BLOCK_N=block_n, BLOCK_K=block_k, num_warps=_num_warps(block_k), **launch_options(inner.device),
    )  # fmt: skip
    return out


def _in_assembly(x: torch.Tensor) -> bool:
    """Whether its rows lie where wide loads in assembly may begin, and there is assembly."""
    return x.is_cuda and x.data_ptr() % 16 == 0 and x.shape[-1] * x.itemsize % 16 == 0


def _num_warps(block_k: int) -> int:
    return 4 if block_k >= 2048 else 2 if block_k >= 1024 else 1


@triton.jit
def _e2m1(words, PLACE: tl.constexpr):
    """Value number PLACE of each word, divided by 2^126."""
    return (((words << (28 - 4 * PLACE)) >> 6) & -2118123520).to(tl.float32, bitcast=True)


@triton.jit
def _load_eights(base, places, K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Values 8 * places .. 8 * places + 7 of a row of K values, times 2^100, zeros past its end."""
    x0, x1, x2, x3 = load_fours(base, places * 2, K, EVEN, DTYPE, ASSEMBLY)
    x4, x5, x6, x7 = load_fours(base, places * 2 + 1, K, EVEN, DTYPE, ASSEMBLY)
    big = 1267650600228229401496703205376.0
    return x0 * big, x1 * big, x2 * big, x3 * big, x4 * big, x5 * big, x6 * big, x7 * big


@triton.jit
def _add_words(sums, words, exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """sums [BLOCK_N, BLOCK_K / 32] + the products of words [BLOCK_N, BLOCK_K / 8] with the x values opposite, times the groups' scales."""
    products = _e2m1(words, 0) * x0[None, :]
    products += _e2m1(words, 1) * x1[None, :]
    products += _e2m1(words, 2) * x2[None, :]
    products += _e2m1(words, 3) * x3[None, :]
    products += _e2m1(words, 4) * x4[None, :]
    products += _e2m1(words, 5) * x5[None, :]
    products += _e2m1(words, 6) * x6[None, :]
    products += _e2m1(words, 7) * x7[None, :]
    scale = ((exponents.to(tl.int32) + 26) << 23).to(tl.float32, bitcast=True)
    return sums + tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 32, 4]), axis=2) * scale


@triton.jit
def _load_block(values, scales, rows, has_row, start, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """Words [BLOCK_N, BLOCK_K / 8] of the matrix rows `rows` (int64) from column `start` on, zeros past the last one, and their groups' exponents."""
    places = start // 8 + tl.arange(0, BLOCK_K // 8)
    groups = start // 32 + tl.arange(0, BLOCK_K // 32)
    at = tl.max_contiguous(values + rows[:, None] * (K // 8) + places[None, :], [1, 4])
    scale_at = scales + rows[:, None] * (K // 32) + groups[None, :]
    if K % BLOCK_K == 0:
        words = tl.load(at, mask=has_row[:, None], other=0, eviction_policy="evict_first")
        exponents = tl.load(scale_at, mask=has_row[:, None], other=0, eviction_policy="evict_first")
    else:
        words = tl.load(at, mask=has_row[:, None] & (places < K // 8)[None, :], other=0, eviction_policy="evict_first")
        exponents = tl.load(scale_at, mask=has_row[:, None] & (groups < K // 32)[None, :], other=0, eviction_policy="evict_first")
    return words, exponents


@triton.jit
def _gate_up_rows_kernel(
    x, chosen, values, scales, out, N, limit,
    K: tl.constexpr, TOP_K: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(1)
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = own < N
    places = tl.arange(0, BLOCK_K // 8)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    wait_for_inputs(PDL)
    rows = tl.load(chosen + pair).to(tl.int64) * 2 * N + own
    base = x + (pair // TOP_K).to(tl.int64) * K
    x_base = after_inputs(base) if ASSEMBLY else base
    gate = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    for start in tl.static_range(0, K, BLOCK_K):
        words, exponents = _load_block(values, scales, rows, has_row, start, K, BLOCK_K)
        up_words, up_exponents = _load_block(values, scales, rows + N, has_row, start, K, BLOCK_K)
        x0, x1, x2, x3, x4, x5, x6, x7 = _load_eights(x_base, start // 8 + places, K, EVEN, x.dtype.element_ty, ASSEMBLY)
        gate = _add_words(gate, words, exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N, BLOCK_K)
        up = _add_words(up, up_words, up_exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N, BLOCK_K)
    a = tl.minimum(tl.sum(gate, 1), limit)
    b = tl.minimum(tl.maximum(tl.sum(up, 1), -limit), limit)
    tl.store(out + pair.to(tl.int64) * N + own, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=has_row)


@triton.jit
def _down_rows_kernel(
    inner, chosen, shares, values, scales, out, N,
    K: tl.constexpr, TOP_K: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K columns and N rows of the matrices."""
    token = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    has_row = own < N
    places = tl.arange(0, BLOCK_K // 8)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    wait_for_inputs(PDL)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    for number in tl.static_range(TOP_K):
        pair = token * TOP_K + number
        rows = tl.load(chosen + pair).to(tl.int64) * N + own
        share = tl.load(shares + pair)
        base = inner + pair * K
        x_base = after_inputs(base) if ASSEMBLY else base
        part = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
        for start in tl.static_range(0, K, BLOCK_K):
            words, exponents = _load_block(values, scales, rows, has_row, start, K, BLOCK_K)
            x0, x1, x2, x3, x4, x5, x6, x7 = _load_eights(x_base, start // 8 + places, K, EVEN, inner.dtype.element_ty, ASSEMBLY)
            part = _add_words(part, words, exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N, BLOCK_K)
        sums += part * share
    tl.store(out + token * N + own, tl.sum(sums, 1), mask=has_row)
