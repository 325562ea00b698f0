"""Recurrent state of hybrid models: a fixed number of values a layer and slot, however long the row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pocketllm.torch_engine.layers.attention import KVCache, zeros
from pocketllm.torch_engine.state_pool import StateCopy


@dataclass(frozen=True, slots=True)
class StateShape:
    """Sizes of one slot of one Gated DeltaNet layer.

    Args:
        conv_tail: inputs of the causal convolution that are kept: those it looks back on, its kernel size less one, or on a GPU all that it covers.
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

    Args:
        num_layers, num_slots: sizes.
        shape: of one slot in one layer.
        device: where they lie.

    Attributes:
        conv: a layer: [num_slots, conv_tail, conv_dim] float32, the last inputs of the convolution, 0 before the row's beginning: oldest first,
            on a GPU that of position p at place p % conv_tail.
        recurrent: a layer: [num_slots, num_heads, key_dim, value_dim] float32.
    """

    def __init__(self, num_layers: int, num_slots: int, shape: StateShape, device: str | torch.device = "cpu") -> None:
        place = torch.device(device)
        self._conv = zeros((num_layers, num_slots, shape.conv_tail, shape.conv_dim), torch.float32, place)
        self._recurrent = zeros((num_layers, num_slots, shape.num_heads, shape.key_dim, shape.value_dim), torch.float32, place)
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

    states: StateCache

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        states: StateCache,
        device: str | torch.device = "cpu",
    ) -> None:
        super().__init__(num_layers, num_blocks, block_size, num_kv_heads, head_dim, dtype, device)
        self.states = states
