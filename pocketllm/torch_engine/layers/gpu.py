"""The parts of a model on a GPU: Triton's kernels where few rows make a product wait for memory, cuBLAS where many do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F

from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.kernels.activation import gated_activation
from pocketllm.torch_engine.kernels.attention import paged_decode, paged_prefill
from pocketllm.torch_engine.kernels.gated_delta import delta_decode, delta_prefill
from pocketllm.torch_engine.kernels.gguf_linear import gguf_rows
from pocketllm.torch_engine.kernels.heads import prepare_heads
from pocketllm.torch_engine.kernels.linear import norm_gated_linear
from pocketllm.torch_engine.kernels.moe import mixture_of_experts
from pocketllm.torch_engine.kernels.norm import rms_norm
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.compressed_attention import CompressedAttention, CompressedAttentionWeights
from pocketllm.torch_engine.layers.device import AnyBatch, AttentionSpec, DeltaNetWeights, Norm
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.layers.feed_forward import MixtureOfExperts
from pocketllm.torch_engine.layers.gpu_compressed import GpuCompressedAttention, GpuGroupedLinear
from pocketllm.torch_engine.layers.gpu_experts import GpuClampedGate, GpuRoutedExperts
from pocketllm.torch_engine.layers.gpu_hyper import GpuHyperConnection, GpuHyperHead
from pocketllm.torch_engine.layers.gpu_linear import GpuLinear, GpuWeights, is_fp4
from pocketllm.torch_engine.layers.hyper_connection import HyperConnection, HyperHead, HyperWeights
from pocketllm.torch_engine.layers.linear import GroupedLinear, Linear
from pocketllm.torch_engine.layers.rope import RotaryEmbedding
from pocketllm.torch_engine.layers.routed_experts import RoutedExperts, Router
from pocketllm.torch_engine.layers.state_cache import HybridCache
from pocketllm.torch_engine.rank_group import RankGroup
from pocketllm.torch_engine.share import ALONE
from pocketllm.torch_engine.weights import StoredExperts, StoredFeedForward, StoredMatrix, StoredTensor

# config.json's name of an activation -> the kernels'
_ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class GpuDevice:
    """One GPU.

    Args:
        device: of the weights and caches.
        dtype: of weights, products and what flows between layers; the residual stream, sums and logits are float32. Quantized weights stay as
            they are stored.
        group: the ranks that share the model, or None for one.
        expert_cache: of routed experts, or None for all of them.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, group: RankGroup | None = None, expert_cache: ExpertCache | None = None) -> None:
        self.device, self._group, self.expert_cache = device, group, expert_cache
        self.share = ALONE if group is None else group.share
        self.dtype: torch.dtype | None = dtype
        self._dtype = dtype

    def layers(self, linears: Iterable[StoredTensor] = (), head: StoredTensor | None = None, head_dim: int = 0) -> GpuLayers:
        return GpuLayers(self.device, self._dtype, self._group)


