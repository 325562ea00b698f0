"""GGUF's quantized matrices in device memory: the same numbers in planes that aligned wide loads read.

A stored block mixes a scale of two bytes with quants of one or two bit depths, so nothing in it is aligned. Packing sorts a row into

- quants: the low bits (2, 4 or 8) of each value's code, in units of 16 bytes. A unit holds `unit` = 128 / bits consecutive values as four
  32-bit words; field j of word i is value 4 * j + i, so that one field of the four words meets four neighbours of the other operand.
- high: the bits above those, if any, each in the half word that a shift brings right above its field (see `_pack_high`).
- scales: a float16 for each 32 or 256 values; float16 scale and float16 minimum in one 32-bit word where there is a minimum.
- subs: what K types multiply these by for each 16 or 32 values, a byte each, in one word a unit.

value = (code - bias) * scale * sub - minimum * sub_minimum, or table[code] * scale * sub. Every product of these has at most 24 significant bits,
so float32 arithmetic in any grouping gives the gguf package's values to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import gguf
import numpy as np
import torch

from pocketllm.torch_engine.weights import StoredTensor

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # what the codes of IQ4_NL and IQ4_XS stand for

_PIECE_BYTES = 2**24  # stored bytes packed at once: temporaries are about twenty times that


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """How a type's values are laid out in the planes.

    Args:
        bits: of a code's low part.
        high_bits: of the rest.
        bias: subtracted from a code.
        scale_span: values that share a scale.
        sub_span: values that share a sub-scale, 0 without those.
        has_minimum: a minimum goes with each scale, and one with each sub-scale.
        table: codes are places in IQ4_VALUES.
    """

    bits: int
    high_bits: int
    bias: int
    scale_span: int
    sub_span: int = 0
    has_minimum: bool = False
    table: bool = False

    @property
    def unit(self) -> int:
        """Values in 16 bytes of the quants plane."""
        return 128 // self.bits

    @property
    def sub_bits(self) -> int:
        """Bits of the word that holds a unit's sub-scales: Q2_K packs sub-scale and sub-minimum in a byte, Q4_K and Q5_K give each a byte."""
        return 8 * self.unit // self.sub_span * (2 if self.has_minimum and self.sub_span == 32 else 1) if self.sub_span else 0


BLOCK_LAYOUTS = {
    "Q4_0": BlockLayout(4, 0, 8, 32),
    "Q4_1": BlockLayout(4, 0, 0, 32, has_minimum=True),
    "Q5_0": BlockLayout(4, 1, 16, 32),
    "Q5_1": BlockLayout(4, 1, 0, 32, has_minimum=True),
    "Q8_0": BlockLayout(8, 0, 128, 32),
    "Q2_K": BlockLayout(2, 0, 0, 256, 16, has_minimum=True),
    "Q3_K": BlockLayout(2, 1, 4, 256, 16),
    "Q4_K": BlockLayout(4, 0, 0, 256, 32, has_minimum=True),
    "Q5_K": BlockLayout(4, 1, 0, 256, 32, has_minimum=True),
    "Q6_K": BlockLayout(4, 2, 32, 256, 16),
    "IQ4_NL": BlockLayout(4, 0, 0, 32, table=True),
    "IQ4_XS": BlockLayout(4, 0, 0, 256, 32, table=True),
}


