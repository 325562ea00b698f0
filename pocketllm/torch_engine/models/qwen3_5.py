"""qwen3_5 and qwen3_5_text: a hybrid decoder, Gated DeltaNet in most layers and gated attention in every few; text only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.layers.activation import silu_and_mul
from pocketllm.torch_engine.layers.attention import KVCache, paged_attention
from pocketllm.torch_engine.layers.embedding import Embedding
from pocketllm.torch_engine.layers.feed_forward import FeedForward, GatedFeedForward
from pocketllm.torch_engine.layers.gated_delta_net import GatedDeltaNet
from pocketllm.torch_engine.layers.linear import Linear, build_head, build_linear, default_dtype
from pocketllm.torch_engine.layers.norm import HeadNorm, RMSNorm
from pocketllm.torch_engine.layers.rope import RotaryEmbedding, rotate
from pocketllm.torch_engine.layers.state_cache import HybridCache
from pocketllm.torch_engine.models.qwen3_5_config import Qwen3_5Config
from pocketllm.torch_engine.models.stored_layer import take_head
from pocketllm.torch_engine.weights import StoredTensor, Weights

logger = logging.getLogger(__name__)

GGUF_LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "linear_attn.in_proj_qkv.weight": "attn_qkv.weight",
    "linear_attn.in_proj_z.weight": "attn_gate.weight",
    "linear_attn.in_proj_b.weight": "ssm_beta.weight",
    "linear_attn.in_proj_a.weight": "ssm_alpha.weight",
    "linear_attn.conv1d.weight": "ssm_conv1d.weight",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.norm.weight": "ssm_norm.weight",
    "linear_attn.out_proj.weight": "ssm_out.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_GGUF_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
_MULTIMODAL_PREFIX = "model.language_model."
_SKIPPED = {"model.visual.": "vision tower", "mtp.": "multi-token prediction head"}


class Qwen3_5:
    """The model on one device; arguments and errors are those of model.ModelClass.

    Attributes:
        gguf_layer_names: GGUF's names of a layer's tensors, by Hugging Face's.

    A vision tower and a multi-token prediction head are skipped, which the log says. The native kernels have no part of it.
    """

    gguf_layer_names: ClassVar = GGUF_LAYER_NAMES

    @classmethod
    def gguf_name(cls, name: str) -> str:
        """GGUF's name of a tensor that Hugging Face calls `name` in a checkpoint of text alone."""
        if name in _GGUF_NAMES:
            return _GGUF_NAMES[name]
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{cls.gguf_layer_names[rest]}"

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None, max_model_len: int, on_layer: Callable[[int], None], *, native_threads: int = 0
    ) -> None:
        self.config = config = Qwen3_5Config.from_checkpoint(checkpoint)
        self.compute_dtype = dtype or default_dtype()
        self.native_kernels = "not made for layers of linear attention" if native_threads else "turned off"
        self._is_gguf = checkpoint.gguf is not None
        self._vectors = frozenset(tensor.name for tensor in checkpoint.tensors if len(tensor.shape) == 1)
        self._activation_dtype = torch.bfloat16 if self.compute_dtype == torch.bfloat16 else torch.float32
        self._weights = weights = Weights(checkpoint, self.gguf_name, _skipped(checkpoint, config.num_hidden_layers))
        nested = any(tensor.name.startswith(_MULTIMODAL_PREFIX) for tensor in checkpoint.tensors)
        self._prefix = _MULTIMODAL_PREFIX if nested else "model."
        table = self._take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        head = take_head(checkpoint, weights, table, tied=config.tie_word_embeddings)
        self._embedding = Embedding(table, exact=self.compute_dtype == torch.float32)
        self._norm = self._take_norm("norm.weight", torch.float32)
        self._rope = RotaryEmbedding(config.rotary_dim, config.rope_theta, max_model_len)
        self._layers = []
        for index, kind in enumerate(config.layer_types):
            self._layers.append(self._build_layer(f"layers.{index}.", kind))
            on_layer(index + 1)
        self._head = build_head(head, self.compute_dtype)
        weights.finish()
        weights.release()
        del self._weights

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def num_bytes(self) -> int:
        return self._embedding.num_bytes + self._head.num_bytes + sum(layer.num_bytes for layer in self._layers)

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        return False

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        assert isinstance(cache, HybridCache)
        rotation = self._rope.at(batch.positions)
        hidden = self._embedding(batch.token_ids)
        attention_index = delta_index = 0
        for layer in self._layers:
            x = layer.input_norm(hidden)
            if isinstance(layer.mixer, GatedDeltaNet):
                hidden += layer.mixer(x, batch, cache.states, delta_index)
                delta_index += 1
            else:
                hidden += layer.mixer(x, rotation, batch, cache, attention_index)
                attention_index += 1
            hidden += layer.feed_forward(layer.post_attention_norm(hidden))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(self._norm(hidden))

    def _take(self, name: str, *shape: int) -> StoredTensor:
        return self._weights.take(self._prefix + name, shape)

    def _is_vector(self, name: str) -> bool:
        """Whether the file stores one dimension under `name`."""
        full = self._prefix + name
        return (self.gguf_name(full) if self._is_gguf else full) in self._vectors

    def _take_factor(self, name: str, size: int) -> torch.Tensor:
        """The factor [size] of a norm, 1 + the stored weight; GGUF stores the sum."""
        weight = self._take(name, size).float()
        return weight if self._is_gguf else weight + 1

    def _take_norm(self, name: str, dtype: torch.dtype) -> RMSNorm:
        return RMSNorm(self._take_factor(name, self.config.hidden_size), self.config.rms_norm_eps, dtype)

    def _build_feed_forward(self, prefix: str) -> FeedForward:
        return self._build_gated(prefix, self.config.intermediate_size)

    def _build_gated(self, prefix: str, size: int) -> GatedFeedForward:
        """A dense feed-forward of `size` inner values."""
        hidden = self.config.hidden_size
        gate_up = [self._take(f"{prefix}{name}.weight", size, hidden) for name in ("gate_proj", "up_proj")]
        down = self._take(f"{prefix}down_proj.weight", hidden, size)
        return GatedFeedForward(build_linear(gate_up, self.compute_dtype), build_linear([down], self.compute_dtype), silu_and_mul)

    def _build_layer(self, prefix: str, kind: str) -> _Layer:
        return _Layer(
            self._take_norm(f"{prefix}input_layernorm.weight", self._activation_dtype),
            self._build_attention(f"{prefix}self_attn.") if kind == "full_attention" else self._build_delta_net(f"{prefix}linear_attn."),
            self._take_norm(f"{prefix}post_attention_layernorm.weight", self._activation_dtype),
            self._build_feed_forward(f"{prefix}mlp."),
        )

    def _build_attention(self, prefix: str) -> _GatedAttention:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        # Stored as a query and a gate for each head in turn; computed as all gates, then all queries, beside the keys.
        gate_first = torch.arange(2 * q_size).view(-1, 2, head_dim).transpose(0, 1).flip(0).flatten()
        query_and_gate = self._take(f"{prefix}q_proj.weight", 2 * q_size, hidden).select_rows(gate_first)
        key, value = (self._take(f"{prefix}{name}.weight", kv_size, hidden) for name in ("k_proj", "v_proj"))
        query_factor, key_factor = (self._take_factor(f"{prefix}{name}.weight", head_dim) for name in ("q_norm", "k_norm"))
        norm = HeadNorm(query_factor, key_factor, config.num_attention_heads, config.num_key_value_heads, config.rms_norm_eps)
        output = self._take(f"{prefix}o_proj.weight", hidden, q_size)
        projections = build_linear([query_and_gate, key, value], self.compute_dtype), build_linear([output], self.compute_dtype)
        return _GatedAttention(config, *projections, norm)

    def _build_delta_net(self, prefix: str) -> GatedDeltaNet:
        hidden, sizes, heads = self.config.hidden_size, self.config.delta_net, self.config.delta_net.num_value_heads
        rows = {"in_proj_qkv": sizes.conv_dim, "in_proj_z": sizes.value_size, "in_proj_b": heads, "in_proj_a": heads}
        in_proj = [self._take(f"{prefix}{name}.weight", size, hidden) for name, size in rows.items()]
        conv_shape = (sizes.conv_dim, sizes.conv_kernel) if self._is_gguf else (sizes.conv_dim, 1, sizes.conv_kernel)
        conv = self._take(f"{prefix}conv1d.weight", *conv_shape).float().view(sizes.conv_dim, sizes.conv_kernel)
        rate = self._take(f"{prefix}A_log", heads).float()
        return GatedDeltaNet(
            sizes,
            build_linear(in_proj, self.compute_dtype),
            conv.T,
            rate if self._is_gguf else -rate.exp(),
            self._take(f"{prefix}dt_bias", heads).float(),
            self._take(f"{prefix}norm.weight", sizes.value_dim).float(),
            self.config.rms_norm_eps,
            build_linear([self._take(f"{prefix}out_proj.weight", hidden, sizes.value_size)], self.compute_dtype),
        )


