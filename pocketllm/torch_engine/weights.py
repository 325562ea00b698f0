"""Stored tensors of a checkpoint, under Hugging Face's names whatever the format."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError

_FLOAT_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor as the file holds it.

    Args:
        name: as the file spells it.
        type: "F32", "F16", "BF16", or a GGUF block type such as "Q4_1".
        shape: in torch's order.
        blocks: uint8 [rows, bytes of a row] of a block type, else None.
        values: the tensor of a float type, else None.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    blocks: np.ndarray | None
    values: torch.Tensor | None

    def float(self) -> torch.Tensor:
        """The values, dequantized, as float32 in `shape`."""
        if self.values is not None:
            return self.values.float()
        assert self.blocks is not None
        return torch.from_numpy(gguf.dequantize(self.blocks, gguf.GGMLQuantizationType[self.type])).float().reshape(self.shape)

    def select_rows(self, order: torch.Tensor) -> StoredTensor:
        """The same tensor with its rows in another order; blocks run along rows, so they move whole."""
        blocks = None if self.blocks is None else self.blocks[order.numpy()]
        values = None if self.values is None else self.values[order]
        return StoredTensor(self.name, self.type, self.shape, blocks, values)


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
            ConfigurationError: it is missing, or its shape is another.
        """
        stored = self._gguf_name(name) if self._checkpoint.gguf is not None else name
        info = self._infos.get(stored)
        if info is None:
            raise ConfigurationError(f"{self._checkpoint.path} lacks the tensor {stored}: download or convert the model again.", param="model")
        if info.shape != shape:
            raise ConfigurationError(
                f"Tensor {stored} of {self._checkpoint.path} has the shape {list(info.shape)} where the model's config asks for {list(shape)}: "
                "the file and its config do not belong together.",
                param="model",
            )
        self._left.discard(stored)
        if self._checkpoint.gguf is None:
            return StoredTensor(stored, info.type, shape, None, self._read(info.file, stored))
        data = self._checkpoint.gguf.tensors[stored].data
        if info.type in _FLOAT_TYPES:
            return StoredTensor(stored, info.type, shape, None, _as_float(data, info.type).reshape(shape))
        if len(shape) != 2:
            raise ConfigurationError(
                f"Tensor {stored} of {self._checkpoint.path} is a vector stored as {info.type}, and vectors are stored as {', '.join(_FLOAT_TYPES)}: "
                "download or convert the model again.",
                param="model",
            )
        return StoredTensor(stored, info.type, shape, data.reshape(shape[0], -1), None)

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

    def _read(self, file: Path, name: str) -> torch.Tensor:
        try:
            if file not in self._open_files:
                self._open_files[file] = safe_open(file, framework="pt")
            tensor: torch.Tensor = self._open_files[file].get_tensor(name)
            return tensor
        except (SafetensorError, OSError) as error:
            raise ConfigurationError(f"Tensor {name} of {file} can't be read ({error}): download the file again.", param="model") from error


def _as_float(data: np.ndarray, tensor_type: str) -> torch.Tensor:
    if tensor_type == "BF16":  # numpy has no bfloat16: gguf gives its bytes
        return torch.from_numpy(data.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(np.array(data))
