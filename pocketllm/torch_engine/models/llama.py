"""llama: pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU feed-forward (Touvron et al., 2023)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.kernels.native import DecodeLayer, DecodeStep, Q4Linear, Team, pack_q4, pack_q8, unsuited
from pocketllm.torch_engine.layers.activation import silu_and_mul
from pocketllm.torch_engine.layers.attention import KVCache, paged_attention
from pocketllm.torch_engine.layers.embedding import Embedding
from pocketllm.torch_engine.layers.linear import Linear, build_head, build_linear, default_dtype
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
        if config["head_dim"] % 2:
            raise UnsupportedFeatureError(f"{checkpoint.path} has heads of {config['head_dim']} values, which can't be rotated in pairs.", param="model")
        return cls(**{name: config[name] for name in cls.__slots__})


@dataclass(frozen=True, slots=True)
class _StoredLayer:
    """A layer's tensors as the file holds them, the rows of query and key in halves."""

    input_norm: StoredTensor
    qkv: list[StoredTensor]
    output: StoredTensor
    post_attention_norm: StoredTensor
    gate_up: list[StoredTensor]
    down: StoredTensor

    @property
    def linears(self) -> list[StoredTensor]:
        return [*self.qkv, self.output, *self.gate_up, self.down]

    def packed(self) -> DecodeLayer:
        """The layer in the layout of the native kernels."""
        norms = (self.input_norm.float().numpy(), self.post_attention_norm.float().numpy())
        return DecodeLayer(*norms, pack_q4(self.qkv), pack_q4([self.output]), pack_q4(self.gate_up), pack_q4([self.down]))


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
        dtype: compute dtype, as layers/linear.py describes them; the residual stream and the logits are float32 under each. None is
            the native kernels where they suit the checkpoint, else the most exact of the fast ones.
        max_model_len: positions are below this.
        on_layer: called after each loaded layer with the number loaded.
        native_threads: threads of the native kernels; 0 is without them.

    Raises:
        ConfigurationError: a tensor is missing, left over, or has another shape than the config says.
        UnsupportedFeatureError: the config asks for a variant that this model does not compute.
    """

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None, max_model_len: int, on_layer: Callable[[int], None], *, native_threads: int = 0
    ) -> None:
        self.config = config = LlamaConfig.from_checkpoint(checkpoint)
        weights = Weights(checkpoint, gguf_name, _IGNORED)
        table = weights.take("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
        head = table if config.tie_word_embeddings else weights.take("lm_head.weight", (config.vocab_size, config.hidden_size))
        norm = weights.take("model.norm.weight", (config.hidden_size,)).float()
        stored = [self._take_layer(weights, f"model.layers.{index}.", interleaved=checkpoint.gguf is not None) for index in range(config.num_hidden_layers)]
        weights.finish()
        self.native_unsuited = self._native_unsuited(stored, head, dtype, native_threads)
        team = Team(native_threads) if self.native_unsuited is None else None
        self.compute_dtype = dtype or (torch.float32 if team is not None else default_dtype())
        self._embedding = Embedding(table, exact=self.compute_dtype == torch.float32)
        self._norm = RMSNorm(norm, config.rms_norm_eps, torch.float32)
        self._rope = RotaryEmbedding(config.head_dim, config.rope_theta, max_model_len)
        self._layers: list[_Layer] = []
        packed: list[DecodeLayer] = []
        for index, layer in enumerate(stored):
            if team is None:
                self._layers.append(self._build_layer(layer))
            else:
                packed.append(layer.packed())
                self._layers.append(self._native_layer(packed[-1], team))
            on_layer(index + 1)
        self._head = build_head(head, self.compute_dtype) if team is None else None
        self._decode_step: DecodeStep | None = None
        if team is not None:
            self._decode_step = DecodeStep(
                num_heads=config.num_attention_heads,
                num_kv_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                intermediate_size=config.intermediate_size,
                rms_norm_eps=config.rms_norm_eps,
                layers=packed,
                norm=norm.numpy(),
                head=pack_q8(head),
                team=team,
            )
        weights.release()

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights as they lie in memory."""
        layers = sum(linear.num_bytes for layer in self._layers for linear in (layer.qkv, layer.output, layer.gate_up, layer.down))
        head = self._head.num_bytes if self._head is not None else self._decode_step.head_bytes if self._decode_step is not None else 0
        return self._embedding.num_bytes + head + layers

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        """Whether the rows of `batch` that decode run in the native step."""
        return self._decode_step is not None and cache.dtype == torch.float16 and batch.num_decode > 0

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        """Compute a step's tokens, writing their keys and values to `cache`. Returns [num_tokens, hidden_size] float32."""
        cos, sin = self._rope.at(batch.positions)
        hidden = self._embedding(batch.token_ids)
        count = batch.num_decode
        if self._decode_step is None or not self.is_native(batch, cache):
            self._run_layers(hidden, cos, sin, batch, cache)
            return hidden
        self._decode_step.layers(hidden[:count], cos[:count, 0], sin[:count, 0], batch.decode_tables, batch.decode_lengths, cache.blocks)
        if batch.prefills:
            self._run_layers(hidden[count:], cos[count:], sin[count:], batch.prefill_part(), cache)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[num_rows, hidden_size] float32 -> [num_rows, vocab_size] float32."""
        if self._decode_step is not None:
            return self._decode_step.logits(hidden)
        assert self._head is not None
        return self._head(self._norm(hidden))

    def _native_unsuited(self, stored: list[_StoredLayer], head: StoredTensor, dtype: torch.dtype | None, threads: int) -> str | None:
        """Why the native kernels are not used, or None when they are."""
        if not threads:
            return "turned off"
        if dtype is not None:
            return "used by dtype auto only"
        return unsuited([tensor for layer in stored for tensor in layer.linears], head, self.config.head_dim)

    def _run_layers(self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: Batch, cache: KVCache) -> None:
        """The layers as torch operators, changing `hidden` [num_tokens, hidden_size] in place."""
        config = self.config
        num_q, num_kv, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(hidden)).unflatten(-1, (num_q + 2 * num_kv, head_dim))
            rotated = rotate(qkv[:, : num_q + num_kv], cos, sin).to(cache.dtype)
            cache.write(index, batch.slot_mapping, rotated[:, num_q:], qkv[:, num_q + num_kv :].to(cache.dtype))
            attended = paged_attention(rotated[:, :num_q], cache, index, batch)
            hidden += layer.output(attended.to(self._activation_dtype))
            hidden += layer.down(silu_and_mul(layer.gate_up(layer.post_attention_norm(hidden))))

    def _take_layer(self, weights: Weights, prefix: str, *, interleaved: bool) -> _StoredLayer:
        config = self.config
        hidden, ffn, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim

        def take(name: str, *shape: int) -> StoredTensor:
            return weights.take(f"{prefix}{name}.weight", shape)

        query, key = take("self_attn.q_proj", q_size, hidden), take("self_attn.k_proj", kv_size, hidden)
        if interleaved:
            query, key = query.select_rows(_half_split_order(q_size, head_dim)), key.select_rows(_half_split_order(kv_size, head_dim))
        return _StoredLayer(
            take("input_layernorm", hidden),
            [query, key, take("self_attn.v_proj", kv_size, hidden)],
            take("self_attn.o_proj", hidden, q_size),
            take("post_attention_layernorm", hidden),
            [take("mlp.gate_proj", ffn, hidden), take("mlp.up_proj", ffn, hidden)],
            take("mlp.down_proj", hidden, ffn),
        )

    @property
    def _activation_dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.compute_dtype == torch.bfloat16 else torch.float32

    def _build_layer(self, stored: _StoredLayer) -> _Layer:
        eps, dtype = self.config.rms_norm_eps, self.compute_dtype
        return _Layer(
            RMSNorm(stored.input_norm.float(), eps, self._activation_dtype),
            build_linear(stored.qkv, dtype),
            build_linear([stored.output], dtype),
            RMSNorm(stored.post_attention_norm.float(), eps, self._activation_dtype),
            build_linear(stored.gate_up, dtype),
            build_linear([stored.down], dtype),
        )

    def _native_layer(self, packed: DecodeLayer, team: Team) -> _Layer:
        norms = [RMSNorm(torch.from_numpy(weight), self.config.rms_norm_eps, torch.float32) for weight in (packed.input_norm, packed.post_attention_norm)]
        qkv, output, gate_up, down = (Q4Linear(matrix, team) for matrix in (packed.qkv, packed.output, packed.gate_up, packed.down))
        return _Layer(norms[0], qkv, output, norms[1], gate_up, down)


def _half_split_order(num_rows: int, head_dim: int) -> torch.Tensor:
    """Row order from GGUF's llama layout, where the two values that rotate together are neighbours, to halves of a head."""
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
