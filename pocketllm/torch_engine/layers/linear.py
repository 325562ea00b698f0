"""Linear layers as torch operators, each in the fastest CPU layout that its compute dtype allows.

- float32: the dequantized matrix, the reference.
- float16: FBGEMM's packed order, multiplied in float32: it rounds weights to 11 bits, and nothing else. The default where the
  native kernels don't suit, and the output head under bfloat16, whose float32 results keep close tokens apart.
- bfloat16: the matrix in oneDNN's packed order (AMX or AVX-512 BF16), and beside it, for 4-bit weights, the nibbles in
  PyTorch's int4 layout, which a step of few rows reads instead since it is bound by memory. The fastest for prompts, and the
  coarsest: weights, activations and results are rounded to 8 bits at every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from pocketllm.torch_engine.quant.int4 import PackedInt4, can_pack, pack_int4
from pocketllm.torch_engine.weights import StoredTensor

_INT4_MAX_ROWS = 6  # from 7 rows on, unpacking nibbles costs more than reading the bfloat16 matrix
_ONEDNN_ROWS = 64  # rows that oneDNN packs for


class Linear(Protocol):
    """y = x W^T. x: [num_tokens, in] in the layer's dtype -> [num_tokens, out] in the same dtype."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Float32Linear:
    """float32 weights and activations."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight
        self.num_bytes = weight.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class BFloat16Linear:
    """bfloat16 weights packed by oneDNN, and 4-bit ones for few rows where there are any; bfloat16 activations."""

    def __init__(self, weight: torch.Tensor, int4: PackedInt4 | None) -> None:
        self.num_bytes = weight.nbytes // 2 + (0 if int4 is None else int4.packed.nbytes + int4.scales_and_zeros.nbytes)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.bfloat16(), _ONEDNN_ROWS)
        self.int4 = int4

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.int4 is not None and x.shape[0] <= _INT4_MAX_ROWS:
            few: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.int4.packed, 32, self.int4.scales_and_zeros)
            return few
        many: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, None, "none", [], "")
        return many


class Float16Linear:
    """float16 weights packed by FBGEMM; float32 activations and results."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.num_bytes = weight.nbytes // 2
        self.weight = torch.ops.quantized.linear_prepack_fp16(weight, None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16(x, self.weight)
        return y


class Biased:
    """A layer with a bias [out] added to its results."""

    def __init__(self, linear: Linear, bias: torch.Tensor) -> None:
        self._linear, self._bias = linear, bias
        self.num_bytes = linear.num_bytes + bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x).add_(self._bias)


class GroupedLinear:
    """Matrices side by side, each with its own columns of x [num_tokens, in]: [num_tokens, out] in the same dtype."""

    def __init__(self, matrices: Sequence[Linear]) -> None:
        self._matrices = matrices
        self.num_bytes = sum(matrix.num_bytes for matrix in matrices)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self._matrices), dim=1)
        return torch.cat([matrix(part.contiguous()) for matrix, part in zip(self._matrices, parts, strict=True)], dim=-1)


def has_bfloat16_units() -> bool:
    """Whether oneDNN multiplies bfloat16 matrices on this processor."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def has_float16_packing() -> bool:
    """Whether this build of PyTorch packs float16 matrices (FBGEMM, x86 only)."""
    return "fbgemm" in torch.backends.quantized.supported_engines


def default_dtype() -> torch.dtype:
    """The fast compute that keeps to float32's choice of tokens: float16 weights, else float32."""
    return torch.float16 if has_float16_packing() else torch.float32


def build_linear(tensors: Sequence[StoredTensor], dtype: torch.dtype) -> Linear:
    """One layer for matrices that share their input, their rows stacked in order.

    Args:
        tensors: each [out, in].
        dtype: float32, bfloat16 or float16, as the module describes them.
    """
    weight = torch.cat([tensor.float() for tensor in tensors])
    if dtype == torch.float32:
        return Float32Linear(weight)
    if dtype == torch.float16:
        return Float16Linear(weight)
    packed = None
    if len({tensor.type for tensor in tensors}) == 1 and can_pack(tensors[0].type, tuple(weight.shape)):
        packed = pack_int4(tensors[0].type, np.concatenate([tensor.blocks for tensor in tensors if tensor.blocks is not None]))
    return BFloat16Linear(weight, packed)


def build_head(tensor: StoredTensor, dtype: torch.dtype) -> Linear:
    """The output head [vocab_size, hidden_size]: float32 in and out under every compute dtype."""
    weight = tensor.float()
    return Float32Linear(weight) if dtype == torch.float32 or not has_float16_packing() else Float16Linear(weight)
