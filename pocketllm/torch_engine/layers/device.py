"""What a model is made of on any device: parts that a device builds from stored tensors, in the layout in which it computes.

Every part works on the residual stream, hidden [num_tokens, hidden_size] float32; what flows between two parts of a layer has the
device's activation dtype. A device is free to fuse what is inside one part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.layers.gated_delta_net import DeltaNetSizes
from pocketllm.torch_engine.layers.linear import Linear
from pocketllm.torch_engine.layers.rope import RotaryEmbedding
from pocketllm.torch_engine.share import Share
from pocketllm.torch_engine.weights import StoredExperts, StoredFeedForward, StoredMatrix, StoredTensor

if TYPE_CHECKING:
    from pocketllm.torch_engine.layers.compressed_attention import CompressedAttention, CompressedAttentionWeights
    from pocketllm.torch_engine.layers.hyper_connection import HyperConnection, HyperHead, HyperWeights
    from pocketllm.torch_engine.layers.routed_experts import RoutedExperts, Router

AnyBatch = Batch | DeviceBatch


@dataclass(frozen=True, slots=True)
class Norm:
    """RMS normalisation: x / sqrt(mean(x^2) + eps) * weight. weight: [size] float32."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """One layer's attention over what its projection gives: gates where it is gated, then queries, keys and values.

    Args:
        num_heads, num_kv_heads, head_dim: query head h reads KV head h // (num_heads / num_kv_heads).
        rope: rotation of queries and keys, one of those that the device made.
        scale: of the scores; None is head_dim^-0.5.
        window: a token attends to this many tokens, itself included; None is all.
        query_norm, key_norm: of each head before it is rotated, or None.
        gated: each head's result is multiplied by the sigmoid of its gate.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RotaryEmbedding
    scale: float | None = None
    window: int | None = None
    query_norm: Norm | None = None
    key_norm: Norm | None = None
    gated: bool = False


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """One Gated DeltaNet layer beside its projections.

    Args:
        sizes: heads and widths.
        conv: [conv_kernel, conv_dim] float32, the oldest token's first.
        decay_rate: [num_value_heads] float32, below 0.
        dt_bias: [num_value_heads] float32.
        norm: of each head's result, before its gate.
    """

    sizes: DeltaNetSizes
    conv: torch.Tensor
    decay_rate: torch.Tensor
    dt_bias: torch.Tensor
    norm: Norm


class Embedding(Protocol):
    """token_ids: [num_tokens] int64 -> [num_tokens, hidden_size] float32."""

    num_bytes: int

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor: ...


class Projection(Protocol):
    """A norm and the matrices behind it: hidden [num_tokens, hidden_size] -> [num_tokens, out]."""

    num_bytes: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Addition(Protocol):
    """A matrix whose result, normalised where there is a norm, is added to the residual stream."""

    num_bytes: int

    def add(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        """hidden: [num_tokens, hidden_size], changed in place; x: [num_tokens, in]."""


class FeedForward(Protocol):
    """A norm, a dense or mixed feed-forward, and a norm where there is one, added to the residual stream.

    Attributes:
        is_capturable: a CUDA graph can hold it: it never waits for the device.
    """

    num_bytes: int
    is_capturable: bool

    def add(self, hidden: torch.Tensor) -> None:
        """hidden: [num_tokens, hidden_size], changed in place."""


class Mixer(Protocol):
    """What mixes a row's tokens: projected [num_tokens, width] -> [num_tokens, size]. It reads and writes the cache of `layer`, which counts layers
    of its kind."""

    def __call__(self, projected: torch.Tensor, batch: AnyBatch, cache: KVCache, layer: int) -> torch.Tensor: ...


class Head(Protocol):
    """The final norm and the output matrix: hidden [num_rows, hidden_size] -> logits [num_rows, vocab_size] float32.

    Of a model that several ranks share, those on a CPU get the logits of their own ids, Share.nearly(vocab_size), and those on GPUs all.
    """

    num_bytes: int

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor: ...


class Layers(Protocol):
    """Builds the parts of one model.

    Attributes:
        compute_dtype: of the products, as the device describes it.
        native_kernels: whether the native CPU kernels are in use, or why not, in a few words for people.
        activations: dtype of what flows between two parts of a layer.
    """

    compute_dtype: torch.dtype
    native_kernels: str
    activations: torch.dtype

    def norm(self, stored: StoredTensor, eps: float, offset: float = 0.0) -> Norm:
        """The norm whose weights are the stored ones plus `offset`."""

    def embedding(self, table: StoredTensor) -> Embedding: ...

    def linear(self, matrix: StoredMatrix) -> Linear:
        """The product alone, from and to the activations' dtype."""

    def grouped_linear(self, matrix: StoredTensor, groups: int) -> Linear:
        """The product of each of `groups` equal parts of the rows with columns of its own: `matrix` [groups * out, in], x [num_tokens, groups * in]."""

    def routed_experts(self, router: Router, experts: Sequence[StoredFeedForward], shared: StoredFeedForward, limit: float) -> RoutedExperts | None:
        """All of a layer's experts as one part, where the device has one for how they are stored; gate and up are held within `limit`."""

    def hyper_connection(self, weights: HyperWeights, norm: Norm, num_lanes: int, num_iterations: int) -> HyperConnection: ...

    def hyper_head(self, weights: HyperWeights) -> HyperHead: ...

    def compressed_attention(self, weights: CompressedAttentionWeights, index: int) -> CompressedAttention: ...

    def rope(
        self, rotary_dim: int, theta: float, max_positions: int, scaling: Mapping[str, Any] | None = None, factors: torch.Tensor | None = None
    ) -> RotaryEmbedding: ...

    def projection(self, norm: Norm, matrix: StoredMatrix) -> Projection: ...

    def addition(self, matrix: StoredMatrix, norm: Norm | None = None) -> Addition: ...

    def feed_forward(self, norm: Norm, stored: StoredFeedForward | StoredExperts, norm_after: Norm | None = None) -> FeedForward: ...

    def attention(self, spec: AttentionSpec) -> Mixer: ...

    def delta_net(self, weights: DeltaNetWeights) -> Mixer: ...

    def head(self, norm: Norm, matrix: StoredTensor) -> Head: ...


class Device(Protocol):
    """Where a model runs.

    Attributes:
        device: of the weights and caches.
        dtype: compute dtype, as the device describes it; None leaves the choice to the model.
        share: what of a model this rank holds. Parts whose matrices hold some of the columns sum their products over the ranks.
        expert_cache: builds routed experts when they are chosen; None builds all of them when the model is loaded.
    """

    device: torch.device
    dtype: torch.dtype | None
    share: Share
    expert_cache: ExpertCache | None

    def layers(self, linears: Iterable[StoredTensor] = (), head: StoredTensor | None = None, head_dim: int = 0) -> Layers:
        """The builder for a model; its matrices may decide how the device computes, where the model's kind lets it choose."""
