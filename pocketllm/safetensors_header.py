"""The header of a safetensors file: names, shapes and types, read as JSON."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.errors import ConfigurationError

_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


@dataclass(frozen=True, slots=True)
class SafetensorsEntry:
    """One tensor of a header: safetensors' dtype word, shape (rows first), and size in bytes."""

    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors of one file, in the header's order."""

    path: Path
    entries: Mapping[str, SafetensorsEntry]


def list_shards(directory: Path) -> list[Path]:
    """The weight files of a checkpoint: those its index names, else model.safetensors, else every .safetensors file.

    Raises:
        ConfigurationError: there is none, the index is corrupt, or a file that it names is missing.
    """
    index = directory / "model.safetensors.index.json"
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            shards = [directory / name for name in names]
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            raise ConfigurationError(f"{index} is not a valid index (it needs a weight_map): download it again.", param="model") from None
        if outside := [name for name in names if Path(name).name != name or name == ".."]:
            raise ConfigurationError(f"{index} names {outside[0]!r}, which is no file of its directory: download it again.", param="model")
        if missing := [shard.name for shard in shards if not shard.is_file()]:
            raise ConfigurationError(f"{directory} lacks {', '.join(missing)}, which {index.name} names: download it again.", param="model")
    elif (directory / "model.safetensors").exists():
        shards = [directory / "model.safetensors"]
    else:
        shards = sorted(directory.glob("*.safetensors"))
    if not shards:
        pickles = " It has .bin files, which PocketLLM does not read: convert them to safetensors." if any(directory.glob("*.bin")) else ""
        raise ConfigurationError(f"{directory} has no .safetensors file and no .gguf file: give a directory that holds the weights.{pickles}", param="model")
    return shards


def read_header(path: Path) -> SafetensorsHeader:
    """Read the header of one file and check that its tensors lie inside the file.

    Raises:
        ConfigurationError: the file can't be read, is truncated or is corrupt.
    """
    if not path.is_file():  # opening a pipe would wait for somebody to write to it
        raise ConfigurationError(f"{path} is no file: download it again.", param="model")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX_HEADER_BYTES + 1
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ConfigurationError(f"{path} is truncated or no safetensors file: download it again.", param="model")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read ({error.strerror or error}): check the path and its permissions.", param="model") from None
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{path} has a corrupt header: download it again.", param="model") from None
    if not isinstance(header, dict):
        raise ConfigurationError(f"{path} has a corrupt header: download it again.", param="model")
    header.pop("__metadata__", None)
    return SafetensorsHeader(path, {name: _entry(path, name, value, size - 8 - length) for name, value in header.items()})


def _entry(path: Path, name: str, value: Any, data_bytes: int) -> SafetensorsEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
        whole = all(isinstance(number, int) and not isinstance(number, bool) and number >= 0 for number in [*shape, begin, end])
        if not whole or end < begin or (dtype in _BITS and (math.prod(shape) * _BITS[dtype] + 7) // 8 != end - begin):
            raise ValueError(name)
    except (LookupError, TypeError, ValueError):
        raise ConfigurationError(f"{path} has a corrupt entry for the tensor {name}: download it again.", param="model") from None
    if end > data_bytes:
        raise ConfigurationError(
            f"{path} is truncated: tensor {name} ends at byte {end} of the data, which has {data_bytes}. Download it again.", param="model"
        )
    return SafetensorsEntry(str(dtype), tuple(shape), end - begin)
