"""FP8 (E4M3) matrices with block scales, as Triton kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import capability

DECODE_BITS, DECODE_CONVERT = 1, 2  # how a kernel reads E4M3: by shifting bits, or by the conversion that capability 8.9 brings


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """A matrix [N, K] of E4M3 values, each multiplied by the scale of its block.

    Args:
        values: [N, K] float8_e4m3fn, its rows contiguous.
        scales: [ceil(N / block[0]), ceil(K / block[1])] float32, contiguous.
        block: rows and columns that share a scale. The columns are a multiple of 16.
    """

    values: torch.Tensor
    scales: torch.Tensor
    block: tuple[int, int]

    def __post_init__(self) -> None:
        rows, columns = self.values.shape
        wanted = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if self.values.dtype != torch.float8_e4m3fn or self.scales.dtype != torch.float32 or tuple(self.scales.shape) != wanted:
            found = f"{self.values.dtype}, {self.scales.dtype} {tuple(self.scales.shape)}"
            raise ValueError(f"FP8 weights of {rows} x {columns} are float8_e4m3fn with float32 scales {wanted}, not {found}.")
        if self.block[1] % 16:
            raise ValueError(f"FP8 blocks have a multiple of 16 columns, not {self.block[1]}.")

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes + self.scales.nbytes


def decode_mode(device: torch.device) -> int:
    """DECODE_CONVERT where the device converts E4M3, else DECODE_BITS."""
    return DECODE_CONVERT if capability(device) >= (8, 9) else DECODE_BITS


@triton.jit
def decode_e4m3(stored, MODE: tl.constexpr):
    """Bytes that hold E4M3 values -> float16, exact. MODE: DECODE_BITS (1) or DECODE_CONVERT (2).

    E4M3 has 4 bits of exponent of bias 7 and 3 of mantissa. Moved to a float16's place, whose bias is 15, they make the value divided by 256,
    that of a subnormal too. The code that is no number, 0x7f, then reads as 480: no checkpoint holds it.
    """
    if MODE == 2:
        values = stored.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        bits = stored.to(tl.uint16)
        moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        values = moved.to(tl.float16, bitcast=True) * 256.0
    return values


@triton.jit
def _dequantize_kernel(
    weight, scales, out, N, K, weight_stride, scale_stride, out_stride,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, MODE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < N)[:, None] & (columns < K)[None, :]
    stored = tl.load(weight + rows.to(tl.int64)[:, None] * weight_stride + columns[None, :], mask=inside, other=0)
    scale = tl.load(scales + (rows // BLOCK_ROWS)[:, None] * scale_stride + (columns // BLOCK_COLUMNS)[None, :], mask=inside, other=0.0)
    values = decode_e4m3(stored, MODE).to(tl.float32) * scale
    values = tl.where((stored & 0x7F) == 0x7F, float("nan"), values)
    tl.store(out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :], values.to(out.dtype.element_ty), mask=inside)


def dequantize_fp8(weight: Fp8Weight, out_dtype: torch.dtype, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight [N, K] -> value * scale, computed in float32, [N, K] in `out_dtype`, written to `out` where that is given."""
    N, K = weight.shape
    out = torch.empty(N, K, dtype=out_dtype, device=weight.values.device) if out is None else out
    mode = decode_mode(out.device)
    block_n, block_k = (16, 512)
    _dequantize_kernel[(triton.cdiv(N, block_n), triton.cdiv(K, block_k))](
        weight.values.view(torch.uint8), weight.scales, out, N, K, weight.values.stride(0), weight.scales.stride(0), out.stride(0),
        BLOCK_ROWS=weight.block[0], BLOCK_COLUMNS=weight.block[1], MODE=mode, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return out


def dequantize_fp8_reference(weight: Fp8Weight, out_dtype: torch.dtype) -> torch.Tensor:
    """`dequantize_fp8` in torch."""
    N, K = weight.shape
    scales = weight.scales.repeat_interleave(weight.block[0], 0)[:N].repeat_interleave(weight.block[1], 1)[:, :K]
    return (weight.values.float() * scales).to(out_dtype)