class _GatedAttention:
    """Attention whose heads are normalised, rotated in their first rotary_dim values, and gated by sigmoid at the end."""

    def __init__(self, config: Qwen3_5Config, in_proj: Linear, out_proj: Linear, head_norm: HeadNorm) -> None:
        self._config, self._in_proj, self._out_proj, self._head_norm = config, in_proj, out_proj, head_norm
        self.num_bytes = in_proj.num_bytes + out_proj.num_bytes

    def __call__(self, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], batch: Batch, cache: KVCache, layer: int) -> torch.Tensor:
        """x: [num_tokens, hidden_size] -> the same shape and dtype."""
        config = self._config
        num_q, num_kv = config.num_attention_heads, config.num_key_value_heads
        heads = self._in_proj(x).unflatten(-1, (-1, config.head_dim))  # gates, queries, keys, values
        gate, query_key, value = heads.split([num_q, num_q + num_kv, num_kv], dim=1)
        rotated = rotate(self._head_norm(query_key), *rotation).to(cache.dtype)
        cache.write(layer, batch.slot_mapping, rotated[:, num_q:], value.to(cache.dtype))
        attended = paged_attention(rotated[:, :num_q], cache, layer, batch).to(x.dtype)
        return self._out_proj(attended * gate.flatten(1).sigmoid())


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: RMSNorm
    mixer: GatedDeltaNet | _GatedAttention
    post_attention_norm: RMSNorm
    feed_forward: FeedForward

    @property
    def num_bytes(self) -> int:
        return self.mixer.num_bytes + self.feed_forward.num_bytes


def _skipped(checkpoint: Checkpoint, num_layers: int) -> frozenset[str]:
    """Tensors that computing text does not need, said in the log."""
    prefixes = dict(_SKIPPED) if checkpoint.gguf is None else {f"blk.{num_layers}.": _SKIPPED["mtp."]}
    skipped: set[str] = set()
    for prefix, what in prefixes.items():
        names = {tensor.name for tensor in checkpoint.tensors if tensor.name.startswith(prefix)}
        if names:
            logger.info("%s has a %s (%d tensors), which is skipped: it is not needed to compute text", checkpoint.path, what, len(names))
        skipped |= names
    return frozenset(skipped)
