"""deepseek_v4: attention over a window and a compressed past, a residual stream of several lanes, and a mixture of experts in every layer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.compressed_attention import CompressedAttention, CompressedAttentionWeights
from pocketllm.torch_engine.layers.compressed_cache import CompressedCache, LayerShape
from pocketllm.torch_engine.layers.compressed_step import CompressedStep
from pocketllm.torch_engine.layers.compressor import CompressorWeights
from pocketllm.torch_engine.layers.device import AnyBatch, Device, Norm
from pocketllm.torch_engine.layers.expert_cache import place_experts
from pocketllm.torch_engine.layers.feed_forward import GatedFeedForward, mix_experts
from pocketllm.torch_engine.layers.hyper_connection import HyperConnection, HyperWeights, Lanes
from pocketllm.torch_engine.layers.linear import Linear
from pocketllm.torch_engine.layers.rope import RotaryEmbedding
from pocketllm.torch_engine.layers.routed_experts import ClampedSwiGLU, RoutedExperts, Router
from pocketllm.torch_engine.models.deepseek_v4_config import DeepseekV4Config
from pocketllm.torch_engine.models.deepseek_v4_names import file_name, predictor_names
from pocketllm.torch_engine.weights import StoredFeedForward, StoredMatrix, StoredTensor, Weights

logger = logging.getLogger(__name__)


class DeepseekV4:
    """The model on one device; arguments and errors are those of model.ModelClass.

    The layers that predict further tokens are skipped, which the log says. The native kernels have no part of it.
    """

    captures_prompts = False

    def __init__(self, checkpoint: Checkpoint, device: Device, max_model_len: int, on_layer: Callable[[int], None]) -> None:
        self.config = config = DeepseekV4Config.from_checkpoint(checkpoint)
        self._build = layers = device.layers()
        self._device, self._expert_cache, self._is_gguf = device.device, device.expert_cache, checkpoint.gguf is not None
        self.compute_dtype, self.native_kernels = layers.compute_dtype, layers.native_kernels
        self._file_name = file_name(checkpoint)
        self._weights = weights = Weights(checkpoint, str, _skipped(checkpoint))
        table = self._take("embed.weight", config.vocab_size, config.hidden_size)
        head = table if config.tie_word_embeddings else self._take("head.weight", config.vocab_size, config.hidden_size)
        self._embedding = layers.embedding(table)
        main = layers.rope(config.rotary_dim, config.rope_theta, max_model_len)
        compressed = layers.rope(config.rotary_dim, config.compress_rope_theta, max_model_len, config.compress_scaling)
        self._layers: list[_Layer] = []
        self.num_bytes = self._embedding.num_bytes
        for index, shape in enumerate(config.layers):
            self._layers.append(self._build_layer(index, shape, compressed if shape.ratio else main))
            self.num_bytes += self._layers[-1].num_bytes
            on_layer(index + 1)
        self._decodes_on_device = all(layer.attention.is_capturable for layer in self._layers)
        self._lanes = layers.hyper_head(self._take_hyper("hc_head", config.hc_mult, 1))
        self._head = layers.head(self._take_norm("norm.weight", config.hidden_size), head)
        self.num_bytes += self._lanes.num_bytes + self._head.num_bytes
        weights.finish()
        weights.release()
        del self._weights

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def is_capturable(self) -> bool:
        return self._decodes_on_device and all(layer.experts.is_capturable for layer in self._layers)

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        return False

    def forward(self, batch: AnyBatch, cache: KVCache) -> torch.Tensor:
        cache = cast(CompressedCache, cache)
        decodes = self._decodes_on_device and batch.prompts is None if isinstance(batch, DeviceBatch) else False
        step = batch if isinstance(batch, DeviceBatch) and decodes else CompressedStep.of(batch, cache.block_size)
        lanes = Lanes.of(self._embedding(batch.token_ids), self.config.hc_mult)
        for layer in self._layers:
            lanes.add(layer.attention(layer.attention_site.gather(lanes), step, cache))
            lanes.add(layer.experts(layer.experts_site.gather(lanes), batch.token_ids))
        return self._lanes(lanes)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def _take(self, name: str, *shape: int) -> StoredTensor:
        return self._weights.take(self._file_name(name), shape)

    def _take_norm(self, name: str, size: int) -> Norm:
        return self._build.norm(self._take(name, size), self.config.rms_norm_eps)

    def _take_float(self, name: str, *shape: int) -> torch.Tensor:
        return self._take(name, *shape).float().to(self._device)

    def _linear(self, *tensors: StoredTensor) -> Linear:
        return self._build.linear(StoredMatrix(list(tensors), []))

    def _take_hyper(self, prefix: str, count: int, num_scales: int) -> HyperWeights:
        config = self.config
        return HyperWeights(
            self._take_float(f"{prefix}_fn", count, config.hc_mult * config.hidden_size),
            self._take_float(f"{prefix}_base", count),
            self._take_float(f"{prefix}_scale", num_scales),
            config.rms_norm_eps,
            config.hc_eps,
        )

    def _build_layer(self, index: int, shape: LayerShape, rope: RotaryEmbedding) -> _Layer:
        config, prefix, lanes = self.config, f"layers.{index}.", self.config.hc_mult
        sites = [
            self._build.hyper_connection(
                self._take_hyper(f"{prefix}hc_{name}", (2 + lanes) * lanes, 3),
                self._take_norm(f"{prefix}{name}_norm.weight", config.hidden_size),
                lanes,
                config.hc_sinkhorn_iters,
            )
            for name in ("attn", "ffn")
        ]
        attention = self._build.compressed_attention(self._take_attention(f"{prefix}attn.", shape, rope), index)
        experts = self._build_experts(f"{prefix}ffn.", has_hash=index in config.hash_layers)
        total = attention.num_bytes + experts.num_bytes + sum(site.num_bytes for site in sites)
        return _Layer(sites[0], attention, sites[1], experts, total)

    def _take_attention(self, prefix: str, shape: LayerShape, rope: RotaryEmbedding) -> CompressedAttentionWeights:
        config, hidden = self.config, self.config.hidden_size
        width, rank = config.num_attention_heads * config.head_dim, config.q_lora_rank
        inputs = [self._take(f"{prefix}wq_a.weight", rank, hidden), self._take(f"{prefix}wkv.weight", config.head_dim, hidden)]
        queries = [self._take(f"{prefix}wq_b.weight", width, rank)]
        compressors = []
        indexer = config.indexer if len(shape.widths) == 2 else None
        for name, size in zip(("compressor.", "indexer.compressor."), shape.widths, strict=False):
            both = shape.input_width(size) // 2
            inputs += [self._take(f"{prefix}{name}{matrix}.weight", both, hidden) for matrix in ("wkv", "wgate")]
            norm = self._take_norm(f"{prefix}{name}norm.weight", size)
            compressors.append(CompressorWeights(size, self._take_float(f"{prefix}{name}ape", shape.ratio, both), norm))
        if indexer is not None:
            inputs.append(self._take(f"{prefix}indexer.weights_proj.weight", indexer.num_heads, hidden))
            queries.append(self._take(f"{prefix}indexer.wq_b.weight", indexer.num_heads * indexer.head_dim, rank))
        mixed = self._take(f"{prefix}wo_a.weight", config.o_groups * config.o_lora_rank, width // config.o_groups)
        return CompressedAttentionWeights(
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            shape=shape,
            rope=rope,
            input=self._linear(*inputs),
            query_norm=self._take_norm(f"{prefix}q_norm.weight", rank),
            query=self._linear(*queries),
            key_norm=self._take_norm(f"{prefix}kv_norm.weight", config.head_dim),
            sinks=self._take_float(f"{prefix}attn_sink", config.num_attention_heads),
            compressors=compressors,
            indexer=indexer,
            groups=self._build.grouped_linear(mixed, config.o_groups),
            output=self._linear(self._take(f"{prefix}wo_b.weight", hidden, config.o_groups * config.o_lora_rank)),
            activations=self._build.activations,
        )

    def _build_experts(self, prefix: str, *, has_hash: bool) -> RoutedExperts:
        config, count = self.config, self.config.n_routed_experts
        by_token = None
        if has_hash:
            by_token = self._weights.take_ids(self._file_name(f"{prefix}gate.tid2eid"), (config.vocab_size, config.num_experts_per_tok), count)
        router = Router(
            self._take_float(f"{prefix}gate.weight", count, config.hidden_size),
            None if has_hash else self._take_float(f"{prefix}gate.bias", count),
            None if by_token is None else by_token.to(self._device),
            config.num_experts_per_tok,
            config.routed_scaling_factor,
        )
        stored, shared = self._take_experts(prefix), self._take_expert(f"{prefix}shared_experts.")
        fused = None if self._expert_cache is not None else self._build.routed_experts(router, stored, shared, config.swiglu_limit)
        if fused is not None:
            return fused
        experts = place_experts(stored, self._build_expert, self._expert_cache)
        num_bytes = 0 if self._expert_cache is not None else sum(experts[place].num_bytes for place in range(count))
        return RoutedExperts(router, partial(mix_experts, experts), self._build_expert(shared), num_bytes)

    def _take_experts(self, prefix: str) -> list[StoredFeedForward]:
        """The routed experts of a layer, a tensor for each matrix, or in a GGUF one for all matrices of a kind."""
        config, count = self.config, self.config.n_routed_experts
        if not self._is_gguf:
            return [self._take_expert(f"{prefix}experts.{place}.") for place in range(count)]
        hidden, size = config.hidden_size, config.moe_intermediate_size
        shapes = {"w1": (size, hidden), "w3": (size, hidden), "w2": (hidden, size)}
        gate, up, down = (self._take(f"{prefix}experts.{name}.weight", count, *shape) for name, shape in shapes.items())
        return [StoredFeedForward(StoredMatrix([gate.part(place), up.part(place)], []), StoredMatrix([down.part(place)], []), "silu") for place in range(count)]

    def _take_expert(self, prefix: str) -> StoredFeedForward:
        hidden, size = self.config.hidden_size, self.config.moe_intermediate_size
        gate, up = (self._take(f"{prefix}{name}.weight", size, hidden) for name in ("w1", "w3"))
        return StoredFeedForward(StoredMatrix([gate, up], []), StoredMatrix([self._take(f"{prefix}w2.weight", hidden, size)], []), "silu")

    def _build_expert(self, stored: StoredFeedForward) -> GatedFeedForward:
        return GatedFeedForward(self._build.linear(stored.gate_up), self._build.linear(stored.down), ClampedSwiGLU(self.config.swiglu_limit))


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_site: HyperConnection
    attention: CompressedAttention
    experts_site: HyperConnection
    experts: RoutedExperts
    num_bytes: int


def _skipped(checkpoint: Checkpoint) -> frozenset[str]:
    """Tensors of the layers that predict further tokens, said in the log."""
    skipped = predictor_names(checkpoint)
    if skipped:
        logger.info("%s predicts further tokens (%d tensors), which is skipped: it is not needed to compute text", checkpoint.path, len(skipped))
    return skipped