class GpuLayers:
    """See device.Layers and GpuDevice."""

    def __init__(self, device: torch.device, compute_dtype: torch.dtype, group: RankGroup | None = None) -> None:
        self._device, self.compute_dtype, self.activations, self._group = device, compute_dtype, compute_dtype, group
        self.native_kernels = "made for the CPU"
        self._weights = GpuWeights(device, compute_dtype)

    def norm(self, stored: StoredTensor, eps: float, offset: float = 0.0) -> Norm:
        return Norm((stored.float() + offset).to(self._device), eps)

    def embedding(self, table: StoredTensor) -> GpuEmbedding:
        return GpuEmbedding(self._weights, table)

    def linear(self, matrix: StoredMatrix) -> GpuLinear:
        return self._weights.linear(matrix)

    def grouped_linear(self, matrix: StoredTensor, groups: int) -> Linear:
        whole = None if matrix.blocks is not None or is_fp4(matrix) else self.linear(StoredMatrix([matrix], [])).single
        if whole is not None:
            return GpuGroupedLinear(whole, groups)
        return GroupedLinear([self.linear(StoredMatrix([part], [])) for part in matrix.row_parts(groups)])

    def routed_experts(self, router: Router, experts: Sequence[StoredFeedForward], shared: StoredFeedForward, limit: float) -> RoutedExperts | None:
        if not all(is_fp4(tensor) for expert in experts for tensor in expert.linears):
            return None
        gate_up = self._weights.fp4_experts([expert.gate_up for expert in experts])
        down = self._weights.fp4_experts([expert.down for expert in experts])
        return GpuRoutedExperts(router, gate_up, down, GpuClampedGate(self.linear(shared.gate_up), self.linear(shared.down), limit), limit)

    def hyper_connection(self, weights: HyperWeights, norm: Norm, num_lanes: int, num_iterations: int) -> HyperConnection:
        return GpuHyperConnection(weights, norm, self.activations, num_lanes, num_iterations)

    def hyper_head(self, weights: HyperWeights) -> HyperHead:
        return GpuHyperHead(weights)

    def compressed_attention(self, weights: CompressedAttentionWeights, index: int) -> CompressedAttention:
        return GpuCompressedAttention(weights, index)

    def rope(
        self, rotary_dim: int, theta: float, max_positions: int, scaling: Mapping[str, Any] | None = None, factors: torch.Tensor | None = None
    ) -> RotaryEmbedding:
        return RotaryEmbedding(rotary_dim, theta, max_positions, scaling, factors, self._device)

    def projection(self, norm: Norm, matrix: StoredMatrix) -> GpuProjection:
        return GpuProjection(norm, self._weights.linear(matrix))

    def addition(self, matrix: StoredMatrix, norm: Norm | None = None) -> GpuAddition:
        return GpuAddition(self._weights.linear(matrix), norm, self._group)

    def feed_forward(self, norm: Norm, stored: StoredFeedForward | StoredExperts, norm_after: Norm | None = None) -> GpuFeedForward | GpuMixture:
        if isinstance(stored, StoredFeedForward):
            gate_up, down = self._weights.linear(stored.gate_up), self._weights.linear(stored.down)
            return GpuFeedForward(norm, gate_up, down, _ACTIVATIONS[stored.activation], norm_after, self._group)
        return GpuMixture(self._weights, norm, stored, norm_after, self._group)

    def attention(self, spec: AttentionSpec) -> GpuAttention:
        return GpuAttention(spec)

    def delta_net(self, weights: DeltaNetWeights) -> GpuDeltaNet:
        return GpuDeltaNet(weights, self._device)

    def head(self, norm: Norm, matrix: StoredTensor) -> GpuHead:
        return GpuHead(norm, self._weights.linear(StoredMatrix([matrix], [])), self._group)


class GpuEmbedding:
    """See device.Embedding. Blocks stay as they are; other values have the compute dtype, so that a tied head can share them."""

    def __init__(self, weights: GpuWeights, table: StoredTensor) -> None:
        self._weight = weights.matrix(table)
        self.num_bytes = weights.num_bytes(self._weight)

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(self._weight, torch.Tensor):
            return F.embedding(token_ids, self._weight).float()
        return gguf_rows(self._weight, token_ids)


class GpuProjection:
    """See device.Projection."""

    def __init__(self, norm: Norm, linear: GpuLinear) -> None:
        self._norm, self._linear = norm, linear
        self.num_bytes = linear.num_bytes

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._linear.after_norm(hidden, self._norm)


class GpuAddition:
    """See device.Addition."""

    def __init__(self, linear: GpuLinear, norm: Norm | None, group: RankGroup | None) -> None:
        self._linear, self._norm, self._group = linear, norm, group
        self.num_bytes = linear.num_bytes

    def add(self, hidden: torch.Tensor, x: torch.Tensor) -> None:
        if self._norm is None and self._group is None:
            self._linear.add(hidden, x)
            return
        output = self._linear(x, torch.float32)
        if self._group is not None:
            output = self._group.sum(output)
        hidden += output if self._norm is None else rms_norm(output, self._norm.weight, self._norm.eps, torch.float32)


