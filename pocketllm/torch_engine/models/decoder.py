"""The pre-norm decoder that most architectures are a variant of; decoder_spec.py lists what varies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.kernels.native import DecodeLayer, DecodeStep, Q4Linear, Team, pack_q8
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.cpu import CpuAddition, CpuFeedForward, CpuLayers, CpuProjection
from pocketllm.torch_engine.layers.device import Addition, AnyBatch, AttentionSpec, Device, FeedForward, Layers, Mixer, Norm, Projection
from pocketllm.torch_engine.layers.feed_forward import GatedFeedForward
from pocketllm.torch_engine.layers.rope import RotaryEmbedding
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec
from pocketllm.torch_engine.models.stored_layer import StoredLayer, take_head, take_layer
from pocketllm.torch_engine.share import Share
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
    """One layer, ready to compute."""

    qkv: Projection
    attention: Mixer
    output: Addition
    feed_forward: FeedForward


class Decoder(ABC):
    """A decoder on one device; arguments and errors are those of model.ModelClass.

    Subclasses say what they are by `read_spec` and `gguf_layer_names`.

    Attributes:
        gguf_layer_names: GGUF's names of a layer's modules, by Hugging Face's, besides the ones that all have.
    """

    captures_prompts = True
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

    def __init__(self, checkpoint: Checkpoint, device: Device, max_model_len: int, on_layer: Callable[[int], None]) -> None:
        self.spec = spec = self.read_spec(checkpoint)
        share = device.share
        scaling = spec.rope.scaling
        has_factors = scaling is not None and scaling["rope_type"] == "frequency_factors"
        # Some old files carry the rotary frequencies, which the config says too.
        weights = Weights(checkpoint, self.gguf_name, frozenset(info.name for info in checkpoint.tensors if info.name.endswith(".rotary_emb.inv_freq")))
        table = weights.take("model.embed_tokens.weight", (spec.vocab_size, spec.hidden_size))
        head = take_head(checkpoint, weights, table, share, tied=spec.tie_word_embeddings)
        norm = weights.take("model.norm.weight", (spec.hidden_size,))
        factors = weights.take("rope_freqs.weight", (spec.head_dim // 2,)).float() if has_factors else None
        stored = [take_layer(weights, spec, index, share) for index in range(spec.num_hidden_layers)]
        weights.finish()
        layers = device.layers([tensor for layer in stored for tensor in layer.linears], head, spec.head_dim)
        self.compute_dtype, self.native_kernels = layers.compute_dtype, layers.native_kernels
        self._embedding = layers.embedding(table)
        ropes = [layers.rope(spec.head_dim, rope.theta, max_model_len, rope.scaling, factors) for rope in (spec.rope, spec.local_rope) if rope is not None]
        self._rope = ropes[0]
        self._layers: list[_Layer] = []
        for index, layer in enumerate(stored):
            window = spec.windows[index]
            self._layers.append(_build_layer(layers, spec, share, layer, window, ropes[0 if window is None else -1]))
            on_layer(index + 1)
        # Of a model whose layers it can't compute, the native step computes the logits.
        other = spec.unsuited_for_decode_step
        final_norm = layers.norm(norm, spec.rms_norm_eps, spec.norm_offset)
        team = layers.team if isinstance(layers, CpuLayers) else None
        self._native_layers = team is not None and other is None
        self._decode_step = None if team is None else _build_step(spec, self._layers if self._native_layers else [], final_norm, head, team)
        if team is not None and other is not None:
            self.native_kernels = f"in use for products alone, since the model has {other}"
        self._head = layers.head(final_norm, head) if team is None else None
        weights.release()

    @property
    def vocab_size(self) -> int:
        return self.spec.vocab_size

    @property
    def is_capturable(self) -> bool:
        return all(layer.feed_forward.is_capturable for layer in self._layers)

    @property
    def num_bytes(self) -> int:
        layers = sum(part.num_bytes for layer in self._layers for part in (layer.qkv, layer.output, layer.feed_forward))
        head = self._head.num_bytes if self._head is not None else self._decode_step.head_bytes if self._decode_step is not None else 0
        return self._embedding.num_bytes + head + layers

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        return self._native_layers and cache.dtype == torch.float16 and batch.num_decode > 0

    def forward(self, batch: AnyBatch, cache: KVCache) -> torch.Tensor:
        hidden = self._embedding(batch.token_ids)
        if self.spec.embedding_scale != 1.0:
            hidden *= self.spec.embedding_scale
        if self._decode_step is None or isinstance(batch, DeviceBatch) or not self.is_native(batch, cache):
            self._run_layers(hidden, batch, cache)
            return hidden
        count = batch.num_decode
        cos, sin = batch.rotation(self._rope)
        self._decode_step.layers(hidden[:count], cos[:count, 0], sin[:count, 0], batch.decode_tables, batch.decode_lengths, cache.blocks)
        if batch.prefills:
            self._run_layers(hidden[count:], batch.prefill_part(), cache)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._decode_step is not None:
            logits = self._decode_step.logits(hidden)
        else:
            assert self._head is not None
            logits = self._head(hidden)
        cap = self.spec.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap).mul_(cap)

    def _run_layers(self, hidden: torch.Tensor, batch: AnyBatch, cache: KVCache) -> None:
        """The layers, changing `hidden` [num_tokens, hidden_size] in place."""
        for index, layer in enumerate(self._layers):
            layer.output.add(hidden, layer.attention(layer.qkv(hidden), batch, cache, index))
            layer.feed_forward.add(hidden)


def _build_layer(layers: Layers, spec: DecoderSpec, share: Share, stored: StoredLayer, window: int | None, rope: RotaryEmbedding) -> _Layer:
    def norm(weight: StoredTensor) -> Norm:
        return layers.norm(weight, spec.rms_norm_eps, spec.norm_offset)

    query_norm, key_norm = (None, None) if stored.head_norms is None else (norm(weight) for weight in stored.head_norms)
    attention = AttentionSpec(
        num_heads=len(share.of(spec.num_attention_heads)),
        num_kv_heads=len(share.of(spec.num_key_value_heads)),
        head_dim=spec.head_dim,
        rope=rope,
        scale=spec.attention_scale,
        window=window,
        query_norm=query_norm,
        key_norm=key_norm,
    )
    return _Layer(
        layers.projection(norm(stored.input_norm), stored.qkv),
        layers.attention(attention),
        layers.addition(stored.output, None if stored.attention_norm is None else norm(stored.attention_norm)),
        layers.feed_forward(
            norm(stored.feed_forward_input_norm), stored.feed_forward, None if stored.feed_forward_norm is None else norm(stored.feed_forward_norm)
        ),
    )


def _build_step(spec: DecoderSpec, layers: list[_Layer], norm: Norm, head: StoredTensor, team: Team) -> DecodeStep:
    return DecodeStep(
        num_heads=spec.num_attention_heads,
        num_kv_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        rms_norm_eps=spec.rms_norm_eps,
        layers=[_native_layer(layer) for layer in layers],
        norm=norm.weight.numpy(),
        head=pack_q8(head),
        team=team,
    )


def _native_layer(layer: _Layer) -> DecodeLayer:
    """The arrays that the layer's own products read too."""
    qkv, output, feed_forward = layer.qkv, layer.output, layer.feed_forward
    assert isinstance(qkv, CpuProjection)
    assert isinstance(output, CpuAddition)
    assert isinstance(feed_forward, CpuFeedForward)
    assert isinstance(feed_forward.inner, GatedFeedForward)
    norms = [norm.weight[: norm.size].numpy() for norm in (qkv.norm, feed_forward.norm)]
    matrices = []
    for linear in (qkv.linear, output.linear, feed_forward.inner.gate_up, feed_forward.inner.down):
        assert isinstance(linear, Q4Linear)
        matrices.append(linear.matrix)
    return DecodeLayer(*norms, *matrices)
