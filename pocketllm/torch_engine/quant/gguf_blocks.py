"""GGUF's block types as float values: the gguf package's arithmetic, in pieces that fit a cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import torch

_PIECE = 2**17  # values dequantized at once: the package's temporaries of several times that stay in the second-level cache


def dequantize(blocks: np.ndarray, tensor_type: str, out: torch.Tensor) -> None:
    """Write the values of `blocks` to `out`: bit-equal to the gguf package's in float32, rounded from those in another dtype.

    Uses as many threads as torch does.

    Args:
        blocks: uint8, any shape, whole blocks in order.
        tensor_type: such as "Q4_K".
        out: contiguous, one value for each stored one.
    """
    kind = gguf.GGMLQuantizationType[tensor_type]
    values_per_block, bytes_per_block = gguf.GGML_QUANT_SIZES[kind]
    flat = np.ascontiguousarray(blocks).reshape(-1)
    target = out.view(-1)
    step = _PIECE // values_per_block

    def convert(first: int) -> None:
        piece = flat[first * bytes_per_block : (first + step) * bytes_per_block]
        with np.errstate(all="ignore"):  # a damaged scale is infinite or no number, in the package's result as in ours
            values = gguf.dequantize(piece.reshape(1, -1), kind)
        start = first * values_per_block
        with torch.inference_mode():  # which threads do not inherit
            target[start : start + values.size] = torch.from_numpy(values).view(-1)

    starts = range(0, flat.size // bytes_per_block, step)
    threads = min(torch.get_num_threads(), len(starts))
    if threads <= 1:
        for first in starts:
            convert(first)
        return
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(convert, starts):
            pass