class GpuFeedForward:
    """See device.FeedForward."""

    is_capturable = True

    def __init__(self, norm: Norm, gate_up: GpuLinear, down: GpuLinear, activation: str, norm_after: Norm | None, group: RankGroup | None) -> None:
        self._norm, self._gate_up, self._activation = norm, gate_up, activation
        self._down = GpuAddition(down, norm_after, group)
        self.num_bytes = gate_up.num_bytes + down.num_bytes

    def add(self, hidden: torch.Tensor) -> None:
        single = self._gate_up.single
        if single is not None:
            inner = norm_gated_linear(hidden, self._norm.weight, self._norm.eps, single, self._activation, out_dtype=self._gate_up.dtype)
        else:
            inner = gated_activation(self._gate_up.after_norm(hidden, self._norm), self._activation)
        self._down.add(hidden, inner)


class GpuAttention:
    """See device.Mixer and device.AttentionSpec."""

    def __init__(self, spec: AttentionSpec) -> None:
        self._spec = spec
        self._scale = spec.head_dim**-0.5 if spec.scale is None else spec.scale
        self._query_norm = None if spec.query_norm is None else spec.query_norm.weight
        self._key_norm = None if spec.key_norm is None else spec.key_norm.weight
        self._eps = 0.0 if spec.query_norm is None else spec.query_norm.eps

    def __call__(self, projected: torch.Tensor, batch: AnyBatch, cache: KVCache, layer: int) -> torch.Tensor:
        batch, spec, stored = cast(DeviceBatch, batch), self._spec, cache.blocks[layer]
        queries = prepare_heads(
            projected,
            spec.num_heads * spec.head_dim if spec.gated else 0,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            self._query_norm,
            self._key_norm,
            self._eps,
            spec.rope.cos,
            spec.rope.sin,
            batch.positions,
            batch.slot_mapping,
            stored,
            early=True,
        )
        gate = projected[:, : spec.num_heads * spec.head_dim] if spec.gated else None
        return attend(queries, stored, batch, self._scale, spec.window, gate).to(projected.dtype)


