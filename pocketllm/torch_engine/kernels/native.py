"""Native CPU kernels for 4-bit weights: products of any number of rows, and a whole llama step of one token a row.

The library is built from native.cpp under POCKETLLM_BUILD_CPP=1, for x86 CPUs with AVX-512; products of many rows run on AMX
where the processor has it. Weights stay in their 4 bits with their stored scales, and all arithmetic has float32's precision
(16 bits or more of each activation). Where the library is not there, or the weights do not suit it, torch operators do the work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from pocketllm.torch_engine.kernels import NATIVE_LIBRARY
from pocketllm.torch_engine.quant.int4 import BLOCK, PACKABLE_TYPES
from pocketllm.torch_engine.weights import StoredTensor

_LANES = 16  # rows of a tile
_MAX_HEAD_DIM = 256


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("input_norm", "post_attention_norm", "qkv", "output", "gate_up", "down", "kv")]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int32) for name in ("head_dim", "num_layers", "vocab_size", "block_size")),
        ("rms_norm_eps", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        ("norm", ctypes.c_void_p),
        ("head", ctypes.c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        ("num_rows", ctypes.c_int32),
        ("table_width", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("hidden", "cos", "sin", "tables", "lengths")),
    ]


@dataclass(frozen=True, slots=True)
class DecodeLayer:
    """One layer's arrays: norms [hidden_size] float32, the others from `pack_q4`."""

    input_norm: np.ndarray
    post_attention_norm: np.ndarray
    qkv: np.ndarray
    output: np.ndarray
    gate_up: np.ndarray
    down: np.ndarray


@cache
def library() -> ctypes.CDLL | str:
    """The built library, or why there is none, in a few words for people."""
    if not NATIVE_LIBRARY.exists():
        return "not built (install with POCKETLLM_BUILD_CPP=1)"
    try:
        loaded = ctypes.CDLL(str(NATIVE_LIBRARY))
    except OSError as error:  # such as one that was built for another C++ runtime
        return f"{NATIVE_LIBRARY.name} can't be loaded ({error}): build it again"
    loaded.pocket_q4_product.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]
    loaded.pocket_team_create.restype = ctypes.c_void_p
    loaded.pocket_team_create.argtypes = [ctypes.c_int]
    loaded.pocket_team_destroy.argtypes = [ctypes.c_void_p]
    loaded.pocket_decode_layers.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Model), ctypes.POINTER(_Step)]
    loaded.pocket_logits.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Model), ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    return loaded if loaded.pocket_supported() else "this processor has no AVX-512"


def unsuited(linears: Sequence[StoredTensor], head: StoredTensor, head_dim: int) -> str | None:
    """Why a model can't run on the native kernels, in a few words for people; None when it can."""
    if isinstance(missing := library(), str):
        return missing
    for tensor in linears:
        if tensor.type not in PACKABLE_TYPES:
            return f"{tensor.name} is {tensor.type}, and it takes {' and '.join(PACKABLE_TYPES)}"
    if head.type != "Q8_0":
        return f"the output head is {head.type}, and it takes Q8_0"
    for tensor in (*linears, head):
        if tensor.shape[0] % _LANES or tensor.shape[1] % BLOCK:
            return f"{tensor.name} has the shape {list(tensor.shape)}, and it takes multiples of {_LANES} and {BLOCK}"
    if head_dim % _LANES or head_dim > _MAX_HEAD_DIM:
        return f"heads of {head_dim} values, and it takes multiples of {_LANES} up to {_MAX_HEAD_DIM}"
    return None


def pack_q4(tensors: Sequence[StoredTensor]) -> np.ndarray:
    """Q4_0 or Q4_1 matrices [out, in], their rows stacked, as tiles of 16 rows: uint8 [out / 16, in / 32, 320].

    A tile's block of 32 columns is four groups of eight columns, a row's eight nibbles in one 32-bit lane with the first column
    lowest, then 16 scales and 16 minimums (float16): w = scale * nibble + minimum, the stored numbers themselves.
    """
    return np.concatenate([_pack_q4(tensor) for tensor in tensors])


