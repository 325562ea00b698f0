"""The parts of a model on the CPU: torch's operators, and the native kernels where they suit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.kernels.native import Q4Linear, Team, pack_q4, unsuited
from pocketllm.torch_engine.layers.activation import GATED_ACTIVATIONS
from pocketllm.torch_engine.layers.attention import KVCache, paged_attention
from pocketllm.torch_engine.layers.compressed_attention import CompressedAttention, CompressedAttentionWeights
from pocketllm.torch_engine.layers.device import AnyBatch, AttentionSpec, DeltaNetWeights, Norm
from pocketllm.torch_engine.layers.embedding import Embedding
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.layers.feed_forward import GatedFeedForward, MixtureOfExperts, SharedExpert, TokenWise
from pocketllm.torch_engine.layers.gated_delta_net import GatedDeltaNet
from pocketllm.torch_engine.layers.hyper_connection import HyperConnection, HyperHead, HyperWeights
from pocketllm.torch_engine.layers.linear import Biased, GroupedLinear, Linear, build_head, build_linear, default_dtype
from pocketllm.torch_engine.layers.norm import HeadNorm, RMSNorm
from pocketllm.torch_engine.layers.rope import RotaryEmbedding, rotate
from pocketllm.torch_engine.layers.routed_experts import RoutedExperts, Router
from pocketllm.torch_engine.layers.state_cache import HybridCache
from pocketllm.torch_engine.rank_group import RankGroup
from pocketllm.torch_engine.share import ALONE
from pocketllm.torch_engine.weights import StoredExperts, StoredFeedForward, StoredMatrix, StoredTensor

Sum = Callable[[torch.Tensor], torch.Tensor]  # over the ranks


class CpuDevice:
    """The processor.

    Args:
        dtype: compute dtype, as layers/linear.py describes them. None is the native kernels where they suit the model, else the most
            exact of the fast ones.
        native_threads: threads of the native kernels; 0 is without them.
        group: the ranks that share the model, or None for one.
        expert_cache: of routed experts, or None for all of them.
    """

    def __init__(
        self, dtype: torch.dtype | None = None, native_threads: int = 0, group: RankGroup | None = None, expert_cache: ExpertCache | None = None
    ) -> None:
        self.device = torch.device("cpu")
        self.share, self.expert_cache = ALONE if group is None else group.share, expert_cache
        self.dtype, self._native_threads, self._group = dtype, native_threads, group

    def layers(self, linears: Iterable[StoredTensor] = (), head: StoredTensor | None = None, head_dim: int = 0) -> CpuLayers:
        if not self._native_threads:
            obstacle: str | None = "turned off"
        elif self._group is not None:
            obstacle = "not made for several ranks"
        elif head is None:
            obstacle = "not made for layers of linear attention"
        else:
            obstacle = "used by dtype auto only" if self.dtype is not None else unsuited(list(linears), head, head_dim)
        team = Team(self._native_threads) if obstacle is None else None
        return CpuLayers(self.dtype or (torch.float32 if team is not None else default_dtype()), team, obstacle or "in use", self._group)


class CpuLayers:
    """See device.Layers.

    Args:
        compute_dtype: of the products; the residual stream and the logits are float32 under each.
        team: threads of the native products, or None for torch's.
        native_kernels: why there are none, or that they are used.
        group: the ranks that share the model, or None for one.
    """

    def __init__(self, compute_dtype: torch.dtype, team: Team | None, native_kernels: str, group: RankGroup | None = None) -> None:
        self._sum: Sum = _unchanged if group is None else lambda part: group.sum(part.float())
        self.compute_dtype, self.team, self.native_kernels = compute_dtype, team, native_kernels
        self.activations = torch.bfloat16 if compute_dtype == torch.bfloat16 else torch.float32

    def norm(self, stored: StoredTensor, eps: float, offset: float = 0.0) -> Norm:
        return Norm(stored.float() + offset, eps)

    def embedding(self, table: StoredTensor) -> Embedding:
        return Embedding(table, exact=self.compute_dtype == torch.float32)

    def grouped_linear(self, matrix: StoredTensor, groups: int) -> Linear:
        return GroupedLinear([self.linear(StoredMatrix([part], [])) for part in matrix.row_parts(groups)])

    def routed_experts(self, router: Router, experts: Sequence[StoredFeedForward], shared: StoredFeedForward, limit: float) -> RoutedExperts | None:
        return None

    def hyper_connection(self, weights: HyperWeights, norm: Norm, num_lanes: int, num_iterations: int) -> HyperConnection:
        return HyperConnection(weights, norm, self.activations, num_lanes, num_iterations)

    def hyper_head(self, weights: HyperWeights) -> HyperHead:
        return HyperHead(weights)

    def compressed_attention(self, weights: CompressedAttentionWeights, index: int) -> CompressedAttention:
        return CompressedAttention(weights, index)

    def rope(
        self, rotary_dim: int, theta: float, max_positions: int, scaling: Mapping[str, Any] | None = None, factors: torch.Tensor | None = None
    ) -> RotaryEmbedding:
        return RotaryEmbedding(rotary_dim, theta, max_positions, scaling, factors)

    def projection(self, norm: Norm, matrix: StoredMatrix) -> CpuProjection:
        return CpuProjection(self._norm(norm, self.activations), self.linear(matrix))

    def addition(self, matrix: StoredMatrix, norm: Norm | None = None) -> CpuAddition:
        return CpuAddition(self.linear(matrix), None if norm is None else self._norm(norm, torch.float32), self.activations, self._sum)

    def feed_forward(self, norm: Norm, stored: StoredFeedForward | StoredExperts, norm_after: Norm | None = None) -> CpuFeedForward:
        inner = self._gated(stored) if isinstance(stored, StoredFeedForward) else self._mixture(stored)
        return CpuFeedForward(self._norm(norm, self.activations), inner, None if norm_after is None else self._norm(norm_after, torch.float32), self._sum)

    def attention(self, spec: AttentionSpec) -> CpuAttention:
        return CpuAttention(spec, self.activations)

    def delta_net(self, weights: DeltaNetWeights) -> CpuDeltaNet:
        mixer = GatedDeltaNet(weights.sizes, weights.conv, weights.decay_rate, weights.dt_bias, weights.norm.weight, weights.norm.eps)
        return CpuDeltaNet(mixer, self.activations)

    def head(self, norm: Norm, matrix: StoredTensor) -> CpuHead:
        return CpuHead(self._norm(norm, torch.float32), build_head(matrix, self.compute_dtype))

    def _norm(self, norm: Norm, dtype: torch.dtype) -> RMSNorm:
        return RMSNorm(norm.weight, norm.eps, dtype)

    def linear(self, matrix: StoredMatrix) -> Linear:
        linear = build_linear(matrix.tensors, self.compute_dtype) if self.team is None else Q4Linear(pack_q4(matrix.tensors), self.team)
        return Biased(linear, torch.cat([bias.float() for bias in matrix.biases])) if matrix.biases else linear

    def _gated(self, stored: StoredFeedForward) -> GatedFeedForward:
        return GatedFeedForward(self.linear(stored.gate_up), self.linear(stored.down), GATED_ACTIVATIONS[stored.activation])

    def _mixture(self, stored: StoredExperts) -> TokenWise:
        mixture = MixtureOfExperts(stored.router, [self._gated(expert) for expert in stored.experts], stored.top_k, normalize=stored.normalize)
        if stored.shared is None:
            return mixture
        assert stored.shared_gate is not None
        return SharedExpert(mixture, self._gated(stored.shared), stored.shared_gate)


def _unchanged(part: torch.Tensor) -> torch.Tensor:
    return part


class CpuProjection:
    """See device.Projection."""

    def __init__(self, norm: RMSNorm, linear: Linear) -> None:
        self.norm, self.linear = norm, linear
        self.num_bytes = linear.num_bytes

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear(self.norm(hidden))


class CpuAddition:
    """See device.Addition."""

    def __init__(self, linear: Linear, norm: RMSNorm | None, activations: torch.dtype, total: Sum) -> None:
        self.linear, self._norm, self._activations, self._sum = linear, norm, activations, total
        self.num_bytes = linear.num_bytes

    def add(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        output = self._sum(self.linear(x.to(self._activations)))
        hidden += output if self._norm is None else self._norm(output.float())


class CpuFeedForward:
    """See device.FeedForward."""

    is_capturable = False

    def __init__(self, norm: RMSNorm, inner: TokenWise, norm_after: RMSNorm | None, total: Sum) -> None:
        self.norm, self.inner, self._norm_after, self._sum = norm, inner, norm_after, total
        self.num_bytes = inner.num_bytes

    def add(self, hidden: torch.Tensor) -> None:
        output = self._sum(self.inner(self.norm(hidden)))
        hidden += output if self._norm_after is None else self._norm_after(output.float())


class CpuAttention:
    """See device.Mixer and device.AttentionSpec."""

    def __init__(self, spec: AttentionSpec, activations: torch.dtype) -> None:
        self._spec, self._activations = spec, activations
        self._head_norm: Callable[[torch.Tensor], torch.Tensor] | None = None
        if spec.query_norm is not None:
            assert spec.key_norm is not None
            self._head_norm = HeadNorm(spec.query_norm.weight, spec.key_norm.weight, spec.num_heads, spec.num_kv_heads, spec.query_norm.eps)

    def __call__(self, projected: torch.Tensor, batch: AnyBatch, cache: KVCache, layer: int) -> torch.Tensor:
        batch, spec = cast(Batch, batch), self._spec
        num_q, num_kv = spec.num_heads, spec.num_kv_heads
        heads = projected.unflatten(-1, (-1, spec.head_dim))  # gates, queries, keys, values
        first = num_q if spec.gated else 0
        query_key, value = heads[:, first : first + num_q + num_kv], heads[:, first + num_q + num_kv :]
        if self._head_norm is not None:
            query_key = self._head_norm(query_key)
        rotated = rotate(query_key, *batch.rotation(spec.rope)).to(cache.dtype)
        cache.write(layer, batch.slot_mapping, rotated[:, num_q:], value.to(cache.dtype))
        attended = paged_attention(rotated[:, :num_q], cache, layer, batch, spec.scale, spec.window).to(self._activations)
        return attended * heads[:, :num_q].flatten(1).sigmoid() if spec.gated else attended


class CpuDeltaNet:
    """See device.Mixer."""

    def __init__(self, mixer: GatedDeltaNet, activations: torch.dtype) -> None:
        self._mixer, self._activations = mixer, activations

    def __call__(self, projected: torch.Tensor, batch: AnyBatch, cache: KVCache, layer: int) -> torch.Tensor:
        return self._mixer(projected.float(), cast(Batch, batch), cast(HybridCache, cache).states, layer).to(self._activations)


class CpuHead:
    """See device.Head."""

    def __init__(self, norm: RMSNorm, linear: Linear) -> None:
        self._norm, self._linear = norm, linear
        self.num_bytes = linear.num_bytes

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear(self._norm(hidden))
