"""Stored matrices on a GPU, and products with them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
import torch.nn.functional as F

from pocketllm.torch_engine.kernels.fp4_experts import Fp4Experts
from pocketllm.torch_engine.kernels.fp8 import Fp8Weight
from pocketllm.torch_engine.kernels.gguf_linear import gguf_linear
from pocketllm.torch_engine.kernels.gguf_weight import GgufWeight
from pocketllm.torch_engine.kernels.linear import DenseWeight, Weight, add_linear, linear, norm_linear
from pocketllm.torch_engine.kernels.norm import rms_norm
from pocketllm.torch_engine.layers.device import Norm
from pocketllm.torch_engine.quant.fp4 import dequantize_fp4, unpack_mxfp4
from pocketllm.torch_engine.weights import FP4_TYPE, StoredMatrix, StoredTensor


class Fp4Weight:
    """A matrix of FP4 values on a GPU, brought to the dtype of the product each time; see quant/fp4.py.

    Args:
        values: int8 [rows, columns / 2].
        scales: float8_e8m0fnu [rows, columns / 32].
    """

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        self.values, self.scales = values, scales
        self.shape = (values.shape[0], 2 * values.shape[1])
        self.num_bytes = values.nbytes + scales.nbytes

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """[rows, columns]."""
        out = torch.empty(self.shape, dtype=dtype, device=self.values.device)
        dequantize_fp4(self.values, self.scales, out)
        return out


Part = Weight | GgufWeight | Fp4Weight


class GpuWeights:
    """Brings stored matrices to a GPU: blocks and FP8 as they are, other values in the compute dtype. A matrix that two layers share lies there once."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._shared: dict[str, torch.Tensor | GgufWeight] = {}

    def matrix(self, stored: StoredTensor) -> torch.Tensor | GgufWeight:
        """One whole matrix, such as the embeddings, which the output head may share."""
        if stored.name not in self._shared:
            if stored.blocks is not None:
                self._shared[stored.name] = GgufWeight.pack([stored], self.device)
            elif stored.scales is not None:  # rows are looked up in it
                self._shared[stored.name] = stored.to(self.dtype).to(self.device)
            else:
                self._shared[stored.name] = stored.to_device(self.device, self.dtype)
        return self._shared[stored.name]

    def num_bytes(self, weight: torch.Tensor | GgufWeight) -> int:
        return weight.nbytes if isinstance(weight, torch.Tensor) else weight.num_bytes

    def linear(self, matrix: StoredMatrix) -> GpuLinear:
        """The matrices stacked, those of one kind that are neighbours in one piece."""
        parts = [self._part(list(group)) for _, group in groupby(matrix.tensors, _kind)]
        bias = torch.cat([bias.float() for bias in matrix.biases]).to(self.device) if matrix.biases else None
        return GpuLinear(parts, bias, self.dtype)

    def dense(self, matrix: StoredMatrix) -> torch.Tensor:
        """Matrices of float types without biases, stacked, in the compute dtype."""
        return torch.cat([tensor.to_device(self.device, self.dtype) for tensor in matrix.tensors])

    def fp4_experts(self, matrices: Sequence[StoredMatrix]) -> Fp4Experts:
        """The same FP4 matrix of each of a layer's experts, brought over one by one."""
        values: torch.Tensor | None = None
        for place, matrix in enumerate(matrices):
            parts = [_fp4_bytes(tensor) for tensor in matrix.tensors]
            own, exponents = (torch.cat([part[kind] for part in parts]) for kind in (0, 1))
            if values is None:
                values = torch.empty(len(matrices), *own.shape, dtype=torch.uint8, device=self.device)
                scales = torch.empty(len(matrices), *exponents.shape, dtype=torch.uint8, device=self.device)
            values[place], scales[place] = own.to(self.device), exponents.to(self.device)
        assert values is not None
        return Fp4Experts(values, scales)

    def _part(self, tensors: list[StoredTensor]) -> Part:
        first = tensors[0]
        if len(tensors) == 1 and first.name in self._shared:
            shared = self._shared[first.name]
            return DenseWeight(shared) if isinstance(shared, torch.Tensor) else shared
        if is_fp4(first):
            packed = [_fp4_bytes(tensor) for tensor in tensors]
            values, scales = (torch.cat([part[kind] for part in packed]).to(self.device) for kind in (0, 1))
            return Fp4Weight(values.view(torch.int8), scales.view(torch.float8_e8m0fnu))
        if first.blocks is not None:
            return GgufWeight.pack(tensors, self.device)
        if first.scales is None:
            return DenseWeight(self.dense(StoredMatrix(tensors, [])))
        stored, factors = [], []
        for tensor in tensors:
            assert tensor.values is not None
            assert tensor.scales is not None
            stored.append(tensor.values.to(self.device))
            factors.append(tensor.scales.values.float().to(self.device))
        return Fp8Weight(torch.cat(stored), torch.cat(factors), first.scales.block)