def _pack_q4(tensor: StoredTensor) -> np.ndarray:
    assert tensor.blocks is not None
    header = 4 if tensor.type == "Q4_1" else 2
    out, columns = tensor.shape
    blocks = tensor.blocks.reshape(out, columns // BLOCK, header + BLOCK // 2)
    numbers = np.ascontiguousarray(blocks[..., :header]).view(np.float16)  # [out, in / 32, 1 or 2]
    scales = numbers[..., 0]
    minimums = numbers[..., 1] if tensor.type == "Q4_1" else (scales * np.float16(-8)).astype(np.float16)
    nibbles = np.concatenate([blocks[..., header:] & 15, blocks[..., header:] >> 4], axis=-1)  # [out, in / 32, 32]
    pairs = nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)  # bytes, two columns each, the first one low
    lanes = pairs.reshape(out // _LANES, _LANES, columns // BLOCK, 4, 4).transpose(0, 2, 3, 1, 4)  # [tile, block, group, row, 4 bytes]
    per_tile = [_by_tile(values) for values in (scales, minimums)]
    return np.concatenate([lanes.reshape(out // _LANES, columns // BLOCK, 256), *per_tile], axis=-1)


def pack_q8(tensor: StoredTensor) -> np.ndarray:
    """A Q8_0 matrix [out, in] as tiles of 16 rows: uint8 [out / 16, in / 32, 544], eight groups of four columns, then 16 scales."""
    assert tensor.blocks is not None
    out, columns = tensor.shape
    blocks = tensor.blocks.reshape(out, columns // BLOCK, 2 + BLOCK)
    scales = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
    lanes = blocks[..., 2:].reshape(out // _LANES, _LANES, columns // BLOCK, 8, 4).transpose(0, 2, 3, 1, 4)
    return np.concatenate([lanes.reshape(out // _LANES, columns // BLOCK, 512), _by_tile(scales)], axis=-1)


def _by_tile(values: np.ndarray) -> np.ndarray:
    """float16 [out, in / 32] -> its bytes as uint8 [out / 16, in / 32, 32]."""
    tiles = values.reshape(-1, _LANES, values.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).view(np.uint8)


class Team:
    """Threads that compute together; they rest between calls.

    Args:
        num_threads: most threads, the calling one included; fewer where the system allows no more.

    Raises:
        MemoryError: the memory is short.
    """

    def __init__(self, num_threads: int) -> None:
        native = library()
        assert not isinstance(native, str), native
        self._native = native
        self.handle: Any = native.pocket_team_create(num_threads)
        if self.handle is None:
            raise MemoryError("no memory for the threads of the native kernels")

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self._native.pocket_team_destroy(self.handle)


class Q4Linear:
    """y = x W^T with 4-bit weights. x: [num_tokens, in] float32 -> [num_tokens, out] float32.

    Args:
        matrix: from `pack_q4`.
        team: threads that compute it.

    Raises:
        MemoryError: on a call, the memory is short.
    """

    def __init__(self, matrix: np.ndarray, team: Team) -> None:
        native = library()
        assert not isinstance(native, str), native
        self._native, self.matrix, self._team = native, matrix, team
        self._out, self._in = matrix.shape[0] * _LANES, matrix.shape[1] * BLOCK
        self.num_bytes = matrix.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        assert x.shape[1] == self._in
        y = torch.empty(x.shape[0], self._out)
        if self._native.pocket_q4_product(self._team.handle, self.matrix.ctypes.data, x.data_ptr(), y.data_ptr(), x.shape[0], self._in, self._out):
            raise MemoryError(f"no memory for a product of {x.shape[0]} rows")
        return y


class DecodeStep:
    """One step of a llama model for rows of one token each.

    Args:
        num_heads, num_kv_heads, head_dim, intermediate_size, rms_norm_eps: the model's.
        layers: of the model, in order; none where `logits` alone is called.
        norm: final norm [hidden_size] float32.
        head: from `pack_q8`, [vocab_size / 16, hidden_size / 32, 544].
        team: threads that compute a step.

    Raises:
        MemoryError: the memory is short; `layers` and `logits` raise it too.
    """

    def __init__(
        self,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        intermediate_size: int,
        rms_norm_eps: float,
        layers: Sequence[DecodeLayer],
        norm: np.ndarray,
        head: np.ndarray,
        team: Team,
    ) -> None:
        native = library()
        assert not isinstance(native, str), native
        self._native = native
        self._arrays = (list(layers), norm, head)  # kept alive: the structures below hold bare addresses
        self._layers = (_Layer * len(layers))()
        for place, layer in enumerate(layers):
            for name in ("input_norm", "post_attention_norm", "qkv", "output", "gate_up", "down"):
                setattr(self._layers[place], name, getattr(layer, name).ctypes.data)
        self._vocab_size = head.shape[0] * _LANES
        self._model = _Model(
            norm.shape[0],
            intermediate_size,
            num_heads,
            num_kv_heads,
            head_dim,
            len(layers),
            self._vocab_size,
            0,
            rms_norm_eps,
            self._layers,
            norm.ctypes.data,
            head.ctypes.data,
        )
        self.head_bytes = head.nbytes
        self._team = team

    def layers(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, tables: torch.Tensor, lengths: torch.Tensor, kv_blocks: Sequence[torch.Tensor]
    ) -> None:
        """All layers of a step of one token a row. `hidden` is changed in place; keys and values go to the cache.

        Args:
            hidden: [num_rows, hidden_size] float32, the embeddings.
            cos, sin: [num_rows, head_dim / 2] float32.
            tables: block tables [num_rows, width] int64.
            lengths: [num_rows] int64, tokens that each row attends to, its own included.
            kv_blocks: a layer: [num_blocks, block_size, 2, num_kv_heads, head_dim] float16.
        """
        for place, blocks in enumerate(kv_blocks):
            self._layers[place].kv = blocks.data_ptr()
        self._model.block_size = kv_blocks[0].shape[1]
        arrays = [array.contiguous() for array in (cos, sin, tables, lengths)]
        assert hidden.is_contiguous()
        step = _Step(hidden.shape[0], tables.shape[1], hidden.data_ptr(), *(array.data_ptr() for array in arrays))
        if self._native.pocket_decode_layers(self._team.handle, ctypes.byref(self._model), ctypes.byref(step)):
            raise MemoryError(f"no memory for a native decode step of {hidden.shape[0]} rows")

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final norm and head: [num_rows, hidden_size] float32 -> [num_rows, vocab_size] float32."""
        hidden = hidden.contiguous()
        logits = torch.empty(hidden.shape[0], self._vocab_size)
        if self._native.pocket_logits(self._team.handle, ctypes.byref(self._model), hidden.data_ptr(), hidden.shape[0], logits.data_ptr()):
            raise MemoryError(f"no memory for the logits of {hidden.shape[0]} rows")
        return logits
