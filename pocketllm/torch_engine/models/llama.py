"""llama: pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU feed-forward (Touvron et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.layers.activation import silu_and_mul
from pocketllm.torch_engine.layers.attention import KVCache, paged_attention
from pocketllm.torch_engine.layers.embedding import Embedding
from pocketllm.torch_engine.layers.linear import Linear, build_head, build_linear
from pocketllm.torch_engine.layers.norm import RMSNorm
from pocketllm.torch_engine.layers.rope import RotaryEmbedding, rotate
from pocketllm.torch_engine.weights import StoredTensor, Weights

_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
# Precomputed rotary frequencies that some files carry: the config says the same, unless it says "scaled", which is refused.
_IGNORED = frozenset({"rope_freqs.weight"})


def gguf_name(name: str) -> str:
    """GGUF's name of a tensor that Hugging Face calls `name`."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    module, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{_GGUF_LAYER_NAMES[module]}.{kind}"


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """config.json's numbers that the model reads, under their own names."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    vocab_size: int
    tie_word_embeddings: bool

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> LlamaConfig:
        """Read the config without defaults of our own.

        Raises:
            UnsupportedFeatureError: the config asks for a variant that this model does not compute.
        """
        config = checkpoint.config
        for key, wanted in {"rope_scaling": None, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}.items():
            if (found := config.get(key, wanted)) != wanted:
                raise UnsupportedFeatureError(
                    f"{checkpoint.path} has {key} = {found!r}, which is not supported for llama yet (only {wanted!r}): use another model.", param="model"
                )
        return cls(**{name: config[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class _Layer:
    input_norm: RMSNorm
    qkv: Linear
    output: Linear
    post_attention_norm: RMSNorm
    gate_up: Linear
    down: Linear


class Llama:
    """The model on one device.

    Args:
        checkpoint: an open llama checkpoint.
        dtype: compute dtype, as layers/linear.py describes them; the residual stream and the logits are float32 under each.
        max_model_len: positions are below this.
        on_layer: called after each loaded layer with the number loaded.

    Raises:
        ConfigurationError: a tensor is missing, left over, or has another shape than the config says.
        UnsupportedFeatureError: the config asks for a variant that this model does not compute.
    """

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, max_model_len: int, on_layer: Callable[[int], None]) -> None:
        self.config = config = LlamaConfig.from_checkpoint(checkpoint)
        self.activation_dtype = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
        weights = Weights(checkpoint, gguf_name, _IGNORED)
        table = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        head = table if config.tie_word_embeddings else weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        self._embedding = Embedding(table, exact=dtype == torch.float32)
        self._head = build_head(head, dtype)
        self._norm = RMSNorm(weights.take("model.norm.weight", (config.hidden_size,)).float(), config.rms_norm_eps, torch.float32)
        self._rope = RotaryEmbedding(config.head_dim, config.rope_theta, max_model_len)
        self._layers: list[_Layer] = []
        for index in range(config.num_hidden_layers):
            self._layers.append(self._load_layer(weights, f"model.layers.{index}.", dtype, interleaved=checkpoint.gguf is not None))
            on_layer(index + 1)
        weights.finish()

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they lie in memory."""
        layers = sum(linear.num_bytes for layer in self._layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return self._embedding.num_bytes + self._head.num_bytes + layers

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Compute a step's tokens, writing their keys and values to `cache`. Returns [num_tokens, hidden_size] float32."""
        config = self.config
        num_q, num_kv, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        cos, sin = self._rope.at(batch.positions)
        hidden = self._embedding(batch.token_ids)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(hidden)).unflatten(-1, (num_q + 2 * num_kv, head_dim))
            rotated = rotate(qkv[:, : num_q + num_kv], cos, sin).to(cache.dtype)
            cache.write(index, batch.slot_mapping, rotated[:, num_q:], qkv[:, num_q + num_kv :].to(cache.dtype))
            attended = paged_attention(rotated[:, :num_q], cache, index, batch)
            hidden += layer.output(attended.to(self.activation_dtype))
            hidden += layer.down(silu_and_mul(layer.gate_up(layer.post_attention_norm(hidden))))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] float32 -> [num_rows, vocab_size] float32."""
        return self._head(self._norm(hidden))

    def _load_layer(self, weights: Weights, prefix: str, dtype: torch.dtype, *, interleaved: bool) -> _Layer:
        config = self.config
        hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

        def take(name: str, *shape: int) -> StoredTensor:
            return weights.take(f"{prefix}{name}.weight", shape)

        def norm(name: str) -> RMSNorm:
            return RMSNorm(take(name, hidden).float(), config.rms_norm_eps, self.activation_dtype)

        query, key = take("self_attn.q_proj", q_size, hidden), take("self_attn.k_proj", kv_size, hidden)
        if interleaved:
            query, key = query.select_rows(_half_split_order(q_size, head_dim)), key.select_rows(_half_split_order(kv_size, head_dim))
        return _Layer(
            norm("input_layernorm"),
            build_linear([query, key, take("self_attn.v_proj", kv_size, hidden)], dtype),
            build_linear([take("self_attn.o_proj", hidden, q_size)], dtype),
            norm("post_attention_layernorm"),
            build_linear([take("mlp.gate_proj", ffn, hidden), take("mlp.up_proj", ffn, hidden)], dtype),
            build_linear([take("mlp.down_proj", hidden, ffn)], dtype),
        )


def _half_split_order(num_rows: int, head_dim: int) -> torch.Tensor:
    """Row order from GGUF's llama layout, where the two values that rotate together are neighbours, to halves of a head."""
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
