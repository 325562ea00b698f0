"""The pre-norm decoder that most architectures are a variant of; decoder_spec.py lists what varies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.kernels.native import DecodeLayer, DecodeStep, Q4Linear, Team, pack_q4, pack_q8, unsuited
from pocketllm.torch_engine.layers.activation import GATED_ACTIVATIONS
from pocketllm.torch_engine.layers.attention import KVCache, paged_attention
from pocketllm.torch_engine.layers.embedding import Embedding
from pocketllm.torch_engine.layers.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts
from pocketllm.torch_engine.layers.linear import Biased, Linear, build_head, build_linear, default_dtype
from pocketllm.torch_engine.layers.norm import HeadNorm, RMSNorm
from pocketllm.torch_engine.layers.rope import RotaryEmbedding, rotate
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, Rope
from pocketllm.torch_engine.models.stored_layer import StoredFeedForward, StoredLayer, StoredMatrix, take_head, take_layer
from pocketllm.torch_engine.weights import StoredTensor, Weights

_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "rope_freqs.weight": "rope_freqs.weight",
}


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer, ready to compute. Norms after attention and feed-forward are None where the architecture has none."""

    window: int | None
    rope: int
    input_norm: RMSNorm
    qkv: Linear
    head_norm: HeadNorm | None
    output: Linear
    attention_norm: RMSNorm | None
    feed_forward_input_norm: RMSNorm
    feed_forward: FeedForward
    feed_forward_norm: RMSNorm | None


class Decoder(ABC):
    """A decoder on one device; arguments and errors are those of model.ModelClass.

    Subclasses say what they are by `read_spec` and `gguf_layer_names`.

    Attributes:
        gguf_layer_names: GGUF's names of a layer's modules, by Hugging Face's, besides the ones that all have.
    """

    gguf_layer_names: ClassVar[dict[str, str]]

    @staticmethod
    @abstractmethod
    def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
        """What the checkpoint's config asks for, or the refusal of what the architecture has not."""

    @classmethod
    def gguf_name(cls, name: str) -> str:
        """GGUF's name of the tensor that Hugging Face calls `name`."""
        if name in _GGUF_NAMES:
            return _GGUF_NAMES[name]
        _, _, layer, rest = name.split(".", 3)
        module, _, kind = rest.rpartition(".")
        return f"blk.{layer}.{(_GGUF_LAYER_NAMES | cls.gguf_layer_names)[module]}.{kind}"

    def __init__(
        self, checkpoint: Checkpoint, dtype: torch.dtype | None, max_model_len: int, on_layer: Callable[[int], None], *, native_threads: int = 0
    ) -> None:
        self.spec = spec = self.read_spec(checkpoint)
        scaling = spec.rope.scaling
        has_factors = scaling is not None and scaling["rope_type"] == "frequency_factors"
        # Some old files carry the rotary frequencies, which the config says too.
        weights = Weights(checkpoint, self.gguf_name, frozenset(info.name for info in checkpoint.tensors if info.name.endswith(".rotary_emb.inv_freq")))
        table = weights.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        head = take_head(checkpoint, weights, table, tied=spec.tie_word_embeddings)
        norm = weights.take("model.norm.weight", (spec.hidden_size,)).float() + spec.norm_offset
        factors = weights.take("rope_freqs.weight", (spec.head_dim // 2,)).float() if has_factors else None
        stored = [take_layer(weights, spec, index) for index in range(spec.num_hidden_layers)]
        weights.finish()
        obstacle = _native_obstacle(spec, stored, head, dtype, native_threads)
        team = Team(native_threads) if obstacle is None else None
        other = spec.unsuited_for_decode_step
        self.native_kernels = obstacle or ("in use" if other is None else f"in use for products alone, since the model has {other}")
        self.compute_dtype = dtype or (torch.float32 if team is not None else default_dtype())
        self._embedding = Embedding(table, exact=self.compute_dtype == torch.float32)
        self._norm = RMSNorm(norm, spec.rms_norm_eps, torch.float32)
        self._ropes = [_build_rope(spec, rope, max_model_len, factors) for rope in (spec.rope, spec.local_rope) if rope is not None]
        builder = _Builder(spec, self.compute_dtype, team)
        self._layers: list[_Layer] = []
        for index, layer in enumerate(stored):
            self._layers.append(builder.layer(layer, spec.windows[index]))
            on_layer(index + 1)
        self._head = build_head(head, self.compute_dtype) if team is None else None
        # Of a model whose layers it can't compute, the native step computes the logits.
        self._native_layers = team is not None and other is None
        self._decode_step = None if team is None else _build_step(spec, self._layers if self._native_layers else [], norm, head, team)
        weights.release()

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def num_bytes(self) -> int:
        layers = sum(part.num_bytes for layer in self._layers for part in (layer.qkv, layer.output, layer.feed_forward))
        head = self._head.num_bytes if self._head is not None else self._decode_step.head_bytes if self._decode_step is not None else 0
        return self._embedding.num_bytes + head + layers

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        return self._native_layers and cache.dtype == torch.float16 and batch.num_decode > 0

    def forward(self, batch: Batch, cache: KVCache) -> torch.Tensor:
        turns = [rope.at(batch.positions) for rope in self._ropes]
        hidden = self._embedding(batch.token_ids)
        if self.spec.embedding_scale != 1.0:
            hidden *= self.spec.embedding_scale
        count = batch.num_decode
        if self._decode_step is None or not self.is_native(batch, cache):
            self._run_layers(hidden, turns, batch, cache)
            return hidden
        cos, sin = turns[0]
        self._decode_step.layers(hidden[:count], cos[:count, 0], sin[:count, 0], batch.decode_tables, batch.decode_lengths, cache.blocks)
        if batch.prefills:
            self._run_layers(hidden[count:], [(cos[count:], sin[count:])], batch.prefill_part(), cache)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._decode_step is not None:
            logits = self._decode_step.logits(hidden)
        else:
            assert self._head is not None
            logits = self._head(self._norm(hidden))
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap).mul_(cap)

    def _run_layers(self, hidden: torch.Tensor, turns: list[tuple[torch.Tensor, torch.Tensor]], batch: Batch, cache: KVCache) -> None:
        """The layers as torch operators, changing `hidden` [num_tokens, hidden_size] in place."""
        spec = self.spec
        num_q, num_kv = spec.num_attention_heads, spec.num_key_value_heads
        activations = _activation_dtype(self.compute_dtype)
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.input_norm(hidden)).unflatten(-1, (num_q + 2 * num_kv, spec.head_dim))
            heads = qkv[:, : num_q + num_kv]
            if layer.head_norm is not None:
                heads = layer.head_norm(heads)
            rotated = rotate(heads, *turns[layer.rope]).to(cache.dtype)
            cache.write(index, batch.slot_mapping, rotated[:, num_q:], qkv[:, num_q + num_kv :].to(cache.dtype))
            attended = paged_attention(rotated[:, :num_q], cache, index, batch, spec.attention_scale, layer.window)
            output = layer.output(attended.to(activations))
            hidden += output if layer.attention_norm is None else layer.attention_norm(output.float())
            output = layer.feed_forward(layer.feed_forward_input_norm(hidden))
            hidden += output if layer.feed_forward_norm is None else layer.feed_forward_norm(output.float())


