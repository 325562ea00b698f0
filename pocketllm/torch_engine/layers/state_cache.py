"""Recurrent state of hybrid models: a fixed number of values a layer and slot, however long the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.state_pool import StateCopy


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of one slot of one Gated DeltaNet layer.

    Args:
        conv_tail: tokens that the causal convolution looks back on, its kernel size less one.
        conv_dim: channels of the convolution.
        num_heads: value heads.
        key_dim, value_dim: of one head.
    """

    conv_tail: int
    conv_dim: int
    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_bytes(self) -> int:
        return 4 * (self.conv_tail * self.conv_dim + self.num_heads * self.key_dim * self.value_dim)


class StateCache:
    """States of every Gated DeltaNet layer, by slot. StatePool says what each slot holds.

    Memory is taken from the system when a slot is first written, not before.

    Args:
        num_layers, num_slots: sizes.
        shape: of one slot in one layer.

    Attributes:
        conv: a layer: [num_slots, conv_tail, conv_dim] float32, the last inputs of the convolution, oldest first, 0 before the row's beginning.
        recurrent: a layer: [num_slots, num_heads, key_dim, value_dim] float32.
    """

    def __init__(self, num_layers: int, num_slots: int, shape: StateShape) -> None:
        self._conv = _zero_pages(num_layers, num_slots, shape.conv_tail, shape.conv_dim)
        self._recurrent = _zero_pages(num_layers, num_slots, shape.num_heads, shape.key_dim, shape.value_dim)
        self.conv = list(self._conv)
        self.recurrent = list(self._recurrent)
        self.num_bytes = self._conv.nbytes + self._recurrent.nbytes

    def run(self, copies: Sequence[StateCopy]) -> None:
        """Carry out `copies` one after another, over all layers: a later one may overwrite what an earlier one has read."""
        for copy in copies:
            for states in (self._conv, self._recurrent):
                if copy.source is None:
                    states[:, copy.target] = 0  # not a product: what a failed row left may not be finite
                else:
                    states[:, copy.target] = states[:, copy.source]


class HybridCache(KVCache):
    """Paged keys and values of a hybrid model's attention layers, counted from 0 among themselves, and the states of its other layers."""

    def __init__(self, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, states: StateCache) -> None:
        super().__init__(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype)
        self.states = states


def _zero_pages(*shape: int) -> torch.Tensor:
    return torch.from_numpy(np.zeros(shape, dtype=np.float32))  # calloc, as in KVCache