@dataclass(frozen=True, slots=True)
class GgufWeight:
    """A matrix [N, K] of one GGUF block type on a device, or several of them stacked.

    Args:
        type: such as "Q4_K".
        shape: (N, K).
        quants: int32 [N, K * bits / 32].
        high: int32 [N, K * high_bits / 32], or None.
        scales: float16 [N, K / scale_span], or int32 with the minimum in the upper half.
        subs: int8, int16 or int32 [N, K / unit], or None.
        table: IQ4_VALUES as float16 [16] of the types that have one, else None.
    """

    type: str
    shape: tuple[int, int]
    quants: torch.Tensor
    high: torch.Tensor | None
    scales: torch.Tensor
    subs: torch.Tensor | None
    table: torch.Tensor | None

    @property
    def layout(self) -> BlockLayout:
        return BLOCK_LAYOUTS[self.type]

    @property
    def num_bytes(self) -> int:
        """Device memory of the planes."""
        return sum(plane.nbytes for plane in (self.quants, self.high, self.scales, self.subs) if plane is not None)

    @property
    def device(self) -> torch.device:
        return self.quants.device

    @classmethod
    def pack(cls, tensors: Sequence[StoredTensor], device: torch.device | str) -> GgufWeight:
        """The rows of `tensors`, in order, as one matrix on `device`, which does the packing, a piece at a time.

        Args:
            tensors: of one block type in BLOCK_LAYOUTS and one row length; those of more than two dimensions count as the matrices that they stack.
        """
        kinds, widths = {tensor.type for tensor in tensors}, {tensor.shape[-1] for tensor in tensors}
        assert len(kinds) == 1, kinds
        assert len(widths) == 1, widths
        kind, num_columns = kinds.pop(), widths.pop()
        layout, device = BLOCK_LAYOUTS[kind], torch.device(device)
        sources = [tensor.blocks.reshape(-1, tensor.blocks.shape[-1]) for tensor in tensors if tensor.blocks is not None]
        num_rows = sum(len(source) for source in sources)

        def plane(bits_per_value: float, dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(num_rows, int(num_columns * bits_per_value) // (8 * dtype.itemsize), dtype=dtype, device=device)

        weight = cls(
            kind,
            (num_rows, num_columns),
            plane(layout.bits, torch.int32),
            plane(layout.high_bits, torch.int32) if layout.high_bits else None,
            plane(32 / layout.scale_span, torch.int32) if layout.has_minimum else plane(16 / layout.scale_span, torch.float16),
            plane(layout.sub_bits / layout.unit, {8: torch.int8, 16: torch.int16, 32: torch.int32}[layout.sub_bits]) if layout.sub_span else None,
            torch.tensor(IQ4_VALUES, dtype=torch.float16, device=device) if layout.table else None,
        )
        first = 0
        for source in sources:
            step = max(1, _PIECE_BYTES // source.shape[1])
            for start in range(0, len(source), step):
                piece = source[start : start + step]
                weight._fill(slice(first, first + len(piece)), piece)
                first += len(piece)
        return weight

    def _fill(self, rows: slice, stored: np.ndarray) -> None:
        """Pack the blocks of some rows into the planes."""
        kind = gguf.GGMLQuantizationType[self.type]
        bytes_per_block = gguf.GGML_QUANT_SIZES[kind][1]
        blocks = torch.from_numpy(np.array(stored)).to(self.device).reshape(-1, bytes_per_block)  # a copy: a mapped file is not writable
        parts = _split(self.type, blocks)
        num_rows, layout = len(stored), self.layout
        codes = parts.codes.reshape(num_rows, -1, 32 // layout.bits, 4)  # [rows, units, fields, words]
        self.quants[rows] = _pack_low(codes, layout.bits)
        if self.high is not None:
            self.high[rows] = _pack_high(codes >> layout.bits, layout)
        self.scales[rows] = parts.scales.contiguous().view(self.scales.dtype).view(num_rows, -1)
        if self.subs is not None:
            assert parts.subs is not None
            self.subs[rows] = parts.subs.contiguous().view(num_rows, -1).view(self.subs.dtype)


class _Parts(NamedTuple):
    """Blocks taken apart, each part uint8 with the blocks' number first: codes in order, float16 scales (and minimums) as bytes, sub-scales."""

    codes: torch.Tensor
    scales: torch.Tensor
    subs: torch.Tensor | None = None


def _fields(packed: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """[blocks, n] bytes -> [blocks, n * 8 / bits]: each `run` bytes hold 8 / bits runs of values, the lowest bits the first run."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return (packed.reshape(len(packed), -1, 1, run) >> shifts & (1 << bits) - 1).flatten(1)


def _split(kind: str, blocks: torch.Tensor) -> _Parts:
    """Take blocks [blocks, bytes of one] of a type apart."""
    if kind in ("Q4_0", "IQ4_NL"):
        return _Parts(_fields(blocks[:, 2:], 4, 16), blocks[:, :2])
    if kind == "Q4_1":
        return _Parts(_fields(blocks[:, 4:], 4, 16), blocks[:, :4])
    if kind in ("Q5_0", "Q5_1"):
        start = 2 if kind == "Q5_0" else 4
        high = _fields(blocks[:, start : start + 4].reshape(-1, 1), 1, 1).reshape(-1, 32)
        return _Parts(_fields(blocks[:, start + 4 :], 4, 16) | high << 4, blocks[:, :start])
    if kind == "Q8_0":
        return _Parts(blocks[:, 2:] ^ 128, blocks[:, :2])
    if kind == "Q2_K":
        return _Parts(_fields(blocks[:, 16:80], 2, 32), blocks[:, 80:], blocks[:, :16])
    if kind == "Q3_K":
        codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
        subs = (_fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4) - 32
        return _Parts(codes, blocks[:, 108:], subs)
    if kind in ("Q4_K", "Q5_K"):
        codes = _fields(blocks[:, -128:], 4, 32)
        if kind == "Q5_K":
            codes |= _fields(blocks[:, 16:48], 1, 32) << 4
        return _Parts(codes, blocks[:, :4], _split_subs(blocks[:, 4:16]))
    if kind == "Q6_K":
        return _Parts(_fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4, blocks[:, 208:], blocks[:, 192:208])
    assert kind == "IQ4_XS", kind
    upper = _fields(blocks[:, 2:4].reshape(-1, 1), 2, 1).reshape(-1, 8)
    subs = (_fields(blocks[:, 4:8].reshape(-1, 1), 4, 1).reshape(-1, 8) | upper << 4) - 32
    return _Parts(_fields(blocks[:, 8:], 4, 16), blocks[:, :2], subs)


def _split_subs(packed: torch.Tensor) -> torch.Tensor:
    """Q4_K's and Q5_K's 12 bytes of 6-bit numbers -> [blocks, 8, 2]: sub-scale and sub-minimum of each 32 values."""
    scale, minimum, rest = packed.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([scale & 63, rest & 15 | scale >> 2 & 48], dim=1)
    minimums = torch.cat([minimum & 63, rest >> 4 | minimum >> 2 & 48], dim=1)
    return torch.stack([scales, minimums], dim=2)


def _pack_low(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes uint8 [rows, units, fields, 4] -> int32 [rows, units * 4]: field j of a word at its bits j * bits."""
    low = (codes & (1 << bits) - 1).reshape(*codes.shape[:2], 4, 8 // bits, 4)  # [rows, units, bytes of a word, fields of a byte, words]
    packed = low[:, :, :, 0]
    for place in range(1, 8 // bits):
        packed = packed | low[:, :, :, place] << bits * place
    return packed.transpose(2, 3).contiguous().view(torch.int32).flatten(1)


def _pack_high(high: torch.Tensor, layout: BlockLayout) -> torch.Tensor:
    """Upper bits uint8 [rows, units, fields, 4] -> int32 [rows, words].

    The fields of a word's half have bits * field + high_bits * (i % slots) as their place in a piece of 16 bits, where slots = bits / high_bits of
    the four words share a piece: shifted left by `bits` and right by high_bits * (i % slots), each lies right above its low part.
    """
    slots = layout.bits // layout.high_bits
    by_half = high.to(torch.int32).reshape(*high.shape[:2], 2, 16 // layout.bits, 4 // slots, slots)  # [rows, units, 2, fields, pieces, slots]
    field = torch.arange(16 // layout.bits, device=high.device, dtype=torch.int32).view(1, 1, 1, -1, 1, 1)
    slot = torch.arange(slots, device=high.device, dtype=torch.int32)
    pieces = (by_half << layout.bits * field + layout.high_bits * slot).sum((3, 5), dtype=torch.int32)  # [rows, units, 2, pieces]
    return pieces.to(torch.int16).flatten(1).contiguous().view(torch.int32)
