"""Stored tensors of a checkpoint, under Hugging Face's names whatever the format."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pocketllm.checkpoint import Checkpoint, TensorInfo
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.quant.fp4 import GROUP, dequantize_fp4
from pocketllm.torch_engine.quant.fp8 import BlockScales, dequantize_fp8
from pocketllm.torch_engine.quant.gguf_blocks import dequantize
from pocketllm.torch_engine.share import joined

_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ID_TYPES = ("I64", "I32")
_FP8_TYPE = "F8_E4M3"
_FP8_BLOCK = (128, 128)
FP4_TYPE = "FP4"  # of two values in each byte, which safetensors has no word for
_BYTES_TYPE = "I8"  # as which FP4 is published: the header's shape counts bytes; that of safetensors' own type F4 counts values
_PACKED_TYPES = (_BYTES_TYPE, "F4")
_POWERS_TYPE = "F8_E8M0"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the file holds it: a view of the mapped file, which reading pages in.

    Args:
        name: as the file spells it.
        type: "F32", "F16", "BF16", "F8_E4M3", "FP4", or a GGUF block type such as "Q4_1".
        shape: in torch's order.
        blocks: uint8 [*shape[:-1], bytes of a row] of a block type, else None.
        values: the tensor of a float type; of "FP4" int8 with two values a byte, [rows, columns / 2]; else None.
        scales: what "F8_E4M3" and "FP4" values are multiplied by, else None.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    blocks: np.ndarray | None
    values: torch.Tensor | None
    scales: BlockScales | None = None

    def float(self) -> torch.Tensor:
        """The values, dequantized, as float32 in `shape`."""
        return self.to(torch.float32)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The values, dequantized, in memory of their own: float32's are exact, those of another float dtype rounded from them.

        The result is all that is allocated: nothing passes through a float32 copy of the whole.
        """
        if self.values is not None and self.scales is None:
            return self.values.to(dtype, copy=True)
        out = torch.empty(self.shape, dtype=dtype)
        if self.blocks is not None:
            dequantize(self.blocks, self.type, out)
        else:
            assert self.values is not None
            assert self.scales is not None
            if self.type == FP4_TYPE:
                dequantize_fp4(self.values, self.scales.values, out)
            else:
                dequantize_fp8(self.values, self.scales, out)
        return out

    def to_device(self, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """The values of a float type as `dtype` on `device`; they are converted there."""
        assert self.values is not None
        assert self.scales is None
        return self.values.to(device).to(dtype)

    def rows(self, parts: Sequence[range]) -> StoredTensor:
        """Some of its rows (places in the first dimension), as one rank holds them; one run of them is a view, and the others are not read.

        Raises:
            UnsupportedFeatureError: a run begins or ends within a block of FP8 that shares a scale.
        """
        runs = joined(parts)
        if runs == [range(self.shape[0])]:
            return self
        scales = self._part_of_scales(runs, 0)
        places = [slice(run.start, run.stop) for run in runs]
        return StoredTensor(
            _part_name(self.name, runs),
            self.type,
            (sum(map(len, runs)), *self.shape[1:]),
            None if self.blocks is None else self.blocks[places[0]] if len(places) == 1 else np.concatenate([self.blocks[part] for part in places]),
            None if self.values is None else _one([self.values[part] for part in places]),
            scales,
        )

    def columns(self, parts: Sequence[range]) -> StoredTensor:
        """Some columns of a matrix, likewise.

        Raises:
            UnsupportedFeatureError: a run begins or ends within a block of columns that share a scale.
        """
        runs = joined(parts)
        if runs == [range(self.shape[1])]:
            return self
        scales = self._part_of_scales(runs, 1)
        blocks, values = None, None
        places = [slice(run.start, run.stop) for run in runs]
        if self.blocks is not None:
            per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[self.type]]
            self._check_cuts(runs, self.shape[1], per_block, "columns")
            in_bytes = [slice(run.start // per_block * block_bytes, run.stop // per_block * block_bytes) for run in runs]
            blocks = np.concatenate([self.blocks[:, part] for part in in_bytes], axis=1)
        if self.values is not None:
            values = _one([self.values[:, part] for part in places], 1)
        return StoredTensor(_part_name(self.name, runs), self.type, (self.shape[0], sum(map(len, runs))), blocks, values, scales)

    def _part_of_scales(self, runs: Sequence[range], dim: int) -> BlockScales | None:
        """The scales of the blocks that hold `runs` of rows (`dim` 0) or columns (`dim` 1)."""
        if self.scales is None:
            return None
        size = self.scales.block[dim]
        self._check_cuts(runs, self.shape[dim], size, ("rows", "columns")[dim])
        parts = [self.scales.values.narrow(dim, run.start // size, -(-run.stop // size) - run.start // size) for run in runs]
        return BlockScales(_one(parts, dim), self.scales.block)

    def _check_cuts(self, runs: Sequence[range], end: int, block: int, what: str) -> None:
        for place in (place for run in runs for place in (run.start, run.stop)):
            if place % block and place != end:
                raise UnsupportedFeatureError(
                    f"Tensor {self.name} is {self.type} in blocks of {block} {what}, and the ranks would cut it at {place}: "
                    "send another tensor_parallel_size, or use an unquantized checkpoint.",
                    param="tensor_parallel_size",
                )

    def select_rows(self, order: torch.Tensor) -> StoredTensor:
        """The same tensor with its rows (indices of the first dimension) in another order, or some of them; blocks run along rows, so they move whole."""
        blocks = None if self.blocks is None else self.blocks[order.numpy()]
        values = None if self.values is None else self.values[order]
        scales = None if self.scales is None else self.scales.select_rows(order)
        return StoredTensor(self.name, self.type, (order.numel(), *self.shape[1:]), blocks, values, scales)

    def row_parts(self, count: int) -> list[StoredTensor]:
        """Its rows in `count` equal parts."""
        return [self.select_rows(some) for some in torch.arange(self.shape[0]).chunk(count)]

    def part(self, place: int) -> StoredTensor:
        """One of the matrices that a tensor of three dimensions stacks."""
        blocks = None if self.blocks is None else self.blocks[place]
        return StoredTensor(f"{self.name}[{place}]", self.type, self.shape[1:], blocks, None if self.values is None else self.values[place])


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """Matrices that share their input, to be stacked, and their biases, as many or none."""

    tensors: list[StoredTensor]
    biases: list[StoredTensor]


@dataclass(frozen=True, slots=True)
class StoredFeedForward:
    """A dense feed-forward, or one expert.

    Args:
        gate_up: gate before up.
        down: from the inner values to the hidden ones.
        activation: of the gate, as config.json calls it.
    """

    gate_up: StoredMatrix
    down: StoredMatrix
    activation: str

    @property
    def linears(self) -> list[StoredTensor]:
        return [*self.gate_up.tensors, *self.down.tensors]


@dataclass(frozen=True, slots=True)
class StoredExperts:
    """A mixture of experts.

    Args:
        router: [num_experts, hidden_size] float32.
        experts: in the router's order.
        top_k: experts a token.
        normalize: divide the chosen experts' shares by their sum.
        shared: an expert that all tokens have besides, or None.
        shared_gate: [1, hidden_size] float32, whose sigmoid is the share of that one.
    """

    router: torch.Tensor
    experts: list[StoredFeedForward]
    top_k: int
    normalize: bool
    shared: StoredFeedForward | None = None
    shared_gate: torch.Tensor | None = None

    @property
    def linears(self) -> list[StoredTensor]:
        parts = self.experts if self.shared is None else [*self.experts, self.shared]
        return [tensor for part in parts for tensor in part.linears]


class Weights:
    """Hands out a checkpoint's tensors by Hugging Face name, each once, and notices what is missing or left over.

    Args:
        checkpoint: an open checkpoint.
        gguf_name: GGUF's name for a Hugging Face name.
        ignored: names, as the file spells them, that the model does not need.
    """

    def __init__(self, checkpoint: Checkpoint, gguf_name: Callable[[str], str], ignored: frozenset[str] = frozenset()) -> None:
        self._checkpoint = checkpoint
        self._gguf_name = gguf_name
        self._infos = {info.name: info for info in checkpoint.tensors}
        self._left = set(self._infos) - ignored
        self._open_files: dict[Path, safe_open] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        """The tensor `name`, which must have `shape`.

        Raises:
            ConfigurationError: it is missing, or its shape is another, or it holds no weights.
        """
        info = self._take(name, shape)
        stored = info.name
        if info.type in (*_ID_TYPES, _POWERS_TYPE):
            raise ConfigurationError(
                f"Tensor {stored} of {self._checkpoint.path} is stored as {info.type}, which is no type of weights: download or convert the model again.",
                param="model",
            )
        if self._checkpoint.gguf is None:
            if info.type in _PACKED_TYPES:
                packed = self._read(info.file, stored).view(torch.int8)
                return StoredTensor(stored, FP4_TYPE, shape, None, packed, self._take_scales(stored, FP4_TYPE, shape, (1, GROUP)))
            scales = self._take_scales(stored, _FP8_TYPE, shape, _FP8_BLOCK) if info.type == _FP8_TYPE else None
            return StoredTensor(stored, info.type, shape, None, self._read(info.file, stored), scales)
        data = self._checkpoint.gguf.tensors[stored].data
        if info.type in _FLOAT_TYPES:
            return StoredTensor(stored, info.type, shape, None, _as_float(data, info.type).reshape(shape))
        if len(shape) < 2:
            raise ConfigurationError(
                f"Tensor {stored} of {self._checkpoint.path} is a vector stored as {info.type}, and vectors are stored as {', '.join(_FLOAT_TYPES)}: "
                "download or convert the model again.",
                param="model",
            )
        return StoredTensor(stored, info.type, shape, data.reshape(*shape[:-1], -1), None)

    def take_ids(self, name: str, shape: tuple[int, ...], count: int) -> torch.Tensor:
        """The tensor `name` of whole numbers in [0, count), as int64.

        Raises:
            ConfigurationError: it is missing, its shape or type is another, or a number lies outside.
        """
        info = self._take(name, shape)
        if info.type not in _ID_TYPES:
            raise ConfigurationError(
                f"Tensor {info.name} of {self._checkpoint.path} is stored as {info.type}, and is read as {' or '.join(_ID_TYPES)}: download the model again.",
                param="model",
            )
        gguf = self._checkpoint.gguf
        values = self._read(info.file, info.name) if gguf is None else torch.from_numpy(gguf.tensors[info.name].data.reshape(shape))
        ids = values.to(torch.int64, copy=True)
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < count:
            raise ConfigurationError(
                f"Tensor {info.name} of {self._checkpoint.path} holds numbers outside [0, {count}): the file and its config do not belong together.",
                param="model",
            )
        return ids

    def finish(self) -> None:
        """Check that every tensor of the file was taken.

        Raises:
            ConfigurationError: naming the first of those left.
        """
        if self._left:
            name, more = min(self._left), len(self._left) - 1
            others = f" and {more} more tensor{'s' if more > 1 else ''}" if more else ""
            raise ConfigurationError(
                f"{self._checkpoint.path} holds the tensor {name}{others}, which a {self._checkpoint.architecture} model has no place for: "
                "the file is of another architecture than it says.",
                param="model",
            )

    def release(self) -> None:
        """Let go of the files, for when what was taken has been packed: reading a taken tensor pages its part of the file in."""
        self._open_files.clear()
        if self._checkpoint.gguf is not None:
            self._checkpoint.gguf.release_pages()

    def _take(self, name: str, shape: tuple[int, ...]) -> TensorInfo:
        stored = self._gguf_name(name) if self._checkpoint.gguf is not None else name
        info = self._infos.get(stored)
        if info is None:
            raise ConfigurationError(f"{self._checkpoint.path} lacks the tensor {stored}: download or convert the model again.", param="model")
        if self._checkpoint.gguf is None and info.type == _BYTES_TYPE:
            shape = (*shape[:-1], shape[-1] // 2)
        if info.shape != shape:
            raise ConfigurationError(
                f"Tensor {stored} of {self._checkpoint.path} has the shape {list(info.shape)} where the model's config asks for {list(shape)}: "
                "the file and its config do not belong together.",
                param="model",
            )
        self._left.discard(stored)
        return info

    def _take_scales(self, weight: str, kind: str, shape: tuple[int, ...], block: tuple[int, int]) -> BlockScales:
        """The scales of the blocks of a weight of `kind`, beside it under one of the two names that checkpoints use."""
        names = (f"{weight}_scale_inv", f"{weight.removesuffix('.weight')}.scale")
        name = next((name for name in names if name in self._infos), names[0])
        if len(shape) != 2:
            raise ConfigurationError(
                f"Tensor {weight} of {self._checkpoint.path} is {kind} and no matrix, which has no blocks to scale: use an unquantized checkpoint.",
                param="model",
            )
        info = self._infos.get(name)
        wanted = tuple(-(-size // one) for size, one in zip(shape, block, strict=True))
        if kind == FP4_TYPE and shape[1] % GROUP:
            raise ConfigurationError(
                f"Tensor {weight} of {self._checkpoint.path} is FP4 with rows of {shape[1]} values, no multiple of the {GROUP} that share a scale: "
                "use an unquantized checkpoint.",
                param="model",
            )
        types = (_POWERS_TYPE,) if kind == FP4_TYPE else (*_FLOAT_TYPES, _POWERS_TYPE)
        if info is None or info.shape != wanted or info.type not in types:
            found = "is missing" if info is None else f"has the shape {list(info.shape)} in {info.type}"
            raise ConfigurationError(
                f"Tensor {weight} of {self._checkpoint.path} is {kind}, and {name} {found} where {list(wanted)} in {' or '.join(types)} is needed: "
                "download the model again.",
                param="model",
            )
        self._left.discard(name)
        values = self._read(info.file, name)
        return BlockScales(values.float() if kind == _FP8_TYPE and info.type == _POWERS_TYPE else values, block)

    def _read(self, file: Path, name: str) -> torch.Tensor:
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt")
            tensor: torch.Tensor = self._open_files[file].get_tensor(name)
            return tensor
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"Tensor {name} of {file} can't be read ({error}): download the file again.", param="model") from error


def _one(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _part_name(name: str, runs: Sequence[range]) -> str:
    """A part is another tensor, for whoever keeps tensors by their names."""
    return f"{name}[{','.join(f'{run.start}:{run.stop}' for run in runs)}]"


def _as_float(data: np.ndarray, tensor_type: str) -> torch.Tensor:
    if tensor_type == "BF16":  # numpy has no bfloat16: gguf gives its bytes
        return torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(data)