def attend(
    queries: torch.Tensor, stored: torch.Tensor, batch: DeviceBatch, scale: float, window: int | None = None, gate: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of each token to its own row's tokens up to itself; `stored`, a layer of the cache, already holds this step's keys and values.

    Args:
        queries: [num_tokens, num_heads, head_dim] in the cache's dtype.
        window: a token attends to this many tokens, itself included; None is all.
        gate: [num_tokens, num_heads * head_dim], rows any stride apart; the result is multiplied by its sigmoid.

    Returns:
        [num_tokens, num_heads * head_dim] in the cache's dtype.
    """
    count = batch.num_decode
    out = queries.new_empty(queries.shape[0], queries.shape[1] * queries.shape[2])
    if count:
        rows = batch.row_slots[:count], batch.lengths[:count]
        own_gate = None if gate is None else gate[:count]
        paged_decode(queries[:count], stored, batch.block_tables, *rows, scale, window, own_gate, out=out[:count], early=True)
    if (prompts := batch.prompts) is not None:
        paged_prefill(
            queries[count:],
            stored,
            batch.block_tables,
            batch.row_slots[count:],
            batch.lengths[count:],
            prompts.row_starts,
            batch.longest_prompt,
            scale,
            window,
            None if gate is None else gate[count:],
            out=out[count:],
            is_padded=batch.is_padded,
        )
    return out


class GpuDeltaNet:
    """See device.Mixer."""

    def __init__(self, weights: DeltaNetWeights, device: torch.device) -> None:
        self._arrays = (
            weights.conv.to(device).contiguous(),
            weights.decay_rate.to(device),
            weights.dt_bias.to(device),
            weights.norm.weight,
            weights.norm.eps,
            weights.sizes,
        )
        self._value_size = weights.sizes.value_size

    def __call__(self, projected: torch.Tensor, batch: AnyBatch, cache: KVCache, layer: int) -> torch.Tensor:
        batch, states = cast(DeviceBatch, batch), cast(HybridCache, cache).states
        conv, recurrent = states.conv[layer], states.recurrent[layer]
        count = batch.num_decode
        shape = projected.shape[0], self._value_size
        # Tokens of no row are to be finite in the layers that follow.
        out = projected.new_zeros(shape) if batch.is_padded and batch.prompts is not None else projected.new_empty(shape)
        if count:
            slots, positions = batch.state_slots[:count], batch.positions[:count]
            delta_decode(projected[:count], conv, recurrent, slots, positions, *self._arrays, out=out[:count], early=True)
        if batch.prompts is not None:
            slots, positions = batch.state_slots[count:], batch.positions[count:]
            delta_prefill(projected[count:], conv, recurrent, slots, positions, batch.prompts, *self._arrays, out=out[count:])
        return out


class GpuHead:
    """See device.Head."""

    def __init__(self, norm: Norm, linear: GpuLinear, group: RankGroup | None) -> None:
        self._norm, self._linear, self._group = norm, linear, group
        self.num_bytes = linear.num_bytes
        self._widths = () if group is None else group.numbers(linear.num_rows)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = self._linear.after_norm(hidden, self._norm, torch.float32)
        return logits if self._group is None else self._group.gather_columns(logits, self._widths)


class GpuMixture:
    """A mixture of experts; see device.FeedForward. Experts in blocks or in FP8 are computed one after another, and the host waits to learn which."""

    def __init__(self, weights: GpuWeights, norm: Norm, stored: StoredExperts, norm_after: Norm | None, group: RankGroup | None) -> None:
        self._norm, self._norm_after, self._dtype, self._group = norm, norm_after, weights.dtype, group
        self._router = stored.router.to(weights.device)
        self._top_k, self._normalize, self._activation = stored.top_k, stored.normalize, _ACTIVATIONS[stored.experts[0].activation]
        self.is_capturable = all(tensor.values is not None and tensor.scales is None for expert in stored.experts for tensor in expert.linears)
        if self.is_capturable:
            self._gate_up = torch.stack([weights.dense(expert.gate_up) for expert in stored.experts])  # [num_experts, 2 * size, hidden_size]
            self._down = torch.stack([weights.dense(expert.down) for expert in stored.experts])  # [num_experts, hidden_size, size]
            self.num_bytes = self._gate_up.nbytes + self._down.nbytes + self._router.nbytes
        else:
            self._mixture = MixtureOfExperts(self._router, [GpuGated(weights, expert) for expert in stored.experts], stored.top_k, normalize=stored.normalize)
            self.num_bytes = self._mixture.num_bytes
        self._shared: GpuGated | None = None
        if stored.shared is not None:
            assert stored.shared_gate is not None
            self._shared, self._shared_gate = GpuGated(weights, stored.shared), stored.shared_gate.to(weights.device)
            self.num_bytes += self._shared.num_bytes + self._shared_gate.nbytes

    def add(self, hidden: torch.Tensor) -> None:
        x = rms_norm(hidden, self._norm.weight, self._norm.eps, self._dtype)
        is_apart = self._norm_after is not None or self._group is not None
        output = torch.zeros_like(hidden) if is_apart else hidden
        if self.is_capturable:
            matrices = self._router, self._gate_up, self._down
            mixture_of_experts(x, *matrices, self._top_k, normalize=self._normalize, activation=self._activation, add_to=output)
        else:
            output += self._mixture(x)
        if self._shared is not None:
            output += self._shared(x) * F.linear(x.float(), self._shared_gate).sigmoid_()
        if self._group is not None:
            output = self._group.sum(output)
        if self._norm_after is None and is_apart:
            hidden += output
        elif self._norm_after is not None:
            hidden += rms_norm(output, self._norm_after.weight, self._norm_after.eps, torch.float32)


class GpuGated:
    """A dense feed-forward by itself; see feed_forward.TokenWise."""

    def __init__(self, weights: GpuWeights, stored: StoredFeedForward) -> None:
        self._gate_up, self._down = weights.linear(stored.gate_up), weights.linear(stored.down)
        self._activation = _ACTIVATIONS[stored.activation]
        self.num_bytes = self._gate_up.num_bytes + self._down.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(gated_activation(self._gate_up(x), self._activation))
