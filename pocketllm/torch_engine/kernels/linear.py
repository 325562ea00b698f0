"""Products of few rows with a large matrix, bound by the speed at which its weights are read.

A product of one row runs on the ordinary arithmetic units: each thread multiplies 16 bytes of a weight row at a time and the sums stay in
registers. From two rows on, tensor cores multiply a block of weight rows with all rows of x, so that every weight is read once whatever the
number of rows. Above 64 rows the product is no longer bound by memory and goes to cuBLAS.

Sums are float32. All weights are [N, K], their rows contiguous and each row's values adjacent.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.activation import ACTIVATIONS, activate, gated_activation, gated_activation_reference
from pocketllm.torch_engine.kernels.fp8 import Fp8Weight, decode_e4m3, decode_mode, dequantize_fp8, dequantize_fp8_reference
from pocketllm.torch_engine.kernels.fp8_row import fp8_row_kernel, halves
from pocketllm.torch_engine.kernels.launch import device_limits, launch_options, least_columns, wait_for_inputs
from pocketllm.torch_engine.kernels.linear_config import MAX_ROWS, MAX_SPLIT_BLOCKS, Config, MatrixConfig, StreamConfig, VectorConfig, choose_config
from pocketllm.torch_engine.kernels.norm import rms_norm, rms_norm_reference
from pocketllm.torch_engine.kernels.row_stream import STORED_BFLOAT16, STORED_E4M3, STORED_FLOAT16, STORED_FLOAT32, row_stream_kernel


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """A matrix [N, K] in float32, float16 or bfloat16.

    Args:
        values: [N, K], its rows contiguous.
    """

    values: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes


Weight = DenseWeight | Fp8Weight


@triton.jit
def _unpack(words, STORED: tl.constexpr):
    """32-bit words [BLOCK_N, WORDS] of stored weights -> float32 [BLOCK_N, WORDS * weights in a word], in order.

    Weights are carried as words, for a tile of narrower values would take a register a value.
    """
    if STORED == 0:
        values = words.to(tl.float32, bitcast=True)
    elif STORED == 1:
        lower, upper = halves(words)
        values = tl.interleave(lower, upper)
    else:
        values = tl.interleave((words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True))
    return values


@triton.jit
def _add_products(sums, words, values, STORED: tl.constexpr, BLOCK_N: tl.constexpr, CHUNKS: tl.constexpr, VECTOR: tl.constexpr):
    """sums [BLOCK_N, CHUNKS] + words of a tile [BLOCK_N, BLOCK_K] * values [BLOCK_K], the VECTOR values a thread loaded together summed by that thread."""
    products = _unpack(words, STORED) * values[None, :]
    return sums + tl.sum(tl.reshape(products, [BLOCK_N, CHUNKS, VECTOR]), axis=2)


@triton.jit
def _vector_kernel(
    x, norm_weight, weight, bias, out, N, weight_stride, eps,
    K: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr, STORED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row x [K] times BLOCK_N rows of the weight, and of the up rows N further down where there is an activation.

    `weight` and `weight_stride` count 32-bit words; STORED says what they hold.
    """
    CHUNKS: tl.constexpr = BLOCK_K // VECTOR
    IN_WORD: tl.constexpr = VECTOR // 4
    WORDS: tl.constexpr = K // IN_WORD
    first = tl.program_id(0) * BLOCK_N
    rows = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first)  # past the end: the last row again, whose sums are then dropped
    columns = tl.arange(0, BLOCK_K)
    places = tl.arange(0, BLOCK_K // IN_WORD)
    start_of_rows = weight + first.to(tl.int64) * weight_stride
    pointers = start_of_rows + (rows * weight_stride)[:, None] + places[None, :]
    up_pointers = pointers + N.to(tl.int64) * weight_stride

    inside = (places < WORDS)[None, :]
    tile = tl.load(pointers, mask=inside, other=0, eviction_policy="evict_first")
    if ACTIVATION:
        up_tile = tl.load(up_pointers, mask=inside, other=0, eviction_policy="evict_first")
    results = first + tl.arange(0, BLOCK_N)
    used = results < N
    added = tl.zeros([BLOCK_N], tl.float32)
    if BIAS:
        added += tl.load(bias + results, mask=used, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    if ADD:
        added += tl.load(out + results, mask=used, other=0.0).to(tl.float32)

    sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    up_sums = tl.zeros([BLOCK_N, CHUNKS], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        following = start + BLOCK_K
        # the next tile is asked for before this one is used
        next_words = following // IN_WORD
        next_inside = (places + next_words < WORDS)[None, :]
        next_tile = tl.load(pointers + next_words, mask=next_inside, other=0, eviction_policy="evict_first")
        if ACTIVATION:
            next_up_tile = tl.load(up_pointers + next_words, mask=next_inside, other=0, eviction_policy="evict_first")
        here = columns + start < K
        values = tl.load(x + start + columns, mask=here, other=0.0, eviction_policy="evict_last").to(tl.float32)
        if NORM:
            squares += values * values
            values *= tl.load(norm_weight + start + columns, mask=here, other=0.0, eviction_policy="evict_last")
        sums = _add_products(sums, tile, values, STORED, BLOCK_N, CHUNKS, VECTOR)
        tile = next_tile
        if ACTIVATION:
            up_sums = _add_products(up_sums, up_tile, values, STORED, BLOCK_N, CHUNKS, VECTOR)
            up_tile = next_up_tile

    result = tl.sum(sums, axis=1)
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
        result *= scale
    if ACTIVATION:
        up_result = tl.sum(up_sums, axis=1)
        if NORM:
            up_result *= scale
        result = activate(result, ACTIVATION) * up_result
    if BIAS or ADD:
        result += added
    tl.store(out + results, result.to(out.dtype.element_ty), mask=used)


@triton.jit
def _multiply(sums, tile, values, scales, FP8: tl.constexpr):
    """sums + tile [BLOCK_N, BLOCK_K] x values [BLOCK_K, BLOCK_T] * scales [BLOCK_N]."""
    if FP8:
        tile = decode_e4m3(tile, FP8).to(values.dtype)
        sums += tl.dot(tile, values, input_precision="ieee") * scales[:, None]
    else:
        sums = tl.dot(tile, values, sums, input_precision="ieee")
    return sums


@triton.jit
def _finish(sums, up_sums, bias, out, places, used, row_pointers, tokens, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr):
    """Write sums [BLOCK_N, BLOCK_T] of a product to `out` [T, N]."""
    if ACTIVATION:
        sums = activate(sums, ACTIVATION) * up_sums
    if BIAS:
        sums += tl.load(bias + places, mask=used, other=0.0).to(tl.float32)[:, None]
    pointers = row_pointers[None, :] + places[:, None]
    inside = used[:, None] & tokens[None, :]
    if ADD:
        sums += tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
    tl.store(pointers, sums.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def _matrix_kernel(
    x, weight, scales, bias, out, partial, tickets, T, N, x_stride, weight_stride, scale_stride, out_stride,
    K: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
    FP8: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """T <= BLOCK_T rows of x [T, K] times BLOCK_N rows of the weight; the programs along grid axis 1 share the columns.

    The weights are the left operand: a warpgroup of Hopper multiplies 64 rows of it at least, and takes FP8 that was widened in registers.
    """
    block = tl.program_id(0)
    share = tl.program_id(1)
    first = block * BLOCK_N
    rows = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first)
    columns = tl.arange(0, BLOCK_K)
    token_ids = tl.arange(0, BLOCK_T)
    start_of_rows = weight + first.to(tl.int64) * weight_stride
    pointers = start_of_rows + (rows * weight_stride)[:, None] + columns[None, :]
    up_pointers = pointers + N.to(tl.int64) * weight_stride
    x_pointers = x + (tl.minimum(token_ids, T - 1) * x_stride)[None, :] + columns[:, None]  # [BLOCK_K, BLOCK_T]
    scale_pointers = scales + (first + rows) // BLOCK_ROWS * scale_stride
    up_scale_pointers = scales + (first + rows + N) // BLOCK_ROWS * scale_stride
    COLUMNS: tl.constexpr = ((K + BLOCK_K - 1) // BLOCK_K + SPLIT - 1) // SPLIT * BLOCK_K  # of a share
    EVEN: tl.constexpr = K % (SPLIT * BLOCK_K) == 0
    begin = share * COLUMNS
    wait_for_inputs(PDL)

    sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    up_sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in range(0, COLUMNS, BLOCK_K):
        start = begin + step
        if EVEN:
            tile = tl.load(pointers + start, eviction_policy="evict_first")
            values = tl.load(x_pointers + start)
        else:
            inside = columns + start < K
            tile = tl.load(pointers + start, mask=inside[None, :], other=0, eviction_policy="evict_first")
            values = tl.load(x_pointers + start, mask=inside[:, None], other=0.0)
        scale = tl.load(scale_pointers + tl.minimum(start, K - 1) // BLOCK_COLUMNS) if FP8 else 1.0
        sums = _multiply(sums, tile, values, scale, FP8)
        if ACTIVATION:
            if EVEN:
                up_tile = tl.load(up_pointers + start, eviction_policy="evict_first")
            else:
                up_tile = tl.load(up_pointers + start, mask=inside[None, :], other=0, eviction_policy="evict_first")
            up_scale = tl.load(up_scale_pointers + tl.minimum(start, K - 1) // BLOCK_COLUMNS) if FP8 else 1.0
            up_sums = _multiply(up_sums, up_tile, values, up_scale, FP8)

    places = first + tl.arange(0, BLOCK_N)
    used = places < N
    tokens = token_ids < T
    row_pointers = out + token_ids * out_stride
    if SPLIT == 1:
        _finish(sums, up_sums, bias, out, places, used, row_pointers, tokens, BIAS, ADD, ACTIVATION)
    else:
        # Each share leaves its sums; the one that comes last adds all of them, always in the same order, and resets the ticket.
        TILE: tl.constexpr = BLOCK_N * BLOCK_T
        TILES: tl.constexpr = 2 if ACTIVATION else 1
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + token_ids[None, :]
        shares = partial + block.to(tl.int64) * (SPLIT * TILES * TILE) + offsets
        tl.store(shares + share * (TILES * TILE), sums)
        if ACTIVATION:
            tl.store(shares + share * (TILES * TILE) + TILE, up_sums)
        tl.debug_barrier()
        if tl.atomic_add(tickets + block, 1, sem="acq_rel") == SPLIT - 1:
            sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            up_sums = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
            for other in tl.static_range(SPLIT):
                sums += tl.load(shares + other * (TILES * TILE), cache_modifier=".cg")
                if ACTIVATION:
                    up_sums += tl.load(shares + other * (TILES * TILE) + TILE, cache_modifier=".cg")
            tl.store(tickets + block, 0)
            _finish(sums, up_sums, bias, out, places, used, row_pointers, tokens, BIAS, ADD, ACTIVATION)


@cache
def _tickets(device: torch.device, thread: int) -> torch.Tensor:
    """Zeros that every split product leaves as zeros. Products of one thread, an engine's, run one after another, so they share them.

    The first split product must run outside a CUDA graph's capture, as its compilation has to anyway.
    """
    return torch.zeros(MAX_SPLIT_BLOCKS, dtype=torch.int32, device=device)


_EVEN_ROWS = 128  # cuBLAS multiplies a multiple of these 13% faster than the 12,352 rows of Qwen3.5-9B's DeltaNet projection
_STORED = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # what a word of weights holds


def _is_skinny(num_rows: int, weight: Weight, device: torch.device) -> bool:
    """Whether the kernels here multiply `num_rows` rows; else cuBLAS does. Triton knows no tensor cores before capability 8.0, cuBLAS does."""
    if num_rows <= 1:
        return True
    return num_rows <= MAX_ROWS and (isinstance(weight, Fp8Weight) or device_limits(device).tensor_cores)


def _largest_power_of_two(value: int) -> int:
    """The largest power of two that divides `value`."""
    return value & -value


def _in_words(weight: Weight) -> bool:
    """Whether the rows can be read 16 bytes at a time."""
    values = weight.values
    return all(number * values.itemsize % 16 == 0 for number in (*values.shape[1:], values.stride(0))) and values.data_ptr() % 16 == 0


def _one_row(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor, config: VectorConfig, add: bool,
    norm: tuple[torch.Tensor, float] | None, activation: int,
) -> None:  # fmt: skip
    """Write the product of x [1, K] to `out` [1, N]."""
    values = weight.values
    K, N = x.shape[1], values.shape[0] // (2 if activation else 1)
    words, block_n = values.view(torch.int32), config.block_n
    norm_weight, eps = norm or (x, 0.0)
    options = {"BLOCK_K": config.block_k, "num_warps": config.num_warps, **launch_options(x.device)}
    if isinstance(weight, Fp8Weight):
        block = weight.block
        block_n = min(block_n, _largest_power_of_two(block[0]), _largest_power_of_two(N) if activation else block_n)
        assembly = x.is_cuda and x.data_ptr() % 16 == 0 and norm_weight.data_ptr() % 16 == 0
        fp8_row_kernel[(triton.cdiv(N, block_n),)](
            x, norm_weight, words, weight.scales, values if bias is None else bias, out, N, weight.scales.stride(0), eps,
            K=K, STRIDE=words.stride(0), FULL=N % block_n == 0, NORM=norm is not None, BIAS=bias is not None, ADD=add, ACTIVATION=activation,
            WORDS=config.words, MODE=decode_mode(x.device), ASSEMBLY=assembly, BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1], BLOCK_N=block_n, **options,
        )  # fmt: skip
        return
    _vector_kernel[(triton.cdiv(N, block_n),)](
        x, norm_weight, words, values if bias is None else bias, out, N, words.stride(0), eps,
        K=K, NORM=norm is not None, BIAS=bias is not None, ADD=add, ACTIVATION=activation, STORED=_STORED[values.dtype],
        BLOCK_N=block_n, VECTOR=16 // values.itemsize, **options,
    )  # fmt: skip


def _one_row_streamed(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor, config: StreamConfig, add: bool,
    norm: tuple[torch.Tensor, float] | None, activation: int,
) -> None:  # fmt: skip
    """`_one_row` by programs that stay."""
    values, block_n = weight.values, config.block_n
    K, N = x.shape[1], values.shape[0] // (2 if activation else 1)
    words = values.view(torch.int32)
    norm_weight, eps = norm or (x, 0.0)
    stored, scales, block = STORED_E4M3, values, (1, 16)
    if isinstance(weight, Fp8Weight):
        scales, block = weight.scales, weight.block
        block_n = min(block_n, _largest_power_of_two(block[0]), _largest_power_of_two(N) if activation else block_n)
    else:
        stored = {torch.float32: STORED_FLOAT32, torch.float16: STORED_FLOAT16, torch.bfloat16: STORED_BFLOAT16}[values.dtype]
    blocks = triton.cdiv(N, block_n)
    programs = min(blocks, device_limits(x.device).num_multiprocessors * config.per_multiprocessor)
    row_stream_kernel[(programs,)](
        x, norm_weight, words, scales, values if bias is None else bias, out, N, blocks, programs, scales.stride(0), eps,
        K=K, STRIDE=words.stride(0), FULL=N % block_n == 0, NORM=norm is not None, BIAS=bias is not None, ADD=add, ACTIVATION=activation,
        STORED=stored, MODE=decode_mode(x.device), ASSEMBLY=x.is_cuda and x.data_ptr() % 16 == 0 and norm_weight.data_ptr() % 16 == 0,
        BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1], BLOCK_N=block_n, BLOCK_K=config.block_k, WORDS=config.words,
        num_warps=config.num_warps, **launch_options(x.device),
    )  # fmt: skip


def _some_rows(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor, config: MatrixConfig, add: bool, activation: int
) -> None:  # fmt: skip
    """Write the product of x [T, K], T <= 64, to `out` [T, N]."""
    values, device = weight.values, x.device
    T, K = x.shape
    N = values.shape[0] // (2 if activation else 1)
    stored, scales, fp8, block, block_k = values, values, 0, (1, 16), config.block_k
    if isinstance(weight, Fp8Weight):
        stored, scales, fp8, block = values.view(torch.uint8), weight.scales, decode_mode(device), weight.block
        block_k = min(block_k, _largest_power_of_two(block[1]))
    least = least_columns(x, config.block_n, config.num_warps) if fp8 else 16
    block_t, blocks = max(least, triton.next_power_of_2(T)), triton.cdiv(N, config.block_n)
    partial = tickets = out
    if config.split > 1:
        if blocks > MAX_SPLIT_BLOCKS:
            raise ValueError(f"A product whose columns are split has at most {MAX_SPLIT_BLOCKS} blocks of rows, not {blocks}.")
        partial = torch.empty(config.split * blocks * config.block_n * block_t * (2 if activation else 1), dtype=torch.float32, device=device)
        tickets = _tickets(device, threading.get_ident())
    _matrix_kernel[(blocks, config.split)](
        x, stored, scales, values if bias is None else bias, out, partial, tickets, T, N, x.stride(0), values.stride(0), scales.stride(0), out.stride(0),
        K=K, BIAS=bias is not None, ADD=add, ACTIVATION=activation, FP8=fp8, BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1],
        BLOCK_T=block_t, BLOCK_N=config.block_n, BLOCK_K=block_k, SPLIT=config.split,
        num_warps=config.num_warps, num_stages=config.num_stages, **launch_options(device),
    )  # fmt: skip


def _compute_dtype(weight: Weight, out_dtype: torch.dtype) -> torch.dtype:
    """Of the normed rows."""
    return weight.values.dtype if isinstance(weight, DenseWeight) else out_dtype


def _few_rows(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None, out: torch.Tensor, *, config: Config | None, add: bool = False,
    norm: tuple[torch.Tensor, float] | None = None, activation: int = 0,
) -> None:  # fmt: skip
    """Write the product of x [T, K], 1 <= T <= 64, to `out` [T, N], of its norm where one is given."""
    T, K = x.shape
    if config is None:
        N = weight.shape[0] // (2 if activation else 1)
        rows = 1 if T == 1 and _in_words(weight) else max(T, 2)
        config = choose_config(rows, N, K, weight.values.itemsize, bool(activation), device_limits(x.device))
    if isinstance(config, VectorConfig):
        if T != 1:
            raise ValueError(f"A VectorConfig multiplies one row, not {T}.")
        _one_row(x, weight, bias, out, config, add, norm, activation)
        return
    if isinstance(config, StreamConfig):
        if T != 1:
            raise ValueError(f"A StreamConfig multiplies one row, not {T}.")
        _one_row_streamed(x, weight, bias, out, config, add, norm, activation)
        return
    if norm is not None:
        x = rms_norm(x, *norm, _compute_dtype(weight, out.dtype))
    _some_rows(x, weight, bias, out, config, add, activation)


def _many_rows(x: torch.Tensor, weight: Weight, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """x [T, K] W^T -> [T, N] through cuBLAS, to `out` where given. With float32 wanted of half-precision operands the sums are not rounded on the way."""
    values = _expanded(weight, x.dtype)
    if out_dtype == x.dtype:
        even = values.shape[0] // _EVEN_ROWS * _EVEN_ROWS
        if x.is_cuda and out is None and 0 < even < values.shape[0]:  # the rows left over apart
            out = torch.empty(x.shape[0], values.shape[0], dtype=out_dtype, device=x.device)
            for rows in (slice(0, even), slice(even, None)):
                torch.mm(x, values[rows].t(), out=out[:, rows])
            return out
        return F.linear(x, values) if out is None else torch.mm(x, values.t(), out=out)
    if out is not None:
        return out.copy_(_many_rows(x, weight, out_dtype))
    if x.is_cuda and out_dtype == torch.float32:
        return torch.mm(x, values.t(), out_dtype=torch.float32)
    return F.linear(x.float(), values.float()).to(out_dtype)


def _expanded(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    """[N, K] for cuBLAS."""
    return dequantize_fp8(weight, dtype) if isinstance(weight, Fp8Weight) else weight.values


def _add_many_rows(hidden: torch.Tensor, x: torch.Tensor, weight: Weight) -> None:
    """hidden [T, N] float32 += x [T, K] W^T through cuBLAS, which adds before it rounds."""
    values = _expanded(weight, x.dtype)
    if x.dtype == torch.float32:
        hidden.addmm_(x, values.t())
    elif x.is_cuda:
        torch.addmm(hidden, x, values.t(), out_dtype=torch.float32, out=hidden)
    else:
        hidden.addmm_(x.float(), values.float().t())


def linear(
    x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, *,
    out: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """x W^T + bias.

    Args:
        x: [T, K] in the weight's dtype (with FP8 weights any float dtype, in which the product is computed), its rows contiguous.
        weight: [N, K].
        bias: [N] any float dtype.
        out_dtype: of the result; x's where None.
        out: [T, N], its rows contiguous, to write to: columns of a wider matrix, say. It then says the dtype.
        config: tile sizes instead of the chosen ones, for T <= 64.

    Returns:
        [T, N].
    """
    T, dtype = x.shape[0], out.dtype if out is not None else out_dtype or x.dtype
    if not _is_skinny(T, weight, x.device):
        result = _many_rows(x, weight, dtype, out)
        return result if bias is None else result.add_(bias)
    out = torch.empty(T, weight.shape[0], dtype=dtype, device=x.device) if out is None else out
    if T:
        _few_rows(x, weight, bias, out, config=config)
    return out


def add_linear(
    hidden: torch.Tensor, x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, *, config: Config | None = None
) -> torch.Tensor:  # fmt: skip
    """hidden += x W^T + bias, in place.

    Args:
        hidden: [T, N] float32, its rows contiguous.
        x, weight, bias, config: as in `linear`.

    Returns:
        `hidden`.
    """
    if not _is_skinny(x.shape[0], weight, x.device):
        _add_many_rows(hidden, x, weight)
        return hidden if bias is None else hidden.add_(bias)
    if x.shape[0]:
        _few_rows(x, weight, bias, hidden, config=config, add=True)
    return hidden


def norm_linear(
    hidden: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: Weight, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None, *,
    out: torch.Tensor | None = None, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """rms_norm(hidden) W^T + bias. For one row it is one kernel: the square sum is taken beside the product, which it scales at the end.

    Args:
        hidden: [T, K] float32, its rows contiguous.
        norm_weight: [K] float32.
        eps: of the norm.
        weight, bias, out, config: as in `linear`.
        out_dtype: of the result, and of the normed rows where the weights are FP8; the weight's where None, which FP8 weights do not allow.

    Returns:
        [T, N].
    """
    T, dtype = hidden.shape[0], out.dtype if out is not None else out_dtype or weight.values.dtype
    if not _is_skinny(T, weight, hidden.device):
        return linear(rms_norm(hidden, norm_weight, eps, _compute_dtype(weight, dtype)), weight, bias, dtype, out=out)
    out = torch.empty(T, weight.shape[0], dtype=dtype, device=hidden.device) if out is None else out
    if T:
        _few_rows(hidden, weight, bias, out, config=config, norm=(norm_weight, eps))
    return out


def norm_gated_linear(
    hidden: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up: Weight, activation: str, out_dtype: torch.dtype | None = None, *,
    config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """activation(gate) * up of rms_norm(hidden) times the gate rows and the up rows.

    Args:
        hidden: [T, K] float32, its rows contiguous.
        norm_weight: [K] float32.
        eps: of the norm.
        gate_up: [2N, K], the gate's rows first.
        activation: "silu" or "gelu_tanh".
        out_dtype: as in `norm_linear`.
        config: as in `linear`.

    Returns:
        [T, N].
    """
    dtype = out_dtype or gate_up.values.dtype
    T, N = hidden.shape[0], gate_up.shape[0] // 2
    if not _is_skinny(T, gate_up, hidden.device):
        return gated_activation(_many_rows(rms_norm(hidden, norm_weight, eps, _compute_dtype(gate_up, dtype)), gate_up, dtype), activation)
    out = torch.empty(T, N, dtype=dtype, device=hidden.device)
    if T:
        _few_rows(hidden, gate_up, None, out, config=config, norm=(norm_weight, eps), activation=ACTIVATIONS[activation])
    return out


def _matrix(weight: Weight) -> torch.Tensor:
    return dequantize_fp8_reference(weight, torch.float32) if isinstance(weight, Fp8Weight) else weight.values.float()


def linear_reference(x: torch.Tensor, weight: Weight, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None) -> torch.Tensor:
    """`linear` in torch, in float32."""
    return F.linear(x.float(), _matrix(weight), None if bias is None else bias.float()).to(out_dtype or x.dtype)


def norm_linear_reference(
    hidden: torch.Tensor, norm_weight: torch.Tensor, eps: float, weight: Weight, bias: torch.Tensor | None = None, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`norm_linear` in torch, in float32."""
    return linear_reference(rms_norm_reference(hidden, norm_weight, eps, torch.float32), weight, bias, out_dtype or weight.values.dtype)


def norm_gated_linear_reference(
    hidden: torch.Tensor, norm_weight: torch.Tensor, eps: float, gate_up: Weight, activation: str, out_dtype: torch.dtype | None = None
) -> torch.Tensor:
    """`norm_gated_linear` in torch, in float32."""
    both = norm_linear_reference(hidden, norm_weight, eps, gate_up, out_dtype=torch.float32)
    return gated_activation_reference(both, activation).to(out_dtype or gate_up.values.dtype)
