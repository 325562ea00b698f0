"""Products with GGUF matrices that read their planes (see gguf_weight.py), and those matrices' values.

- One token or two: a program sums a few rows' products for a token in float32, codes exact, scales applied to the sum of each group: nothing is rounded but x.
- Up to 64 tokens: a tile of weights is rounded to x's dtype in registers and multiplied on the tensor cores.
- More: slices of rows are dequantized to scratch memory and multiplied by the device's library.

A code becomes a float without a conversion: or-ed in place into the mantissa of 2**23, whose lowest bit is 1. A field at bits BITS * p so counts
2**(BITS * p) times its worth, which the other factor makes up for.
"""

# mypy: disable-error-code="assignment,misc"
# (a list that a kernel grows in an unrolled loop is empty to mypy)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.gguf_weight import GgufWeight
from pocketllm.torch_engine.kernels.launch import least_columns, uses_pdl

MAX_SKINNY_TOKENS = 64
_MAX_TOKENS_WITHOUT_TENSOR_CORES = 8  # by token; from there on the library has the tensor cores that Triton does not use before 8.0
_SCRATCH_BYTES = 2**26


_FLOAT_BITS = 0x4B000000  # of 2**23; an argument of the kernels, since the compiler would spend an instruction more on a constant


@triton.jit
def _load_units(plane, rows, units, mask, WORDS: tl.constexpr, OFFSET: tl.constexpr, STRIDE: tl.constexpr):
    """One word of each unit of a plane with WORDS words a unit. Here and below, rows and units are two axes of length 1 and n, in any order."""
    # without the hint the compiler would give each thread neighbouring units, and move them through shared memory to the threads of their quants
    places = tl.max_contiguous(rows * STRIDE + units * WORDS, [1, 1])
    return tl.load(plane + OFFSET + places, mask=mask, other=0)