class _Builder:
    """Brings stored tensors into the layout that computes.

    Args:
        spec: of the model.
        dtype: compute dtype.
        team: threads of the native products, or None for torch's.
    """

    def __init__(self, spec: DecoderSpec, dtype: torch.dtype, team: Team | None) -> None:
        self._spec, self._dtype, self._team = spec, dtype, team
        self._activations = _activation_dtype(dtype)

    def layer(self, stored: StoredLayer, window: int | None) -> _Layer:
        spec = self._spec
        head_norm = None
        if stored.head_norms is not None:
            query, key = (weight.float() + spec.norm_offset for weight in stored.head_norms)
            head_norm = HeadNorm(query, key, spec.num_attention_heads, spec.num_key_value_heads, spec.rms_norm_eps)
        feed_forwards = [self._feed_forward(part) for part in stored.feed_forwards]
        feed_forward: FeedForward = feed_forwards[0]
        if stored.router is not None:
            assert spec.experts is not None
            feed_forward = MixtureOfExperts(stored.router.float(), feed_forwards, spec.experts.top_k, normalize=spec.experts.normalize)
        return _Layer(
            window,
            0 if window is None or spec.local_rope is None else 1,
            self._norm(stored.input_norm, self._activations),
            self._linear(stored.qkv),
            head_norm,
            self._linear(stored.output),
            None if stored.attention_norm is None else self._norm(stored.attention_norm, torch.float32),
            self._norm(stored.feed_forward_input_norm, self._activations),
            feed_forward,
            None if stored.feed_forward_norm is None else self._norm(stored.feed_forward_norm, torch.float32),
        )

    def _norm(self, stored: StoredTensor, dtype: torch.dtype) -> RMSNorm:
        return RMSNorm(stored.float() + self._spec.norm_offset, self._spec.rms_norm_eps, dtype)

    def _feed_forward(self, stored: StoredFeedForward) -> GatedFeedForward:
        return GatedFeedForward(self._linear(stored.gate_up), self._linear(stored.down), GATED_ACTIVATIONS[self._spec.hidden_act])

    def _linear(self, stored: StoredMatrix) -> Linear:
        linear = build_linear(stored.tensors, self._dtype) if self._team is None else Q4Linear(pack_q4(stored.tensors), self._team)
        return Biased(linear, torch.cat([bias.float() for bias in stored.biases])) if stored.biases else linear


def _activation_dtype(compute_dtype: torch.dtype) -> torch.dtype:
    return torch.bfloat16 if compute_dtype == torch.bfloat16 else torch.float32


def _build_rope(spec: DecoderSpec, rope: Rope, max_model_len: int, factors: torch.Tensor | None) -> RotaryEmbedding:
    return RotaryEmbedding(spec.head_dim, rope.theta, max_model_len, rope.scaling, factors)


def _native_obstacle(spec: DecoderSpec, stored: list[StoredLayer], head: StoredTensor, dtype: torch.dtype | None, threads: int) -> str | None:
    """Why the native kernels are not used, or None when they are."""
    if not threads:
        return "turned off"
    if dtype is not None:
        return "used by dtype auto only"
    return unsuited([tensor for layer in stored for tensor in layer.linears], head, spec.head_dim)


def _build_step(spec: DecoderSpec, layers: list[_Layer], norm: torch.Tensor, head: StoredTensor, team: Team) -> DecodeStep:
    return DecodeStep(
        num_heads=spec.num_attention_heads,
        num_kv_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        rms_norm_eps=spec.rms_norm_eps,
        layers=[_native_layer(layer) for layer in layers],
        norm=norm.numpy(),
        head=pack_q8(head),
        team=team,
    )


def _native_layer(layer: _Layer) -> DecodeLayer:
    """The arrays that the layer's own products read too."""
    feed_forward = layer.feed_forward
    assert isinstance(feed_forward, GatedFeedForward)
    norms = [norm.weight[: norm.size].numpy() for norm in (layer.input_norm, layer.feed_forward_input_norm)]
    matrices = []
    for linear in (layer.qkv, layer.output, feed_forward.gate_up, feed_forward.down):
        assert isinstance(linear, Q4Linear)
        matrices.append(linear.matrix)
    return DecodeLayer(*norms, *matrices)
