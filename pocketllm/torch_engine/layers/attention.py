"""Causal attention over a paged KV cache, with PyTorch's fused kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from pocketllm.torch_engine.batch import Batch, Decode, Prefill
from pocketllm.torch_engine.state_pool import StateCopy

_NUMPY_BITS = {torch.float32: np.uint32, torch.bfloat16: np.uint16, torch.float16: np.uint16}


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros for a cache. The CPU's memory is taken from the system when it is first written, not before."""
    if device.type != "cpu":
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(shape, dtype=_NUMPY_BITS[dtype])).view(dtype)  # calloc; torch.zeros writes all pages


class States(Protocol):
    """What rows keep by slot."""

    num_bytes: int

    def run(self, copies: Sequence[StateCopy]) -> None:
        """Carry out `copies` one after another, over all layers: a later one may overwrite what an earlier one has read."""


class KVCache:
    """Keys and values of every layer, by slot; slot s is place s % block_size of block s // block_size.

    Args:
        num_layers, num_blocks, block_size, num_kv_heads, head_dim: sizes.
        dtype: of the cached values.
        device: where they lie.

    Attributes:
        blocks: a layer: [num_blocks, block_size, 2, num_kv_heads, head_dim], keys before values.
        states: what a hybrid model keeps of each row by slot, else None.
    """

    states: States | None = None

    def __init__(
        self,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ) -> None:
        self.device = torch.device(device)
        stored = zeros((num_layers, num_blocks, block_size, 2, num_kv_heads, head_dim), dtype, self.device)
        self.blocks = list(stored)
        self._slots = [layer.flatten(0, 1) for layer in self.blocks]  # a layer: [num_slots, 2, num_kv_heads, head_dim]
        self._keys = [layer[:, 0] for layer in self._slots]
        self._values = [layer[:, 1] for layer in self._slots]
        self.dtype = dtype
        self.num_bytes = stored.nbytes

    def write(self, layer: int, slot_mapping: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Store keys and values, each [num_tokens, num_kv_heads, head_dim] in the cache's dtype, at slot_mapping [num_tokens]."""
        self._keys[layer].index_copy_(0, slot_mapping, keys)
        self._values[layer].index_copy_(0, slot_mapping, values)

    def clear(self, slots: torch.Tensor) -> None:
        """Zero `slots` [num_slots] int64 in every layer, for values that are not finite: even a masked NaN spoils the row that takes its block next."""
        for layer in self._slots:
            layer.index_fill_(0, slots, 0)

    def read(self, layer: int, blocks: torch.Tensor | slice, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of `num_rows` rows, each [num_rows, num_kv_heads, num_slots a row, head_dim].

        `blocks` lists the rows' blocks one after another, equally many a row; or, for one row, is a run of neighbouring ones, read in place.
        """
        stored = self.blocks[layer]
        run = stored[blocks] if isinstance(blocks, slice) else stored.index_select(0, blocks)
        by_row = run.flatten(0, 1).unflatten(0, (num_rows, -1))  # [num_rows, slots, 2, num_kv_heads, head_dim]
        return by_row[:, :, 0].transpose(1, 2), by_row[:, :, 1].transpose(1, 2)


def paged_attention(queries: torch.Tensor, cache: KVCache, layer: int, batch: Batch, scale: float | None = None, window: int | None = None) -> torch.Tensor:
    """Attention of each token to its own row's tokens up to itself; `cache` already holds this step's keys and values.

    Args:
        queries: [num_tokens, num_heads, head_dim] in the cache's dtype; query head h reads KV head h // (num_heads / num_kv_heads).
        scale: of the scores; None is head_dim^-0.5.
        window: a token attends to this many tokens, itself included; None is all. What has left the window stays in its blocks, which
            a row with the same beginning may share, and is not read.

    Returns:
        [num_tokens, num_heads * head_dim] in the same dtype.
    """
    parts = []
    if batch.num_decode:
        parts.append(_decode(queries[: batch.num_decode], cache, layer, batch.decode(window), scale))
    parts += [_prefill(queries[prefill.tokens], cache, layer, prefill, scale) for prefill in batch.windowed_prefills(window)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _decode(queries: torch.Tensor, cache: KVCache, layer: int, rows: Decode, scale: float | None) -> torch.Tensor:
    num_rows, num_heads, head_dim = queries.shape
    keys, values = cache.read(layer, rows.blocks, num_rows)
    if num_rows == 1:
        keys, values = keys[:, :, rows.seen], values[:, :, rows.seen]
    # The query heads of one KV head stand as its query positions: keys and values are read once for all of them.
    grouped = queries.unflatten(1, (keys.shape[1], -1))  # [num_rows, num_kv_heads, group, head_dim]
    return F.scaled_dot_product_attention(grouped, keys, values, attn_mask=rows.mask, scale=scale).reshape(num_rows, num_heads * head_dim)


def _prefill(queries: torch.Tensor, cache: KVCache, layer: int, prefill: Prefill, scale: float | None) -> torch.Tensor:
    num_tokens, num_heads, head_dim = queries.shape
    keys, values = cache.read(layer, prefill.blocks, 1)
    keys, values = keys[:, :, : prefill.length], values[:, :, : prefill.length]
    attended = F.scaled_dot_product_attention(
        queries.transpose(0, 1).unsqueeze(0),
        keys,
        values,
        attn_mask=prefill.mask,
        is_causal=prefill.mask is None,
        scale=scale,
        enable_gqa=keys.shape[1] != num_heads,
    )
    return attended.squeeze(0).transpose(0, 1).reshape(num_tokens, num_heads * head_dim)