def is_fp4(tensor: StoredTensor) -> bool:
    """Whether its values are FP4 with a power of two for each 32."""
    return tensor.type in (FP4_TYPE, "MXFP4")


def _fp4_bytes(tensor: StoredTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values [rows, columns / 2] and exponents [rows, columns / 32] of an FP4 matrix, both uint8."""
    if tensor.blocks is not None:
        values, scales = unpack_mxfp4(tensor.blocks)
    else:
        assert tensor.values is not None
        assert tensor.scales is not None
        values, scales = tensor.values, tensor.scales.values
    return values.view(torch.uint8), scales.view(torch.uint8)


def _kind(tensor: StoredTensor) -> tuple[object, ...]:
    """What has to be equal for two neighbours to be one piece. A block of FP8 that reaches past its matrix ends the piece."""
    if tensor.blocks is not None:
        return ("blocks", tensor.type)
    if tensor.scales is None:
        return ("dense",)
    if is_fp4(tensor):
        return (tensor.type,)
    is_whole = tensor.shape[0] % tensor.scales.block[0] == 0
    return ("fp8", tensor.scales.block) if is_whole else ("fp8", tensor.scales.block, tensor.name)


class GpuLinear:
    """y = x W^T + bias, W in pieces that lie below one another.

    Args:
        parts: [rows of the piece, in].
        bias: [out] float32, or None.
        dtype: of x and y.

    Attributes:
        num_rows: of W.
        single: the only piece, where there is one without blocks and without a bias, else None.
    """

    def __init__(self, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._parts, self._bias, self.dtype = parts, bias, dtype
        self._ends = [0]
        for part in parts:
            self._ends.append(self._ends[-1] + part.shape[0])
        self._biases = [None if bias is None else bias[start:end] for start, end in zip(self._ends, self._ends[1:], strict=False)]
        is_plain = not any(isinstance(part, GgufWeight | Fp4Weight) for part in parts)
        self.single: Weight | None = parts[0] if len(parts) == 1 and bias is None and not isinstance(parts[0], GgufWeight | Fp4Weight) else None
        self._folds_norm = is_plain
        self.num_rows = self._ends[-1]
        self.num_bytes = sum(part.num_bytes for part in parts) + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """x: [num_tokens, in] in `dtype` -> [num_tokens, out] in `out_dtype`, or `dtype` where that is None."""
        if self.single is not None:
            return linear(x, self.single, out_dtype=out_dtype or self.dtype)
        out = torch.empty(x.shape[0], self._ends[-1], dtype=out_dtype or self.dtype, device=x.device)
        for part, bias, start, end in zip(self._parts, self._biases, self._ends, self._ends[1:], strict=False):
            own = out[:, start:end]
            if isinstance(part, GgufWeight):
                gguf_linear(x, part, bias=bias, out=own)
            elif isinstance(part, Fp4Weight):
                own.copy_(F.linear(x, part.to(x.dtype)))
                if bias is not None:
                    own += bias
            else:
                linear(x, part, bias, out=own)
        return out

    def after_norm(self, hidden: torch.Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The product with hidden [num_tokens, in] float32 after `norm`."""
        if not (hidden.shape[0] == 1 and self._folds_norm):
            return self(rms_norm(hidden, norm.weight, norm.eps, self.dtype), out_dtype)
        out = torch.empty(1, self._ends[-1], dtype=out_dtype or self.dtype, device=hidden.device)
        for part, bias, start, end in zip(self._parts, self._biases, self._ends, self._ends[1:], strict=False):
            assert not isinstance(part, GgufWeight | Fp4Weight)
            norm_linear(hidden, norm.weight, norm.eps, part, bias, out=out[:, start:end])
        return out

    def add(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """Add the product with x [num_tokens, in] to hidden [num_tokens, out] float32."""
        if len(self._parts) > 1 or isinstance(self._parts[0], Fp4Weight):
            hidden += self(x)
        elif isinstance(self._parts[0], GgufWeight):
            gguf_linear(x, self._parts[0], bias=self._bias, out=hidden, add=True)
        else:
            add_linear(hidden, x, self._parts[0], self._bias)
