"""GGUF's 4-bit blocks in the layout of PyTorch's int4 CPU kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32  # weights that share a scale, in Q4_0 and Q4_1 alike
PACKABLE_TYPES = ("Q4_0", "Q4_1")


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A [out, in] matrix for `_weight_int4pack_mm_for_cpu`: w = (q - 8) * scale + zero.

    Args:
        packed: the nibbles, in the kernel's own order.
        scales_and_zeros: [in / 32, out, 2] bfloat16.
    """

    packed: torch.Tensor
    scales_and_zeros: torch.Tensor


def can_pack(tensor_type: str, shape: tuple[int, ...]) -> bool:
    """Whether the kernel takes a matrix [out, in] of this type and shape."""
    return tensor_type in PACKABLE_TYPES and len(shape) == 2 and shape[0] % 16 == 0 and shape[1] % BLOCK == 0


def pack_int4(tensor_type: str, blocks: np.ndarray) -> PackedInt4:
    """Repack blocks of Q4_0 (scale d, w = d * (q - 8)) or Q4_1 (scale d, minimum m, w = d * q + m); the nibbles stay as they are.

    The kernel holds scale and zero point as bfloat16, which rounds them: its cost in exactness.

    Args:
        tensor_type: "Q4_0" or "Q4_1".
        blocks: uint8 [out, bytes of a row], as stored.
    """
    num_rows = blocks.shape[0]
    header = 4 if tensor_type == "Q4_1" else 2
    by_block = np.ascontiguousarray(blocks).reshape(num_rows, -1, header + BLOCK // 2)
    numbers = torch.from_numpy(by_block[..., :header].copy().view(np.float16).astype(np.float32))  # [out, in / 32, 1 or 2]
    scales = numbers[..., 0]
    zeros = numbers[..., 1] + 8 * scales if tensor_type == "Q4_1" else torch.zeros_like(scales)
    nibbles = torch.from_numpy(by_block[..., header:].copy())
    quants = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).reshape(num_rows, -1).int()  # [out, in]
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(quants, 1)
    both = torch.stack([scales, zeros], dim=-1).transpose(0, 1).contiguous().bfloat16()
    return PackedInt4(packed, both)
