"""Experts in FP4 for few tokens on a GPU: each chosen expert's matrices are read once for its token, on the ordinary arithmetic units.

A thread carries the weights as 32-bit words, eight values of a row each, and four words, a group, at a time. The units have about three and a half
instructions for each value at the rate at which a Hopper GPU reads them, so there are two ways:

- FAST, of x in 16 bits: a value's three low bits, moved to where a float16 has the end of its exponent and the begin of its mantissa, are the value divided
  by 2^14, that of a subnormal too, and two such are made and multiplied at once. x is in float16 as well, times a power of two that brings the largest of
  its 32 values opposite a group to between 2^12 and 2^13: no less exact than bfloat16. Four products are summed in float16, the rest in float32.
- of others: moved to a float32's place, it is the value divided by 2^126. x is multiplied by 2^100 beforehand, so that no product is subnormal.

What is loaded beside the words is loaded in assembly, for the reason that fp8_row.py has.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.fp8_row import after_inputs, halves, load_fours
from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs

_VALUES_AT_ONCE = 4096  # of a row, that a program's threads hold
_GATE_ROWS, _GATE_STEPS = 4, 6  # rows of gate and of up that a program multiplies at once, and how often
_DOWN_ROWS = 4


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
    _gate_up_rows_kernel[(triton.cdiv(N, _GATE_ROWS * _GATE_STEPS), T * top_k)](
        x, chosen, values.view(torch.int32), scales, out, N, limit,
        TOP_K=top_k, BLOCK_N=_GATE_ROWS, STEPS=_GATE_STEPS, **_options(x, K), **launch_options(x.device),
    )  # fmt: skip
    return out


def fp4_down_rows(
    inner: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, add_to: torch.Tensor
) -> torch.Tensor:
    """Add the weighted sum of what each token's experts give.

    Args:
        inner: [T, top_k, N], any float dtype, contiguous.
        chosen: [T, top_k] integers, contiguous.
        shares: [T, top_k] float32, contiguous.
        values, scales: of the experts' [K, N], as in fp4_experts.Fp4Experts.
        add_to: [T, K] float32, contiguous.

    Returns:
        `add_to`.
    """
    T, top_k, N = inner.shape
    K = values.shape[1]
    _down_rows_kernel[(triton.cdiv(K, _DOWN_ROWS), T)](
        inner, chosen, shares, values.view(torch.int32), scales, add_to, K,
        TOP_K=top_k, BLOCK_N=_DOWN_ROWS, **_options(inner, N), **launch_options(inner.device),
    )  # fmt: skip
    return add_to


def _options(x: torch.Tensor, columns: int) -> dict[str, int]:
    """Of a product with x, whose rows have `columns` values."""
    block_k = max(128, min(_VALUES_AT_ONCE, triton.next_power_of_2(columns)))
    assembly = x.is_cuda and x.data_ptr() % 16 == 0 and columns % block_k == 0
    fast = assembly and x.element_size() == 2
    return {"K": columns, "ASSEMBLY": assembly, "FAST": fast, "BLOCK_K": block_k, "num_warps": max(1, block_k // 1024)}


@triton.jit
def _e2m1(words, PLACE: tl.constexpr):
    """Value number PLACE of each word, divided by 2^126."""
    return (((words << (28 - 4 * PLACE)) >> 6) & -2118123520).to(tl.float32, bitcast=True)


@triton.jit
def _load_exponents(pointers, ASSEMBLY: tl.constexpr):
    if ASSEMBLY:
        exponents = tl.inline_asm_elementwise("ld.global.nc.u8 $0, [$1];", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1)
    else:
        exponents = tl.load(pointers).to(tl.int32)
    return exponents


@triton.jit
def _load_block(values, scales, rows, start, live, K: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """Words [BLOCK_N, BLOCK_K / 8] of the matrix rows `rows` (int64) from column `start` on, zeros past the last one and if not `live`, and their groups'
    exponents."""
    places = start // 8 + tl.arange(0, BLOCK_K // 8)
    groups = tl.minimum(start // 32 + tl.arange(0, BLOCK_K // 32), K // 32 - 1)
    has = tl.full([BLOCK_N, BLOCK_K // 8], 1, tl.int1) & live
    if K % BLOCK_K != 0:
        has = has & (places < K // 8)[None, :]
    words = tl.load(tl.max_contiguous(values + rows[:, None] * (K // 8) + places[None, :], [1, 4]), mask=has, other=0, eviction_policy="evict_first")
    return words, _load_exponents(scales + rows[:, None] * (K // 32) + groups[None, :], ASSEMBLY)


@triton.jit
def _power(exponent):
    """2^(exponent - 127), of exponents out of a float32's range the nearest that it has, and 0."""
    return (tl.minimum(tl.maximum(exponent, 0), 254) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _load_eights(base, places, K: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_K: tl.constexpr):
    """Values 8 * places .. 8 * places + 7 of a row of K values, times 2^100, zeros past its end, in the shape of `places`."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    x0, x1, x2, x3 = load_fours(base, places * 2, K, EVEN, DTYPE, ASSEMBLY)
    x4, x5, x6, x7 = load_fours(base, places * 2 + 1, K, EVEN, DTYPE, ASSEMBLY)
    big = 1267650600228229401496703205376.0
    return x0 * big, x1 * big, x2 * big, x3 * big, x4 * big, x5 * big, x6 * big, x7 * big


@triton.jit
def _pair(low, high):
    return tl.inline_asm_elementwise("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _load_pairs(base, places, DTYPE: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same values as float16, value j and value j + 4 in a word, times a power of two for each group; and [1, BLOCK_K / 32] integers `place`, so that
    2^14 over that power is 2^(place - 127). places: [1, BLOCK_K / 8]. All of it is in two dimensions, for a thread then has what stands opposite its words."""
    a, b, c, d = tl.inline_asm_elementwise(
        "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,l", [base + places.to(tl.int64) * 16],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    if DTYPE.is_bf16():
        x0, x1 = (a << 16).to(tl.float32, bitcast=True), (a & -65536).to(tl.float32, bitcast=True)
        x2, x3 = (b << 16).to(tl.float32, bitcast=True), (b & -65536).to(tl.float32, bitcast=True)
        x4, x5 = (c << 16).to(tl.float32, bitcast=True), (c & -65536).to(tl.float32, bitcast=True)
        x6, x7 = (d << 16).to(tl.float32, bitcast=True), (d & -65536).to(tl.float32, bitcast=True)
    else:
        x0, x1 = halves(a)
        x2, x3 = halves(b)
        x4, x5 = halves(c)
        x6, x7 = halves(d)
    top = tl.maximum(tl.maximum(tl.maximum(tl.abs(x0), tl.abs(x1)), tl.maximum(tl.abs(x2), tl.abs(x3))),
                     tl.maximum(tl.maximum(tl.abs(x4), tl.abs(x5)), tl.maximum(tl.abs(x6), tl.abs(x7))))  # fmt: skip
    place = tl.maximum(tl.max(tl.reshape(top, [1, BLOCK_K // 32, 4]), 2).to(tl.int32, bitcast=True) >> 23, 13)
    factor = ((266 - place) << 23).to(tl.float32, bitcast=True)
    factor = tl.reshape(tl.broadcast_to(factor[:, :, None], [1, BLOCK_K // 32, 4]), [1, BLOCK_K // 8])
    p0, p1 = _pair(x0 * factor, x4 * factor), _pair(x1 * factor, x5 * factor)
    p2, p3 = _pair(x2 * factor, x6 * factor), _pair(x3 * factor, x7 * factor)
    return p0, p1, p2, p3, place + 2


@triton.jit
def _multiply_words(words, p0, p1, p2, p3):
    """The sum of each word's eight values, divided by 2^14, times those of the pairs opposite."""
    return tl.inline_asm_elementwise(
        "{ .reg .b32 a, b, s; .reg .b16 l, h; .reg .f32 f, g; "
        "shl.b32 a, $1, 9; shl.b32 b, $1, 12; and.b32 b, b, 0x80008000; lop3.b32 a, a, 0x0E000E00, b, 0xEA; mul.rn.f16x2 s, a, $2; "
        "shl.b32 a, $1, 5; shl.b32 b, $1, 8; and.b32 b, b, 0x80008000; lop3.b32 a, a, 0x0E000E00, b, 0xEA; fma.rn.f16x2 s, a, $3, s; "
        "shl.b32 a, $1, 1; shl.b32 b, $1, 4; and.b32 b, b, 0x80008000; lop3.b32 a, a, 0x0E000E00, b, 0xEA; fma.rn.f16x2 s, a, $4, s; "
        "shr.u32 a, $1, 3; and.b32 b, $1, 0x80008000; lop3.b32 a, a, 0x0E000E00, b, 0xEA; fma.rn.f16x2 s, a, $5, s; "
        "mov.b32 {l, h}, s; cvt.f32.f16 f, l; cvt.f32.f16 g, h; add.f32 $0, f, g; }",
        "=f,r,r,r,r,r", [words, p0, p1, p2, p3], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _sums_of_pairs(words, exponents, p0, p1, p2, p3, place, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """[BLOCK_N, BLOCK_K / 32], the products of words [BLOCK_N, BLOCK_K / 8] with `_load_pairs` opposite, by group."""
    shape: tl.constexpr = [BLOCK_N, BLOCK_K // 8]
    products = _multiply_words(
        words, tl.broadcast_to(p0, shape), tl.broadcast_to(p1, shape), tl.broadcast_to(p2, shape), tl.broadcast_to(p3, shape)
    )  # fmt: skip
    return tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 32, 4]), axis=2) * _power(exponents + (place - 127))


@triton.jit
def _sums_of_words(words, exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """The same with `_load_eights`."""
    products = _e2m1(words, 0) * x0
    products += _e2m1(words, 1) * x1
    products += _e2m1(words, 2) * x2
    products += _e2m1(words, 3) * x3
    products += _e2m1(words, 4) * x4
    products += _e2m1(words, 5) * x5
    products += _e2m1(words, 6) * x6
    products += _e2m1(words, 7) * x7
    return tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // 32, 4]), axis=2) * _power(exponents + 26)


@triton.jit
def _sums(
    words, exponents, base, start,
    K: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[BLOCK_N, BLOCK_K / 32], the products of a block with the row of x at `base` from column `start` on, by group."""
    places = (start // 8 + tl.arange(0, BLOCK_K // 8))[None, :]
    if FAST:
        p0, p1, p2, p3, place = _load_pairs(base, places, DTYPE, BLOCK_K)
        sums = _sums_of_pairs(words, exponents, p0, p1, p2, p3, place, BLOCK_N, BLOCK_K)
    else:
        x0, x1, x2, x3, x4, x5, x6, x7 = _load_eights(base, places, K, DTYPE, ASSEMBLY, BLOCK_K)
        sums = _sums_of_words(words, exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N, BLOCK_K)
    return sums


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _gate_up_rows_kernel(
    x, chosen, values, scales, out, N, limit,
    K: tl.constexpr, TOP_K: tl.constexpr, ASSEMBLY: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr, STEPS: tl.constexpr, BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """STEPS blocks of rows, each on its way while the one before is multiplied."""
    pair = tl.program_id(1)
    own = tl.program_id(0) * (BLOCK_N * STEPS) + tl.arange(0, BLOCK_N)
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    wait_for_inputs(PDL)
    first = tl.load(chosen + pair).to(tl.int64) * 2 * N
    base = x + (pair // TOP_K).to(tl.int64) * K
    x_base = after_inputs(base) if ASSEMBLY else base
    rows = first + tl.minimum(own, N - 1)  # past the end: the last row again, whose sums are then dropped
    words, exponents = _load_block(values, scales, rows, 0, True, K, ASSEMBLY, BLOCK_N, BLOCK_K)
    up_words, up_exponents = _load_block(values, scales, rows + N, 0, True, K, ASSEMBLY, BLOCK_N, BLOCK_K)
    gate = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    if FAST:
        p0, p1, p2, p3, group = _load_pairs(x_base, tl.arange(0, BLOCK_K // 8)[None, :], x.dtype.element_ty, BLOCK_K)
    for item in range(STEPS * COLUMNS):
        following = item + 1
        next_rows = first + tl.minimum(own + following // COLUMNS * BLOCK_N, N - 1)
        next_start = following % COLUMNS * BLOCK_K
        live = following < STEPS * COLUMNS
        next_words, next_exponents = _load_block(values, scales, next_rows, next_start, live, K, ASSEMBLY, BLOCK_N, BLOCK_K)
        next_up_words, next_up_exponents = _load_block(values, scales, next_rows + N, next_start, live, K, ASSEMBLY, BLOCK_N, BLOCK_K)
        places = (item % COLUMNS * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8))[None, :]
        if FAST:
            if COLUMNS > 1:
                p0, p1, p2, p3, group = _load_pairs(x_base, places, x.dtype.element_ty, BLOCK_K)
            gate += _sums_of_pairs(words, exponents, p0, p1, p2, p3, group, BLOCK_N, BLOCK_K)
            up += _sums_of_pairs(up_words, up_exponents, p0, p1, p2, p3, group, BLOCK_N, BLOCK_K)
        else:
            x0, x1, x2, x3, x4, x5, x6, x7 = _load_eights(x_base, places, K, x.dtype.element_ty, ASSEMBLY, BLOCK_K)
            gate += _sums_of_words(words, exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N, BLOCK_K)
            up += _sums_of_words(up_words, up_exponents, x0, x1, x2, x3, x4, x5, x6, x7, BLOCK_N, BLOCK_K)
        if COLUMNS == 1 or item % COLUMNS == COLUMNS - 1:
            a, b = tl.reduce((gate, up), 1, _add_pairs)
            a = tl.minimum(a, limit)
            b = tl.minimum(tl.maximum(b, -limit), limit)
            place = own + item // COLUMNS * BLOCK_N
            tl.store(out + pair.to(tl.int64) * N + place, (a * tl.sigmoid(a) * b).to(out.dtype.element_ty), mask=place < N)
            gate = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
            up = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
        words, exponents, up_words, up_exponents = next_words, next_exponents, next_up_words, next_up_exponents


@triton.jit
def _down_rows_kernel(
    inner, chosen, shares, values, scales, out, N,
    K: tl.constexpr, TOP_K: tl.constexpr, ASSEMBLY: tl.constexpr, FAST: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K columns and N rows of the matrices; each expert's are on their way while those before are multiplied."""
    token = tl.program_id(1).to(tl.int64)
    own = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    at_row = tl.minimum(own, N - 1)
    COLUMNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    wait_for_inputs(PDL)
    sums = tl.zeros([BLOCK_N, BLOCK_K // 32], tl.float32)
    rows = tl.load(chosen + token * TOP_K).to(tl.int64) * N + at_row
    words, exponents = _load_block(values, scales, rows, 0, True, K, ASSEMBLY, BLOCK_N, BLOCK_K)
    for item in tl.static_range(TOP_K * COLUMNS):
        pair = token * TOP_K + item // COLUMNS
        next_words, next_exponents = words, exponents
        if item + 1 < TOP_K * COLUMNS:
            next_rows = tl.load(chosen + token * TOP_K + (item + 1) // COLUMNS).to(tl.int64) * N + at_row
            next_words, next_exponents = _load_block(
                values, scales, next_rows, (item + 1) % COLUMNS * BLOCK_K, True, K, ASSEMBLY, BLOCK_N, BLOCK_K
            )  # fmt: skip
        base = inner + pair * K
        x_base = after_inputs(base) if ASSEMBLY else base
        part = _sums(words, exponents, x_base, item % COLUMNS * BLOCK_K, K, inner.dtype.element_ty, ASSEMBLY, FAST, BLOCK_N, BLOCK_K)
        sums += part * tl.load(shares + pair)
        words, exponents = next_words, next_exponents
    at = out + token * N + own
    tl.store(at, tl.load(at, mask=own < N, other=0.0) + tl.sum(sums, 1), mask=own < N)
