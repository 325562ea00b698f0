"""Sizes of a model's caches on one device, read from its config before it is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE, CacheNeeds, CachePlan
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.compressed_cache import CompressedCache, CompressedShape
from pocketllm.torch_engine.layers.state_cache import HybridCache, StateCache, StateShape
from pocketllm.torch_engine.models.registry import COMPRESSED, HYBRIDS, kv_sizes
from pocketllm.torch_engine.share import ALONE, Share


class CacheShape(ABC):
    """What a model keeps of each token and of each row."""

    @property
    @abstractmethod
    def token_bytes(self) -> int:
        """Of one token in the blocks, over all layers; above 0."""

    @property
    @abstractmethod
    def slot_bytes(self) -> int:
        """Of one row's state, over all layers; 0 in a model without any."""

    @abstractmethod
    def build(self, plan: CachePlan, device: torch.device) -> KVCache:
        """The caches."""

    def needs(self, args: EngineArgs, context_length: int, max_rows: int, chunk_tokens: int) -> CacheNeeds:
        return CacheNeeds(
            token_bytes=self.token_bytes,
            slot_bytes=self.slot_bytes,
            max_rows=max_rows,
            may_lower_rows=args.max_batch_size is None,
            context_length=context_length,
            may_shorten=args.max_model_len is None,
            snapshots=args.enable_prefix_caching,
            chunk_tokens=chunk_tokens,
        )


@dataclass(frozen=True, slots=True)
class PagedShape(CacheShape):
    """Keys and values of every token, and the states of the layers that have one.

    Args:
        num_layers, num_kv_heads, head_dim: of the layers with attention.
        dtype: of keys and values.
        num_state_layers: layers with a recurrent state, whose slots have the shape `state`; None without any.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    num_state_layers: int = 0
    state: StateShape | None = None

    @property
    def token_bytes(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def slot_bytes(self) -> int:
        return 0 if self.state is None else self.num_state_layers * self.state.num_bytes

    def build(self, plan: CachePlan, device: torch.device) -> KVCache:
        sizes = (self.num_layers, plan.num_blocks, BLOCK_SIZE, self.num_kv_heads, self.head_dim, self.dtype)
        if self.state is None:
            return KVCache(*sizes, device)
        return HybridCache(*sizes, StateCache(self.num_state_layers, plan.max_rows + plan.num_snapshots, self.state, device), device)


@dataclass(frozen=True, slots=True)
class CompressedPastShape(CacheShape):
    """Entries of compressed tokens, and the states of rows.

    Args:
        shape: of the model.
        dtype: of entries and windows.
    """

    shape: CompressedShape
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        return max(1, -(-self.shape.block_bytes(BLOCK_SIZE, self.dtype) // BLOCK_SIZE))

    @property
    def slot_bytes(self) -> int:
        return self.shape.slot_bytes(self.dtype)

    def build(self, plan: CachePlan, device: torch.device) -> KVCache:
        return CompressedCache(self.shape, plan.num_blocks, BLOCK_SIZE, plan.max_rows + plan.num_snapshots, self.dtype, device)


def cache_shape(checkpoint: Checkpoint, dtype: torch.dtype, *, keeps_ring: bool, share: Share = ALONE) -> CacheShape:
    """The caches of the model of `checkpoint`.

    Args:
        dtype: of what is kept of tokens.
        keeps_ring: the convolution's inputs are kept as layers/state_cache.py says of a GPU.
        share: what of the model this rank holds.
    """
    if (read_compressed := COMPRESSED.get(checkpoint.architecture)) is not None:
        return CompressedPastShape(read_compressed(checkpoint).cache, dtype)
    num_layers, all_kv_heads, head_dim = kv_sizes(checkpoint)
    kv_heads = all_kv_heads // share.size
    read_hybrid = HYBRIDS.get(checkpoint.architecture)
    if read_hybrid is None:
        return PagedShape(num_layers, kv_heads, head_dim, dtype)
    hybrid = read_hybrid(checkpoint)
    state, kernel = hybrid.delta_net.dealt_out(share).state_shape, hybrid.delta_net.conv_kernel
    return PagedShape(
        hybrid.num_attention_layers, kv_heads, head_dim, dtype, hybrid.num_state_layers, replace(state, conv_tail=kernel) if keeps_ring else state
    )
