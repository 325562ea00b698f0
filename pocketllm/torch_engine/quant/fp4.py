"""FP4 (E2M1) matrices with a power of two as the scale of each 32 neighbours in a row (the OCP Microscaling formats, 2023)."""

from __future__ import annotations

import numpy as np
import torch

GROUP = 32
# E2M1 by its four bits: a sign, two bits of exponent, one of mantissa.
CODES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_ROWS_AT_ONCE = 2**18  # values


def dequantize_fp4(stored: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write value * scale, which float32 holds exactly, to `out`.

    Args:
        stored: int8 [rows, columns / 2], two values a byte, the earlier one in its low bits.
        scales: [rows, columns / 32], float8_e8m0fnu.
        out: [rows, columns], any float dtype, on the same device.
    """
    codes = torch.tensor(CODES, device=stored.device)
    pairs = torch.stack([codes.repeat(16), codes.repeat_interleave(16)], dim=-1)  # [256, 2], by byte
    step = max(1, _ROWS_AT_ONCE // out.shape[1]) if stored.device.type == "cpu" else out.shape[0]
    for start in range(0, out.shape[0], step):
        part = slice(start, start + step)
        values = pairs[stored[part].view(torch.uint8).int()].view(-1, scales.shape[1], GROUP)
        out[part] = (values * scales[part].float().unsqueeze(-1)).view(-1, out.shape[1])


def unpack_mxfp4(blocks: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """GGUF's blocks, uint8 [rows, 17 * columns / 32], as values and scales of `dequantize_fp4`.

    A block is its scale, then 16 bytes: value j in the low bits of byte j, value j + 16 in its high ones.
    """
    stored = torch.from_numpy(np.ascontiguousarray(blocks)).unflatten(-1, (-1, 1 + GROUP // 2))
    codes = torch.cat([stored[..., 1:] & 15, stored[..., 1:] >> 4], dim=-1)  # [rows, columns / 32, 32]
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).flatten(1).view(torch.int8), stored[..., 0].contiguous().view(torch.float8_e8m0fnu)
