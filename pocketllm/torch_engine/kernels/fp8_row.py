"""The product of one row with an FP8 matrix.

At the rate at which a Hopper GPU reads FP8 weights it can spend about six instructions on each, so the kernel is arranged to take few: a thread
carries the weights as 32-bit words, a word becomes four float32 in assembly (two conversions to pairs of float16, which hold every E4M3 value,
and four to float32), its products with x are summed where they are, and the scale of a block multiplies the sum of a thread's adjacent columns.

x is loaded in assembly too: Triton would spread its loads over the threads in another way than those of the weights, and exchange the values
through shared memory. A thread that loads four words at once needs the fewest loads, but 64 bytes of float32 x and as many of the norm's weights:
the loads of a warp's threads then fall on the same banks of the L1 cache, half as often with two words. Products and sums are float32.

Tried on an H200 and left: the float16 pairs on tensor cores (of a product of 16 x 8 one row of x wants one column: with x in two float16 it was slower in
all tiles but one), and the rest of a program's rows brought into L2 before the wait for x (from 22 us less to 101 us more of a step of 2.59 ms).
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.activation import activate
from pocketllm.torch_engine.kernels.launch import wait_for_inputs


@triton.jit
def halves(words):
    """The float16 values in the lower and in the upper half of each 32-bit word, as float32."""
    lower = (words & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    upper = ((words >> 16) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)
    return lower.to(tl.float32), upper.to(tl.float32)


@triton.jit
def unpack_e4m3(words, MODE: tl.constexpr):
    """The four E4M3 values of each word as four float32 tensors of its shape; divided by 256 in mode DECODE_BITS (see fp8.decode_e4m3)."""
    if MODE == 2:
        first, second, third, fourth = tl.inline_asm_elementwise(
            "{ .reg .b16 l, h, a, b, c, d; .reg .b32 p, q; mov.b32 {l, h}, $4; cvt.rn.f16x2.e4m3x2 p, l; cvt.rn.f16x2.e4m3x2 q, h; "
            "mov.b32 {a, b}, p; mov.b32 {c, d}, q; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d; }",
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        even = ((words << 8) & -2147450880) | ((words << 7) & 0x3F803F80)  # signs, then exponents and mantissas
        odd = (words & -2147450880) | ((words >> 1) & 0x3F803F80)
        first, third = halves(even)
        second, fourth = halves(odd)
    return first, second, third, fourth


@triton.jit
def after_inputs(pointer):
    """`pointer` as an address that is known only once the kernel's inputs are there, so that no load from it in assembly moves ahead of the wait."""
    return tl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def load_fours(base, fours, K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Values 4 * fours .. 4 * fours + 3 of a row of K values, zeros past its end, as four float32 tensors of the shape of `fours`."""
    inside = fours < K // 4
    places = fours if EVEN else tl.minimum(fours, K // 4 - 1)
    if not ASSEMBLY:
        first = tl.load(base + places * 4).to(tl.float32)
        second = tl.load(base + places * 4 + 1).to(tl.float32)
        third = tl.load(base + places * 4 + 2).to(tl.float32)
        fourth = tl.load(base + places * 4 + 3).to(tl.float32)
    elif DTYPE.is_fp32():
        first, second, third, fourth = tl.inline_asm_elementwise(
            "ld.global.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,l", [base + places.to(tl.int64) * 16],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        lower, upper = tl.inline_asm_elementwise(
            "ld.global.v2.b32 {$0, $1}, [$2];", "=r,=r,l", [base + places.to(tl.int64) * 8], dtype=(tl.int32, tl.int32), is_pure=True, pack=1
        )
        if DTYPE.is_bf16():
            first, second = (lower << 16).to(tl.float32, bitcast=True), (lower & -65536).to(tl.float32, bitcast=True)
            third, fourth = (upper << 16).to(tl.float32, bitcast=True), (upper & -65536).to(tl.float32, bitcast=True)
        else:
            first, second = halves(lower)
            third, fourth = halves(upper)
    if not EVEN:
        first, second = tl.where(inside, first, 0.0), tl.where(inside, second, 0.0)
        third, fourth = tl.where(inside, third, 0.0), tl.where(inside, fourth, 0.0)
    return first, second, third, fourth


@triton.jit
def _load_scales(pointers, ASSEMBLY: tl.constexpr):
    """The float32 at each pointer."""
    if ASSEMBLY:
        scale = tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [pointers.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1)
    else:
        scale = tl.load(pointers)
    return scale


@triton.jit
def _load_tile(pointers, places, start, K: tl.constexpr, EVEN: tl.constexpr, WORDS: tl.constexpr):
    """The words of the tile [BLOCK_N, BLOCK_K / 4] from column `start` on, zeros past the last column."""
    pointers = tl.max_contiguous(pointers + start // 4, [1, WORDS])
    if EVEN:
        tile = tl.load(pointers, eviction_policy="evict_first")
    else:
        tile = tl.load(pointers, mask=(places + start // 4 < K // 4)[None, :], other=0, eviction_policy="evict_first")
    return tile


@triton.jit
def _add_products(sums, words, first, second, third, fourth, scale, MODE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    """sums [BLOCK_N, CHUNKS] + scale [CHUNKS] * the products of WORDS words, each four weights, with the x values of their places."""
    a, b, c, d = unpack_e4m3(words, MODE)
    products = a * first[None, :] + b * second[None, :] + c * third[None, :] + d * fourth[None, :]
    return sums + tl.sum(tl.reshape(products, [BLOCK_N, CHUNKS, WORDS]), axis=2) * scale[None, :]


@triton.jit
def _add_squares(squares, first, second, third, fourth, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr):
    """squares [BLOCK_N, CHUNKS] + those of the x values opposite WORDS words. They are said for every row, so that each thread squares the values that
    it has for its products; the compiler finds that they are the same."""
    values = tl.broadcast_to((first * first + second * second + third * third + fourth * fourth)[None, :], [BLOCK_N, CHUNKS * WORDS])
    return squares + tl.sum(tl.reshape(values, [BLOCK_N, CHUNKS, WORDS]), axis=2)


@triton.jit
def _add_tile(
    sums, up_sums, squares, tile, up_tile, x_base, norm_base, row_scales, up_row_scales, start,
    K: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, X_DTYPE: tl.constexpr, MODE: tl.constexpr, ASSEMBLY: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """The sums with the tile's products from column `start` on added, and the sums of squares of x."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    CHUNKS: tl.constexpr = BLOCK_K // (4 * WORDS)
    fours = tl.arange(0, BLOCK_K // 4) + start // 4
    blocks = tl.minimum(tl.arange(0, CHUNKS) * (4 * WORDS) + start, K - 1) // BLOCK_COLUMNS
    first, second, third, fourth = load_fours(x_base, fours, K, EVEN, X_DTYPE, ASSEMBLY)
    if NORM:
        squares = _add_squares(squares, first, second, third, fourth, BLOCK_N, CHUNKS, WORDS)
        a, b, c, d = load_fours(norm_base, fours, K, EVEN, tl.float32, ASSEMBLY)
        first, second, third, fourth = first * a, second * b, third * c, fourth * d
    sums = _add_products(sums, tile, first, second, third, fourth, _load_scales(row_scales + blocks, ASSEMBLY), MODE, BLOCK_N, CHUNKS, WORDS)
    if ACTIVATION:
        up_scale = _load_scales(up_row_scales + blocks, ASSEMBLY)
        up_sums = _add_products(up_sums, up_tile, first, second, third, fourth, up_scale, MODE, BLOCK_N, CHUNKS, WORDS)
    return sums, up_sums, squares


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def fp8_row_kernel(
    x, norm_weight, weight, scales, bias, out, N, scale_stride, eps,
    K: tl.constexpr, STRIDE: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
    MODE: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
    GROUP_ROWS: tl.constexpr = 0, LIMIT: tl.constexpr = 0.0,
):  # fmt: skip
    """One row x [K] times BLOCK_N rows of the weight, and of the up rows N further down where there is an activation.

    With GROUP_ROWS, a multiple of BLOCK_N, x is [N / GROUP_ROWS, K], and so many rows of the weight have a row of it each. With LIMIT, gate and up are
    held within it: gate from above, up on both sides.

    The rows share their scales: BLOCK_N divides BLOCK_ROWS, and N where there is an activation. `weight` and its STRIDE count 32-bit words, of which a
    thread loads WORDS at once, 2 or 4. FULL: BLOCK_N divides N. ASSEMBLY needs x and norm_weight at multiples of 16 bytes; the interpreter runs without.
    """
    CHUNKS: tl.constexpr = BLOCK_K // (4 * WORDS)
    EVEN: tl.constexpr = K % BLOCK_K == 0
    SCALE: tl.constexpr = 256.0 if MODE == 1 else 1.0
    first_row = tl.program_id(0) * BLOCK_N
    rows = tl.arange(0, BLOCK_N)
    if not FULL:
        rows = tl.minimum(rows, N - 1 - first_row)  # past the end: the last row again, whose sums are then dropped
    places = tl.arange(0, BLOCK_K // 4)
    start_of_rows = weight + first_row.to(tl.int64) * STRIDE
    tile_places = (rows * STRIDE)[:, None] + places[None, :]
    # said here and at each load, for Triton drops what is said of an addition of 0
    pointers = tl.max_contiguous(start_of_rows + tile_places, [1, WORDS])
    up_pointers = tl.max_contiguous(start_of_rows + N.to(tl.int64) * STRIDE + tile_places, [1, WORDS])
    row_scales = scales + first_row // BLOCK_ROWS * scale_stride
    up_row_scales = scales + (first_row + N) // BLOCK_ROWS * scale_stride

    tile = _load_tile(pointers, places, 0, K, EVEN, WORDS)
    up_tile = _load_tile(up_pointers, places, 0, K, EVEN, WORDS) if ACTIVATION else tile
    results = first_row + tl.arange(0, BLOCK_N)
    used = results < N if not FULL else rows >= 0
    added = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        added += tl.load(bias + results, mask=used, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if ADD:
        added += tl.load(out + results, mask=used, other=0.0).to(tl.float32)
    if GROUP_ROWS:
        x += first_row // GROUP_ROWS * K
    x_base = after_inputs(x) if ASSEMBLY else x
    norm_base = norm_weight.to(tl.int64) if ASSEMBLY else norm_weight

    sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    up_sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    squares = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    LAST: tl.constexpr = (K - 1) // BLOCK_K * BLOCK_K
    for start in range(0, LAST, BLOCK_K):
        # the next tile is asked for before this one is used
        next_tile = _load_tile(pointers, places, start + BLOCK_K, K, EVEN, WORDS)
        next_up_tile = _load_tile(up_pointers, places, start + BLOCK_K, K, EVEN, WORDS) if ACTIVATION else next_tile
        sums, up_sums, squares = _add_tile(
            sums, up_sums, squares, tile, up_tile, x_base, norm_base, row_scales, up_row_scales, start,
            K, NORM, ACTIVATION, x.dtype.element_ty, MODE, ASSEMBLY, BLOCK_COLUMNS, BLOCK_N, BLOCK_K, WORDS,
        )  # fmt: skip
        tile, up_tile = next_tile, next_up_tile
    sums, up_sums, squares = _add_tile(
        sums, up_sums, squares, tile, up_tile, x_base, norm_base, row_scales, up_row_scales, LAST,
        K, NORM, ACTIVATION, x.dtype.element_ty, MODE, ASSEMBLY, BLOCK_COLUMNS, BLOCK_N, BLOCK_K, WORDS,
    )  # fmt: skip

    scale = tl.full([BLOCK_N], SCALE, tl.float32)
    if NORM:
        scale *= tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    if ACTIVATION:
        result, up_result = tl.reduce((sums, up_sums), 1, _add_pairs)
        result *= scale
        up_result *= scale
        if LIMIT > 0.0:
            result = tl.minimum(result, LIMIT)
            up_result = tl.minimum(tl.maximum(up_result, -LIMIT), LIMIT)
        result = activate(result, ACTIVATION) * up_result
    else:
        result = tl.sum(sums, axis=1) * scale
    if BIAS or ADD:
        result += added
    tl.store(out + results, result.to(out.dtype.element_ty), mask=used)
