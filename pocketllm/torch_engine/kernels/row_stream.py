"""The product of one row with a matrix, by programs that stay: as many as the device holds at once, each with blocks of weight rows one after another.

x is read once a program, and a block's weights are on their way while the block before is multiplied, whichever program's turn it is in between. With
programmatic dependent launch a program's first two blocks are asked for while the kernel ahead still runs.

A thread carries the weights as 32-bit words and multiplies each with the one, two or four values of x that stand opposite (fp8_row.py says how E4M3
is unpacked, and why x is loaded in assembly). Products and sums are float32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.activation import activate
from pocketllm.torch_engine.kernels.fp8_row import after_inputs, halves, load_fours, unpack_e4m3
from pocketllm.torch_engine.kernels.launch import wait_for_inputs

STORED_FLOAT32, STORED_FLOAT16, STORED_BFLOAT16, STORED_E4M3 = 0, 1, 2, 3  # what a word of weights holds
_FLOAT16, _E4M3 = tl.constexpr(STORED_FLOAT16), tl.constexpr(STORED_E4M3)


@triton.jit
def _load_ones(base, places, K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr):
    inside = places < K
    values = tl.load(base + places) if EVEN else tl.load(base + places, mask=inside, other=0.0)
    return values.to(tl.float32)


@triton.jit
def _load_pairs(base, pairs, K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Values 2 * pairs and 2 * pairs + 1 of a row of K values, zeros past its end, as two float32 tensors of the shape of `pairs`."""
    inside = pairs < K // 2
    places = pairs if EVEN else tl.minimum(pairs, K // 2 - 1)
    if not ASSEMBLY:
        first = tl.load(base + places * 2).to(tl.float32)
        second = tl.load(base + places * 2 + 1).to(tl.float32)
    elif DTYPE.is_fp32():
        first, second = tl.inline_asm_elementwise(
            "ld.global.v2.f32 {$0, $1}, [$2];", "=f,=f,l", [base + places.to(tl.int64) * 8], dtype=(tl.float32, tl.float32), is_pure=True, pack=1
        )
    else:
        word = tl.inline_asm_elementwise("ld.global.b32 $0, [$1];", "=r,l", [base + places.to(tl.int64) * 4], dtype=tl.int32, is_pure=True, pack=1)
        if DTYPE.is_bf16():
            first, second = (word << 16).to(tl.float32, bitcast=True), (word & -65536).to(tl.float32, bitcast=True)
        else:
            first, second = halves(word)
    if not EVEN:
        first, second = tl.where(inside, first, 0.0), tl.where(inside, second, 0.0)
    return first, second


@triton.jit
def _load_x(base, places, K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, IN_WORD: tl.constexpr, ASSEMBLY: tl.constexpr):
    """What stands opposite the words `places` of a weight row: IN_WORD float32 tensors, and the first again to make four."""
    if IN_WORD == 4:
        first, second, third, fourth = load_fours(base, places, K, EVEN, DTYPE, ASSEMBLY)
    elif IN_WORD == 2:
        first, second = _load_pairs(base, places, K, EVEN, DTYPE, ASSEMBLY)
        third, fourth = first, first
    else:
        first = _load_ones(base, places, K, EVEN, DTYPE)
        second, third, fourth = first, first, first
    return first, second, third, fourth


@triton.jit
def _load_normed(
    x, norm_weight, places, K: tl.constexpr, EVEN: tl.constexpr, DTYPE: tl.constexpr, IN_WORD: tl.constexpr, NORM: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """`_load_x`, times the norm's weights."""
    first, second, third, fourth = _load_x(x, places, K, EVEN, DTYPE, IN_WORD, ASSEMBLY)
    if NORM:
        a, b, c, d = _load_x(norm_weight, places, K, EVEN, tl.float32, IN_WORD, ASSEMBLY)
        first, second, third, fourth = first * a, second * b, third * c, fourth * d
    return first, second, third, fourth


@triton.jit
def _add_products(
    sums, words, first, second, third, fourth, scale,
    STORED: tl.constexpr, MODE: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """sums [BLOCK_N, CHUNKS] + scale [CHUNKS] * the products of WORDS words with the x values opposite."""
    if STORED == _E4M3:
        a, b, c, d = unpack_e4m3(words, MODE)
        products = a * first[None, :] + b * second[None, :] + c * third[None, :] + d * fourth[None, :]
        sums += tl.sum(tl.reshape(products, [BLOCK_N, CHUNKS, WORDS]), axis=2) * scale[None, :]
    else:
        if STORED == 0:
            products = words.to(tl.float32, bitcast=True) * first[None, :]
        else:
            if STORED == _FLOAT16:
                lower, upper = halves(words)
            else:
                lower, upper = (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)
            products = lower * first[None, :] + upper * second[None, :]
        sums += tl.sum(tl.reshape(products, [BLOCK_N, CHUNKS, WORDS]), axis=2)
    return sums


@triton.jit
def _load_item(
    weight, scales, item, count, program, programs, N, places, offsets, rows, blocks, scale_stride,
    K: tl.constexpr, STRIDE: tl.constexpr, FULL: tl.constexpr, ACTIVATION: tl.constexpr, STORED: tl.constexpr, IN_WORD: tl.constexpr,
    STEPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Words [BLOCK_N, BLOCK_K / IN_WORD] and scales [CHUNKS] of an item: a block of rows, BLOCK_K of its columns; of its up rows too."""
    EVEN: tl.constexpr = K % BLOCK_K == 0
    first_row = (program + item // STEPS * programs) * BLOCK_N
    start = item % STEPS * BLOCK_K
    live = tl.full([BLOCK_N], 1, tl.int1) & (item < count)
    if not FULL:
        live = live & (first_row + rows < N)
    mask = tl.broadcast_to(live[:, None], offsets.shape)
    if not EVEN:
        mask = mask & (places + start // IN_WORD < K // IN_WORD)[None, :]
    pointers = weight + first_row.to(tl.int64) * STRIDE + (offsets + start // IN_WORD)
    pointers = tl.max_contiguous(pointers, [1, WORDS])
    tile = tl.load(pointers, mask=mask, other=0, eviction_policy="evict_first")
    up_tile = tile
    if ACTIVATION:
        up_tile = tl.load(tl.max_contiguous(pointers + N.to(tl.int64) * STRIDE, [1, WORDS]), mask=mask, other=0, eviction_policy="evict_first")
    scale = tl.zeros(blocks.shape, tl.float32)
    up_scale = scale
    if STORED == _E4M3:
        columns = tl.minimum(blocks + start, K - 1) // BLOCK_COLUMNS
        row_scales = scales + tl.minimum(first_row, N - 1) // BLOCK_ROWS * scale_stride
        scale = tl.load(row_scales + columns)
        if ACTIVATION:
            scale_row = (tl.minimum(first_row, N - 1) + N) // BLOCK_ROWS
            up_scale = tl.load(scales + scale_row * scale_stride + columns)
    return tile, up_tile, scale, up_scale


@triton.jit
def _add_pairs(a, b, c, d):
    return a + c, b + d


@triton.jit
def _finish_block(
    sums, up_sums, scale, bias, out, first_row, rows, N, live,
    FULL: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Write what a block of rows gives."""
    results = first_row + rows
    used = (results < N) & live
    added = tl.zeros(rows.shape, tl.float32)
    if BIAS:
        added += tl.load(bias + results, mask=used, other=0.0).to(tl.float32)
    if ADD:
        added += tl.load(out + results, mask=used, other=0.0).to(tl.float32)
    if ACTIVATION:
        result, up_result = tl.reduce((sums, up_sums), 1, _add_pairs)
        result = activate(result * scale, ACTIVATION) * (up_result * scale)
    else:
        result = tl.sum(sums, axis=1) * scale
    tl.store(out + results, (result + added).to(out.dtype.element_ty), mask=used)


@triton.jit
def row_stream_kernel(
    x, norm_weight, weight, scales, bias, tail, out, N, num_blocks, programs, num_tail, scale_stride, eps,
    K: tl.constexpr, STRIDE: tl.constexpr, FULL: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
    STORED: tl.constexpr, HAS_TAIL: tl.constexpr, MODE: tl.constexpr, ASSEMBLY: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x [K] times every `programs`-th block of BLOCK_N weight rows, and of the up rows N further down where there is an activation.

    `weight` and its STRIDE count 32-bit words, of which a thread loads WORDS at once. num_blocks = ceil(N / BLOCK_N); FULL: BLOCK_N divides N. E4M3: rows
    of a block share their scales, so BLOCK_N divides BLOCK_ROWS, and N where there is an activation. ASSEMBLY needs x and norm_weight at multiples of 16 bytes.
    HAS_TAIL: `num_tail` rows of another dtype are multiplied too, one a program, their results behind the others'. It takes E4M3 and
    BLOCK_K >= K.
    """
    IN_WORD: tl.constexpr = 4 if STORED == _E4M3 else (1 if STORED == 0 else 2)
    CHUNKS: tl.constexpr = BLOCK_K // (IN_WORD * WORDS)
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    EVEN: tl.constexpr = K % BLOCK_K == 0
    program = tl.program_id(0)
    count = (num_blocks - program + programs - 1) // programs * STEPS
    rows = tl.arange(0, BLOCK_N)
    places = tl.arange(0, BLOCK_K // IN_WORD)
    offsets = (rows * STRIDE)[:, None] + places[None, :]
    blocks = tl.arange(0, CHUNKS) * (IN_WORD * WORDS)

    tile, up_tile, block_scale, up_scale = _load_item(
        weight, scales, 0, count, program, programs, N, places, offsets, rows, blocks, scale_stride,
        K, STRIDE, FULL, ACTIVATION, STORED, IN_WORD, STEPS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_N, BLOCK_K, WORDS,
    )  # fmt: skip
    next_tile, next_up_tile, next_scale, next_up_scale = _load_item(
        weight, scales, 1, count, program, programs, N, places, offsets, rows, blocks, scale_stride,
        K, STRIDE, FULL, ACTIVATION, STORED, IN_WORD, STEPS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_N, BLOCK_K, WORDS,
    )  # fmt: skip
    # The last programs have a row of the tail as well: where the blocks can't be shared evenly, they are those that have one less.
    tail_row = programs - 1 - program
    if HAS_TAIL:
        tail_values = tail + tl.minimum(tail_row, num_tail - 1) * K
        t0, t1, t2, t3 = load_fours(tail_values.to(tl.int64) if ASSEMBLY else tail_values, places, K, EVEN, tail.dtype.element_ty, ASSEMBLY)
    wait_for_inputs(PDL)

    scale = tl.full([], 256.0 if STORED == _E4M3 and MODE == 1 else 1.0, tl.float32)
    if NORM:
        squares = tl.zeros([BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            columns = start + tl.arange(0, BLOCK_K)
            values = tl.load(x + columns) if EVEN else tl.load(x + columns, mask=columns < K, other=0.0)
            squares += values.to(tl.float32) * values.to(tl.float32)
        scale *= tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    x_base = after_inputs(x) if ASSEMBLY and IN_WORD > 1 else x
    norm_base = norm_weight.to(tl.int64) if ASSEMBLY and IN_WORD > 1 else norm_weight
    x0, x1, x2, x3 = _load_normed(x_base, norm_base, places, K, EVEN, x.dtype.element_ty, IN_WORD, NORM, ASSEMBLY)

    if HAS_TAIL:  # noqa: SIM102 - a compile-time condition; without a tail there is nothing to compare
        if tail_row < num_tail:
            result = tl.sum(t0 * x0 + t1 * x1 + t2 * x2 + t3 * x3, axis=0) * (scale / 256.0 if MODE == 1 else scale)  # what E4M3 lacks
            tl.store(out + N + tail_row, result.to(out.dtype.element_ty))
    sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    up_sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    for item in range(0, count, 2):
        for half in tl.static_range(2):  # the two items in registers take turns, so that no load is waited for to be moved
            now = item + half
            if STEPS > 1:
                x0, x1, x2, x3 = _load_normed(
                    x_base, norm_base, places + now % STEPS * (BLOCK_K // IN_WORD), K, EVEN, x.dtype.element_ty, IN_WORD, NORM, ASSEMBLY
                )
            if half == 0:
                sums = _add_products(sums, tile, x0, x1, x2, x3, block_scale, STORED, MODE, BLOCK_N, CHUNKS, WORDS)
                if ACTIVATION:
                    up_sums = _add_products(up_sums, up_tile, x0, x1, x2, x3, up_scale, STORED, MODE, BLOCK_N, CHUNKS, WORDS)
                tile, up_tile, block_scale, up_scale = _load_item(
                    weight, scales, now + 2, count, program, programs, N, places, offsets, rows, blocks, scale_stride,
                    K, STRIDE, FULL, ACTIVATION, STORED, IN_WORD, STEPS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_N, BLOCK_K, WORDS,
                )  # fmt: skip
            else:
                sums = _add_products(sums, next_tile, x0, x1, x2, x3, next_scale, STORED, MODE, BLOCK_N, CHUNKS, WORDS)
                if ACTIVATION:
                    up_sums = _add_products(up_sums, next_up_tile, x0, x1, x2, x3, next_up_scale, STORED, MODE, BLOCK_N, CHUNKS, WORDS)
                next_tile, next_up_tile, next_scale, next_up_scale = _load_item(
                    weight, scales, now + 2, count, program, programs, N, places, offsets, rows, blocks, scale_stride,
                    K, STRIDE, FULL, ACTIVATION, STORED, IN_WORD, STEPS, BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_N, BLOCK_K, WORDS,
                )  # fmt: skip
            if STEPS == 1 or now % STEPS == STEPS - 1:
                first_row = (program + now // STEPS * programs) * BLOCK_N
                _finish_block(sums, up_sums, scale, bias, out, first_row, rows, N, now < count, FULL, BIAS, ADD, ACTIVATION)
                sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
                up_sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
