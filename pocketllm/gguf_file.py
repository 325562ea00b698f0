"""Opening a GGUF file: its metadata as plain Python values, its tensors as memory-mapped arrays."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, ReaderField, ReaderTensor
from gguf.gguf_reader import READER_SUPPORTED_VERSIONS

from pocketllm.errors import ConfigurationError

_MAX_DIMS = 4
_MAX_ARRAY_DEPTH = 4
_MAX_ELEMENTS = 2**62
_SCALARS = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
    GGUFValueType.BOOL: "?",
}


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF file. The arrays in `tensors` are views of the mapped file: reading one pages it in, nothing is copied.

    Args:
        path: the file.
        metadata: every key of the header with its value as a plain Python value; arrays are lists.
        tensors: tensors by name, in the file's order. `shape` is ggml's, the fastest dimension first; `data` of a quantized tensor is
            uint8 [rows, bytes of a row].
        mapping: the mapped file, which all tensors view.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, ReaderTensor]
    mapping: mmap.mmap

    def release_pages(self) -> None:
        """Give back the memory that pages of the file take, for when every tensor has been read. The tensors stay readable."""
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows, whose working set is trimmed by the system
            self.mapping.madvise(mmap.MADV_DONTNEED)


class _Malformed(ValueError):
    """The file breaks the GGUF format; the message says how."""


class _Truncated(ValueError):
    """The header or a tensor reaches past the end of the file."""


class _CheckedReader(GGUFReader):
    """The package's reader with bounds checks, and with metadata read in one pass.

    The package keeps two numpy views for each string of an array, which takes seconds for a vocabulary, and slices past the end of
    the file without noticing. Both live in hooks that this class replaces; the layout of tensors stays the package's.
    """

    def __init__(self, path: Path) -> None:
        self.metadata: dict[str, Any] = {}
        super().__init__(path, "c")  # copy on write: arrays that may be written, which torch asks for, and a file that never is

    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = int(offset) + np.dtype(dtype).itemsize * int(count)
        if end > self.data.nbytes:
            raise _Truncated(f"it should have at least {end} bytes and has {self.data.nbytes}")
        return super()._get(int(offset), dtype, count, override_order)

    def _build_fields(self, offs: int, count: int) -> int:
        cursor = _Cursor(self.data, offs)
        for _ in range(int(count)):
            start = cursor.offset
            key = cursor.string()
            kind = cursor.kind()
            if key in self.metadata:
                raise _Malformed(f"the key {key[:80]!r} is there twice")
            self.metadata[key] = cursor.value(kind)
            if key == "general.alignment":  # the one field that the package reads back
                value = np.array([self.metadata[key]])
                self._push_field(ReaderField(start, key, [value], [0], [kind]), skip_sum=True)
        return cursor.offset

    def _get_tensor_info_field(self, orig_offs: int) -> ReaderField:
        # The package multiplies dimensions in wrapping integers and slices with the offset as it stands: refuse what would wrap.
        cursor = _Cursor(self.data, orig_offs)
        name = cursor.string()[:80]
        num_dims = cursor.scalar("I")
        if num_dims > _MAX_DIMS:
            raise _Malformed(f"tensor {name!r} has {num_dims} dimensions, and ggml allows {_MAX_DIMS}")
        dims = [cursor.scalar("Q") for _ in range(num_dims)]
        if math.prod(dims) > _MAX_ELEMENTS:
            raise _Malformed(f"tensor {name!r} has the shape {dims}")
        kind = cursor.scalar("I")
        if kind not in GGMLQuantizationType._value2member_map_:
            raise _Malformed(f"tensor {name!r} has the type {kind}, which gguf {_package_version()} does not know")
        offset = cursor.scalar("Q")
        if offset > self.data.nbytes:
            raise _Truncated(f"tensor {name!r} begins at byte {offset} of its data, and the file has {self.data.nbytes} bytes")
        return super()._get_tensor_info_field(orig_offs)


class _Cursor:
    """Reads little-endian values one after another, refusing to pass the end of the file."""

    def __init__(self, data: Any, offset: int) -> None:
        self.offset = int(offset)
        self._bytes = memoryview(data)

    def take(self, size: int) -> memoryview:
        end = self.offset + size
        if end > len(self._bytes):
            raise _Truncated(f"its header should have at least {end} bytes and the file has {len(self._bytes)}")
        view = self._bytes[self.offset : end]
        self.offset = end
        return view

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return str(self.take(self.scalar("Q")), "utf-8")

    def kind(self) -> GGUFValueType:
        number = self.scalar("I")
        try:
            return GGUFValueType(number)
        except ValueError:
            raise _Malformed(f"a value of its header has the unknown type {number}") from None

    def value(self, kind: GGUFValueType, depth: int = 0) -> Any:
        if kind is GGUFValueType.STRING:
            return self.string()
        if kind is GGUFValueType.ARRAY:
            return self._array(depth)
        return self.scalar(_SCALARS[kind])

    def _array(self, depth: int) -> list[Any]:
        if depth == _MAX_ARRAY_DEPTH:
            raise _Malformed("its header nests arrays too deep")
        kind = self.kind()
        length = self.scalar("Q")
        if kind is GGUFValueType.STRING:
            return self._strings(length)
        if kind is GGUFValueType.ARRAY:
            return [self._array(depth + 1) for _ in range(length)]
        code = _SCALARS[kind]
        return list(struct.unpack(f"<{length}{code}", self.take(length * struct.calcsize("<" + code))))

    def _strings(self, length: int) -> list[str]:
        # A vocabulary has up to 260k of these: one tight loop, no call a string.
        data, offset, end = self._bytes, self.offset, len(self._bytes)
        read_length = struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(length):
            if offset + 8 > end:
                raise _Truncated(f"its header should have at least {offset + 8} bytes and the file has {end}")
            stop = offset + 8 + read_length(data, offset)[0]
            if stop > end:
                raise _Truncated(f"its header should have at least {stop} bytes and the file has {end}")
            strings.append(str(data[offset + 8 : stop], "utf-8"))
            offset = stop
        self.offset = offset
        return strings


def open_gguf(path: Path) -> GGUFFile:
    """Map `path` and read its header.

    Raises:
        ConfigurationError: the file is missing, unreadable, no GGUF file, truncated or corrupt; the message is one line.
    """
    if path.is_dir():
        raise ConfigurationError(f"{path} is a directory: give the path of a .gguf file.", param="model")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
    except FileNotFoundError:
        raise ConfigurationError(f"{path} does not exist: check the path of the model.", param="model") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} can't be read ({_reason(error)}): check the path and its permissions.", param="model") from None
    if not size:
        raise ConfigurationError(f"{path} is empty: download it again.", param="model")
    if start[:4] != b"GGUF":
        raise ConfigurationError(f"{path} is not a GGUF file (it begins with {start[:4]!r}): give a .gguf file, or download it again.", param="model")
    version = int.from_bytes(start[4:], "little")
    if len(start) == 8 and version not in READER_SUPPORTED_VERSIONS:
        known = " and ".join(map(str, READER_SUPPORTED_VERSIONS))
        reason = "was written for the other byte order" if version & 0xFFFF == 0 else f"has GGUF version {version}, and PocketLLM reads {known}"
        raise ConfigurationError(f"{path} {reason}: convert it again, or download it again.", param="model")
    try:
        with np.errstate(over="raise"):
            reader = _CheckedReader(path)
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read ({_reason(error)}): check the path and its permissions.", param="model") from None
    except _Truncated as error:
        raise ConfigurationError(f"{path} is truncated or corrupt: {error}. Download it again.", param="model") from None
    except (ValueError, LookupError, ArithmeticError, TypeError, MemoryError, struct.error) as error:
        raise ConfigurationError(f"{path} is not a valid GGUF file: {_reason(error)}. Download it again.", param="model") from None
    mapping = reader.data.base
    assert isinstance(mapping, mmap.mmap)
    return GGUFFile(path, reader.metadata, {tensor.name: tensor for tensor in reader.tensors}, mapping)


def _reason(error: BaseException) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "its header holds text that is not UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).split()).rstrip(".") or type(error).__name__


def _package_version() -> str:
    from importlib.metadata import version

    return version("gguf")
