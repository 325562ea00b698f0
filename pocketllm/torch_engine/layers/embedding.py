"""Token embeddings, kept as they are stored."""

from __future__ import annotations

import numpy as np
import torch

from pocketllm.torch_engine.weights import StoredTensor

_Q8_0_BLOCK = 32


class Embedding:
    """Rows of [vocab_size, hidden_size] as float32. Q8_0 stays in its blocks, float types in their type, others become float16.

    Args:
        tensor: the stored matrix.
        exact: keep other block types as float32 instead.
    """

    def __init__(self, tensor: StoredTensor, *, exact: bool) -> None:
        self._scales: torch.Tensor | None = None
        if tensor.type == "Q8_0":
            assert tensor.blocks is not None
            blocks = tensor.blocks.reshape(tensor.shape[0], -1, 2 + _Q8_0_BLOCK)
            self._scales = torch.from_numpy(blocks[..., :2].copy().view(np.float16))  # [vocab_size, hidden_size / 32, 1]
            self._table = torch.from_numpy(blocks[..., 2:].copy().view(np.int8))  # [vocab_size, hidden_size / 32, 32]
        elif tensor.values is not None:
            self._table = tensor.values
        else:
            self._table = tensor.float() if exact else tensor.float().half()
        self.num_bytes = self._table.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [num_tokens] int64 -> [num_tokens, hidden_size] float32."""
        rows = self._table[token_ids].float()
        if self._scales is None:
            return rows
        return (rows * self._scales[token_ids].float()).flatten(1)