@triton.jit
def _load_quants(quants, rows, units, num_units, NUM_COLUMNS: tl.constexpr, BITS: tl.constexpr):
    """The four words of each unit, on an axis behind: int32 [.., .., 4]."""
    places = rows[:, :, None] * (NUM_COLUMNS * BITS // 32) + (units[:, :, None] * 4 + tl.arange(0, 4)[None, None, :])
    return tl.load(quants + places, mask=(units < num_units)[:, :, None], other=0)


@triton.jit
def _load_high(high, rows, units, mask, FIELD: tl.constexpr, NUM_COLUMNS: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr):
    """The upper bits of a field's half of each word, each right above its low part: int32 [.., .., 4]; 0 without any."""
    if HIGH == 0:
        return tl.zeros([1, 1, 4], tl.int32)
    else:
        HALF: tl.constexpr = FIELD * BITS // 16
        SLOTS: tl.constexpr = BITS // HIGH
        if SLOTS == 4:  # both halves in one word
            words = _load_units(high, rows, units, mask, 1, 0, NUM_COLUMNS * HIGH // 32) >> (16 * HALF)
        else:
            words = _load_units(high, rows, units, mask, 2, HALF, NUM_COLUMNS * HIGH // 32)
        word = tl.arange(0, 4)[None, None, :]
        return ((words[:, :, None] >> (16 * (word // SLOTS))) << BITS) >> (HIGH * (word % SLOTS))


@triton.jit
def _field(words, high, table, float_bits, FIELD: tl.constexpr, BITS: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, TABLE: tl.constexpr):
    """A field of words as float32: code - bias, times 2**place for its place in its half of the word; or the code's value in the table."""
    PLACE: tl.constexpr = FIELD * BITS % 16
    half = words >> (FIELD * BITS - PLACE)
    if TABLE:
        return tl.load(table + ((half >> PLACE) & 15)).to(tl.float32)  # of two bytes, which the compiler does not pass through shared memory
    else:
        if HIGH > 0:  # the low bits of every other field, between them those that belong above: one instruction for all of them
            EVEN: tl.constexpr = 0x0F0F0F0F if BITS == 4 else 0x33333333
            half = half & EVEN | high & ~EVEN if PLACE // BITS % 2 == 0 else half & ~EVEN | high & EVEN
        bits = half & (((1 << (BITS + HIGH)) - 1) << PLACE) | float_bits
        return bits.to(tl.float32, bitcast=True) - (8388608.0 + (BIAS << PLACE))


@triton.jit
def _unplaced(value, FIELD: tl.constexpr, BITS: tl.constexpr, TABLE: tl.constexpr):
    """value / 2**place, which makes up for what `_field` leaves in."""
    if TABLE:
        return value
    else:
        return value * (1.0 / (1 << (FIELD * BITS % 16)))


@triton.jit
def _unit_scales(
    scales, subs, rows, units, mask,
    NUM_COLUMNS: tl.constexpr, BITS: tl.constexpr, SCALE_SPAN: tl.constexpr, SUB_SPAN: tl.constexpr,
):  # fmt: skip
    """The scale word and the sub-scale word of each unit, as stored."""
    place = tl.max_contiguous(rows * (NUM_COLUMNS // SCALE_SPAN) + units * (128 // BITS) // SCALE_SPAN, [1, 1])
    scale = tl.load(scales + place, mask=mask, other=0)
    if SUB_SPAN == 0:
        return scale, scale
    else:
        return scale, _load_units(subs, rows, units, mask, 1, 0, NUM_COLUMNS * BITS // 128).to(tl.int32)


@triton.jit
def _group_scale(scale, sub, GROUP: tl.constexpr, SUB_SPAN: tl.constexpr, HAS_MINIMUM: tl.constexpr):
    """Scale and minimum of a group of each unit, float32: value = scale * code - minimum. Without minimums the second is not to be used."""
    if HAS_MINIMUM:
        factor = (scale & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        minimum = (scale >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        if SUB_SPAN == 0:
            return factor, -minimum
        elif SUB_SPAN == 16:
            return factor * ((sub >> (8 * GROUP)) & 15).to(tl.float32), minimum * ((sub >> (8 * GROUP + 4)) & 15).to(tl.float32)
        else:
            return factor * (sub & 255).to(tl.float32), minimum * ((sub >> 8) & 255).to(tl.float32)
    else:
        factor = scale.to(tl.float32)
        if SUB_SPAN > 0:
            factor *= ((sub << (24 - 8 * GROUP)) >> 24).to(tl.float32)
        return factor, factor


@triton.jit
def _weight_tile(
    quants, high, scales, subs, table, float_bits, rows, first_unit, num_units,
    UNITS: tl.constexpr, NUM_COLUMNS: tl.constexpr,
    BITS: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, SCALE_SPAN: tl.constexpr, SUB_SPAN: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, TABLE: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """Values [rows, UNITS * unit] from a unit on, columns in order, rounded to DTYPE from exact float32; those past the row's end are finite."""
    units = (first_unit + tl.arange(0, UNITS))[None, :]
    mask = units < num_units
    words = _load_quants(quants, rows[:, None], units, num_units, NUM_COLUMNS, BITS)
    scale, sub = _unit_scales(scales, subs, rows[:, None], units, mask, NUM_COLUMNS, BITS, SCALE_SPAN, SUB_SPAN)
    FIELDS: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = 128 // BITS // SUB_SPAN if SUB_SPAN > 0 else 1
    values = ()
    for field in tl.static_range(FIELDS):
        above = _load_high(high, rows[:, None], units, mask, field, NUM_COLUMNS, BITS, HIGH)
        code = _unplaced(_field(words, above, table, float_bits, field, BITS, HIGH, BIAS, TABLE), field, BITS, TABLE)
        factor, minimum = _group_scale(scale, sub, field * GROUPS // FIELDS, SUB_SPAN, HAS_MINIMUM)
        value = code * factor[:, :, None]
        if HAS_MINIMUM:
            value -= minimum[:, :, None]
        values += (value.to(DTYPE),)
    # each join adds an axis behind, that of a bit of the field's number: the highest first
    if FIELDS == 4:
        tile = tl.join(tl.join(values[0], values[2]), tl.join(values[1], values[3]))
    elif FIELDS == 8:
        tile = tl.join(
            tl.join(tl.join(values[0], values[4]), tl.join(values[2], values[6])),
            tl.join(tl.join(values[1], values[5]), tl.join(values[3], values[7])),
        )
    else:
        tile = tl.join(
            tl.join(
                tl.join(tl.join(values[0], values[8]), tl.join(values[4], values[12])),
                tl.join(tl.join(values[2], values[10]), tl.join(values[6], values[14])),
            ),
            tl.join(
                tl.join(tl.join(values[1], values[9]), tl.join(values[5], values[13])),
                tl.join(tl.join(values[3], values[11]), tl.join(values[7], values[15])),
            ),
        )
    tile = tl.reshape(tile, [rows.shape[0], UNITS, 4, FIELDS])
    return tl.reshape(tl.permute(tile, (0, 1, 3, 2)), [rows.shape[0], UNITS * (128 // BITS)])


@triton.jit
def _gemv_kernel(
    x, quants, high, scales, subs, table, float_bits, bias, out, num_rows, x_stride, out_stride,
    NUM_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, UNITS: tl.constexpr,
    BITS: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, SCALE_SPAN: tl.constexpr, SUB_SPAN: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, TABLE: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = 128 // BITS
    NUM_UNITS: tl.constexpr = NUM_COLUMNS // UNIT
    FIELDS: tl.constexpr = 32 // BITS
    GROUPS: tl.constexpr = UNIT // SUB_SPAN if SUB_SPAN > 0 else 1
    x += tl.program_id(0) * x_stride  # tokens next to each other, so that the second-level cache serves all but the first
    out += tl.program_id(0) * out_stride
    wanted = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows = tl.minimum(wanted, num_rows - 1).to(tl.int64)[None, :]
    word = tl.arange(0, 4)
    # units before rows: the compiler lets the threads of a warp run along the first axis, and a thread's rows share what it loads of x
    units = tl.arange(0, UNITS)[:, None]
    words = _load_quants(quants, rows, units, NUM_UNITS, NUM_COLUMNS, BITS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([UNITS, BLOCK_ROWS], tl.float32)
    for first in range(0, NUM_UNITS, UNITS):
        units = first + tl.arange(0, UNITS)[:, None]
        mask = units < NUM_UNITS
        scale, sub = _unit_scales(scales, subs, rows, units, mask, NUM_COLUMNS, BITS, SCALE_SPAN, SUB_SPAN)
        following = _load_quants(quants, rows, units + UNITS, NUM_UNITS, NUM_COLUMNS, BITS)
        part = tl.zeros([UNITS, BLOCK_ROWS, 4], tl.float32)
        total = tl.zeros([UNITS, 4], tl.float32)
        for field in tl.static_range(FIELDS):
            value = tl.load(x + (units * UNIT + 4 * field + word[None, :]), mask=mask, other=0.0).to(tl.float32)
            if HAS_MINIMUM:
                total += value
            above = _load_high(high, rows, units, mask, field, NUM_COLUMNS, BITS, HIGH)
            part += _field(words, above, table, float_bits, field, BITS, HIGH, BIAS, TABLE) * _unplaced(value, field, BITS, TABLE)[:, None, :]
            if (field + 1) % (FIELDS // GROUPS) == 0:
                factor, minimum = _group_scale(scale, sub, field * GROUPS // FIELDS, SUB_SPAN, HAS_MINIMUM)
                sums += factor * tl.sum(part, 2)
                part = tl.zeros([UNITS, BLOCK_ROWS, 4], tl.float32)
                if HAS_MINIMUM:
                    sums -= minimum * tl.sum(total, 1)[:, None]
                    total = tl.zeros([UNITS, 4], tl.float32)
        words = following
    result = tl.sum(sums, 0)
    inside = wanted < num_rows
    if HAS_BIAS:
        result += tl.load(bias + wanted, mask=inside, other=0.0)
    if ADD:
        result += tl.load(out + wanted, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + wanted, result, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _skinny_kernel(
    x, quants, high, scales, subs, table, float_bits, bias, out, num_rows, num_tokens, x_stride, out_stride,
    NUM_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, UNITS: tl.constexpr, TOKENS: tl.constexpr,
    BITS: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, SCALE_SPAN: tl.constexpr, SUB_SPAN: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, TABLE: tl.constexpr, HAS_BIAS: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = 128 // BITS
    NUM_UNITS: tl.constexpr = NUM_COLUMNS // UNIT
    wanted = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows = tl.minimum(wanted, num_rows - 1).to(tl.int64)
    token = tl.arange(0, TOKENS)
    present = token < num_tokens
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([BLOCK_ROWS, TOKENS], tl.float32)
    for first in range(0, NUM_UNITS, UNITS):
        weight = _weight_tile(
            quants, high, scales, subs, table, float_bits, rows, first, NUM_UNITS, UNITS, NUM_COLUMNS,
            BITS, HIGH, BIAS, SCALE_SPAN, SUB_SPAN, HAS_MINIMUM, TABLE, x.dtype.element_ty,
        )  # fmt: skip
        column = first * UNIT + tl.arange(0, UNITS * UNIT)
        inputs = tl.load(x + (token[None, :] * x_stride + column[:, None]), mask=present[None, :] & (column < NUM_COLUMNS)[:, None], other=0.0)
        sums = tl.dot(weight, inputs, sums, input_precision="ieee")
    places = out + (token[:, None] * out_stride + wanted[None, :])
    inside = present[:, None] & (wanted < num_rows)[None, :]
    result = tl.trans(sums)
    if HAS_BIAS:
        result += tl.load(bias + wanted, mask=wanted < num_rows, other=0.0)[None, :]
    if ADD:
        result += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, result, mask=inside)


@triton.jit(do_not_specialize=["first_row", "num_wanted"])
def _values_kernel(
    ids, quants, high, scales, subs, table, float_bits, out, first_row, num_wanted, num_rows,
    NUM_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, UNITS: tl.constexpr,
    BITS: tl.constexpr, HIGH: tl.constexpr, BIAS: tl.constexpr, SCALE_SPAN: tl.constexpr, SUB_SPAN: tl.constexpr,
    HAS_MINIMUM: tl.constexpr, TABLE: tl.constexpr, HAS_IDS: tl.constexpr,
):  # fmt: skip
    UNIT: tl.constexpr = 128 // BITS
    wanted = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    rows = tl.load(ids + wanted, mask=wanted < num_wanted, other=0).to(tl.int64) if HAS_IDS else (first_row + wanted).to(tl.int64)
    rows = tl.maximum(tl.minimum(rows, num_rows - 1), 0)  # those past the end, and the ids of padding, which are not read
    first = tl.program_id(1) * UNITS
    tile = _weight_tile(
        quants, high, scales, subs, table, float_bits, rows, first, NUM_COLUMNS // UNIT, UNITS, NUM_COLUMNS,
        BITS, HIGH, BIAS, SCALE_SPAN, SUB_SPAN, HAS_MINIMUM, TABLE, out.dtype.element_ty,
    )  # fmt: skip
    column = first * UNIT + tl.arange(0, UNITS * UNIT)
    tl.store(out + (wanted.to(tl.int64)[:, None] * NUM_COLUMNS + column[None, :]), tile, mask=(wanted < num_wanted)[:, None] & (column < NUM_COLUMNS)[None, :])


@dataclass(frozen=True, slots=True)
class GgufConfig:
    """A kernel's tile: rows of the weight, columns (a power of two, at least 128), and warps of a program.

    Args:
        by_token: a program multiplies for one token, by the first of the module's ways, instead of for all by the second.
    """

    block_rows: int
    block_columns: int
    num_warps: int = 4
    by_token: bool = False


def candidates(num_tokens: int) -> list[GgufConfig]:
    """Tiles worth measuring for products of up to MAX_SKINNY_TOKENS tokens."""
    by_token = [GgufConfig(rows, columns, warps, True) for rows in (2, 4, 8) for columns in (1024, 2048) for warps in (1, 2, 4)]
    joint = [GgufConfig(rows, columns, warps) for rows in (16, 32, 64, 128) for columns in (128, 256) for warps in (4, 8) if rows * columns <= 2**14]
    return by_token if num_tokens == 1 else by_token + joint if num_tokens <= 8 else joint


def default_config(weight: GgufWeight, num_tokens: int) -> GgufConfig:
    """The tile for a product."""
    num_rows, num_columns = weight.shape
    if num_tokens <= (2 if _has_tensor_cores(weight.device) else _MAX_TOKENS_WITHOUT_TENSOR_CORES):
        # one warp, whose threads keep their parts of x in registers
        return GgufConfig(4, min(32 * weight.layout.unit, triton.next_power_of_2(num_columns)), 1, by_token=True)
    return GgufConfig(64 if num_rows >= 8192 else 32, 128)


def max_skinny_tokens(device: torch.device) -> int:
    """The most tokens that a product reads the planes for; more of them share the expanded matrix."""
    return MAX_SKINNY_TOKENS if _has_tensor_cores(device) else _MAX_TOKENS_WITHOUT_TENSOR_CORES


def _has_tensor_cores(device: torch.device) -> bool:
    """Whether Triton multiplies on tensor cores there: from compute capability 8.0 on. Its interpreter counts too."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def gguf_linear(
    x: torch.Tensor,
    weight: GgufWeight,
    out_dtype: torch.dtype | None = None,
    *,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    add: bool = False,
    config: GgufConfig | None = None,
) -> torch.Tensor:
    """x W^T (+ bias), or that added to `out`. It never waits for the device, and may be captured in a graph.

    Args:
        x: [T, K] float32, float16 or bfloat16, columns next to each other.
        weight: [N, K].
        out_dtype: of the result; x's if left out.
        bias: float32 [N].
        out: [T, N] to write to, columns next to each other, such as a range of a wider matrix's columns; its dtype counts instead of `out_dtype`.
        add: add to `out`, which must be given, instead.
        config: the kernel's tile, instead of `default_config`'s.

    Returns:
        [T, N], `out` where given.
    """
    num_tokens, num_columns = x.shape
    num_rows = weight.shape[0]
    assert num_columns == weight.shape[1], (x.shape, weight.shape)
    assert x.stride(1) == 1
    assert out is not None or not add
    if out is None:
        out = torch.empty(num_tokens, num_rows, dtype=out_dtype or x.dtype, device=x.device)
    assert out.shape == (num_tokens, num_rows)
    assert out.stride(1) == 1
    if num_tokens == 0:
        return out
    if num_tokens > max_skinny_tokens(x.device):
        _expanded_linear(x, weight, bias, out, add)
        return out
    config = config or default_config(weight, num_tokens)
    pdl = uses_pdl(x.device)
    options: dict[str, Any] = {"num_warps": config.num_warps, **({"launch_pdl": True} if pdl else {})}
    tile = {"BLOCK_ROWS": config.block_rows, "UNITS": max(1, config.block_columns // weight.layout.unit)}
    flags = {"HAS_BIAS": bias is not None, "ADD": add, "PDL": pdl}
    blocks = triton.cdiv(num_rows, config.block_rows)
    arguments = (x, *_planes(weight), out if bias is None else bias, out, num_rows)
    strides = (x.stride(0), out.stride(0), num_columns)
    if config.by_token:
        _gemv_kernel[(num_tokens, blocks)](*arguments, *strides, **tile, **_constants(weight), **flags, **options)
    else:
        tile["TOKENS"] = max(least_columns(x, config.block_rows, config.num_warps), triton.next_power_of_2(num_tokens))
        _skinny_kernel[(blocks,)](*arguments, num_tokens, *strides, **tile, **_constants(weight), **flags, **options)
    return out


def dequantize(weight: GgufWeight, out_dtype: torch.dtype, rows: slice | None = None, out: torch.Tensor | None = None) -> torch.Tensor:
    """Values [N, K], or of `rows` (of step 1) alone: float32 equal to the gguf package's to the bit, other dtypes rounded from it.

    Args:
        out: contiguous memory for the result, of `out_dtype`.
    """
    first, end, _ = (rows or slice(None)).indices(weight.shape[0])
    count = max(0, end - first)
    if out is None:
        out = torch.empty(count, weight.shape[1], dtype=out_dtype, device=weight.device)
    _launch_values(weight, None, out, first, 4)
    return out


def gguf_rows(weight: GgufWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding matrix: ids [T] of any integer dtype -> float32 [T, K]. An id below 0 stands for padding and gives some row."""
    out = torch.empty(ids.shape[0], weight.shape[1], dtype=torch.float32, device=weight.device)
    _launch_values(weight, ids, out, 0, 1)
    return out


def _launch_values(weight: GgufWeight, ids: torch.Tensor | None, out: torch.Tensor, first: int, block_rows: int) -> None:
    count, num_columns = out.shape
    if count == 0:
        return
    units = 1024 // weight.layout.unit
    grid = (triton.cdiv(count, block_rows), triton.cdiv(num_columns, 1024))
    _values_kernel[grid](
        out if ids is None else ids, *_planes(weight), out, first, count, weight.shape[0], num_columns, block_rows, units,
        **_constants(weight), HAS_IDS=ids is not None, num_warps=4,
    )  # fmt: skip


def _expanded_linear(x: torch.Tensor, weight: GgufWeight, bias: torch.Tensor | None, out: torch.Tensor, add: bool) -> None:
    num_rows, num_columns = weight.shape
    step = max(1, min(num_rows, _SCRATCH_BYTES // (num_columns * x.element_size())))
    scratch = torch.empty(step, num_columns, dtype=x.dtype, device=x.device)
    for first in range(0, num_rows, step):
        rows = slice(first, min(first + step, num_rows))
        values = dequantize(weight, x.dtype, rows, scratch[: rows.stop - first])
        part = out[:, rows]
        if add:
            part += torch.mm(x, values.t())
        elif out.dtype == x.dtype:
            torch.mm(x, values.t(), out=part)
        else:
            part.copy_(torch.mm(x, values.t()))
        if bias is not None:
            part += bias[rows]


def _planes(weight: GgufWeight) -> tuple[torch.Tensor | int, ...]:
    """The planes as the kernels take them; one that the type has not is never read."""
    quants = weight.quants
    return (
        quants,
        quants if weight.high is None else weight.high,
        weight.scales,
        quants if weight.subs is None else weight.subs,
        quants if weight.table is None else weight.table,
        _FLOAT_BITS,
    )


def _constants(weight: GgufWeight) -> dict[str, Any]:
    layout = weight.layout
    return {
        "BITS": layout.bits,
        "HIGH": layout.high_bits,
        "BIAS": layout.bias,
        "SCALE_SPAN": layout.scale_span,
        "SUB_SPAN": layout.sub_span,
        "HAS_MINIMUM": layout.has_minimum,
        "TABLE": layout.table,
    }


def gguf_linear_reference(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """x [T, K] times the transpose of dequantized `values` [N, K], in float32: [T, N]."""
    return x.float() @ values.float().t()
