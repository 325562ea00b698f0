"""qwen3_5 and qwen3_5_text: a hybrid decoder, Gated DeltaNet in most layers and gated attention in every few; text only."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.device import Addition, AnyBatch, AttentionSpec, DeltaNetWeights, Device, FeedForward, Mixer, Norm, Projection
from pocketllm.torch_engine.models.qwen3_5_config import Qwen3_5Config
from pocketllm.torch_engine.models.stored_layer import take_feed_forward, take_head
from pocketllm.torch_engine.share import scaled
from pocketllm.torch_engine.weights import StoredExperts, StoredFeedForward, StoredMatrix, StoredTensor, Weights

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

    captures_prompts = True
    gguf_layer_names: ClassVar = GGUF_LAYER_NAMES

    @classmethod
    def gguf_name(cls, name: str) -> str:
        """GGUF's name of a tensor that Hugging Face calls `name` in a checkpoint of text alone."""
        if name in _GGUF_NAMES:
            return _GGUF_NAMES[name]
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{cls.gguf_layer_names[rest]}"

    def __init__(self, checkpoint: Checkpoint, device: Device, max_model_len: int, on_layer: Callable[[int], None]) -> None:
        self.config = config = Qwen3_5Config.from_checkpoint(checkpoint)
        self._build = layers = device.layers()
        self._share = device.share
        self.compute_dtype, self.native_kernels = layers.compute_dtype, layers.native_kernels
        self._is_gguf = checkpoint.gguf is not None
        self._vectors = frozenset(tensor.name for tensor in checkpoint.tensors if len(tensor.shape) == 1)
        self._weights = weights = Weights(checkpoint, self.gguf_name, _skipped(checkpoint, config.num_hidden_layers))
        nested = any(tensor.name.startswith(_MULTIMODAL_PREFIX) for tensor in checkpoint.tensors)
        self._prefix = _MULTIMODAL_PREFIX if nested else "model."
        table = self._take("embed_tokens.weight", config.vocab_size, config.hidden_size)
        head = take_head(checkpoint, weights, table, device.share, tied=config.tie_word_embeddings)
        self._embedding = layers.embedding(table)
        self._rope = layers.rope(config.rotary_dim, config.rope_theta, max_model_len)
        self._layers = []
        for index, kind in enumerate(config.layer_types):
            self._layers.append(self._build_layer(f"layers.{index}.", is_attention=kind == "full_attention"))
            on_layer(index + 1)
        self._head = layers.head(self._take_norm("norm.weight", config.hidden_size), head)
        weights.finish()
        weights.release()
        del self._weights, self._build

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def is_capturable(self) -> bool:
        return all(layer.feed_forward.is_capturable for layer in self._layers)

    @property
    def num_bytes(self) -> int:
        return self._embedding.num_bytes + self._head.num_bytes + sum(layer.num_bytes for layer in self._layers)

    def is_native(self, batch: Batch, cache: KVCache) -> bool:
        return False

    def forward(self, batch: AnyBatch, cache: KVCache) -> torch.Tensor:
        hidden = self._embedding(batch.token_ids)
        counts = [0, 0]  # layers of linear attention and of attention so far: each kind has caches of its own
        for layer in self._layers:
            layer.output.add(hidden, layer.mixer(layer.projection(hidden), batch, cache, counts[layer.is_attention]))
            layer.feed_forward.add(hidden)
            counts[layer.is_attention] += 1
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._head(hidden)

    def _take(self, name: str, *shape: int) -> StoredTensor:
        return self._weights.take(self._prefix + name, shape)

    def _is_vector(self, name: str) -> bool:
        """Whether the file stores one dimension under `name`, a whole one of Hugging Face's."""
        return (self.gguf_name(name) if self._is_gguf else name) in self._vectors

    def _take_norm(self, name: str, size: int) -> Norm:
        """A norm whose factor is 1 + the stored weight; GGUF stores the sum."""
        return self._build.norm(self._take(name, size), self.config.rms_norm_eps, 0.0 if self._is_gguf else 1.0)

    def _take_feed_forward(self, prefix: str) -> StoredFeedForward | StoredExperts:
        return take_feed_forward(self._weights, prefix, self.config.hidden_size, self.config.intermediate_size, "silu", self._share)

    def _build_layer(self, prefix: str, *, is_attention: bool) -> _Layer:
        hidden = self.config.hidden_size
        before = self._take_norm(f"{prefix}input_layernorm.weight", hidden)
        build = self._build_attention if is_attention else self._build_delta_net
        projected, mixer, output = build(f"{prefix}self_attn." if is_attention else f"{prefix}linear_attn.")
        after = self._take_norm(f"{prefix}post_attention_layernorm.weight", hidden)
        return _Layer(
            is_attention,
            self._build.projection(before, StoredMatrix(projected, [])),
            mixer,
            self._build.addition(StoredMatrix([output], [])),
            self._build.feed_forward(after, self._take_feed_forward(f"{self._prefix}{prefix}mlp.")),
        )

    def _build_attention(self, prefix: str) -> tuple[list[StoredTensor], Mixer, StoredTensor]:
        config = self.config
        hidden, head_dim = config.hidden_size, config.head_dim
        q_size, kv_size = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
        heads, kv_heads = self._share.of(config.num_attention_heads), self._share.of(config.num_key_value_heads)
        # Stored as a query and a gate for each head in turn; computed as all gates, then all queries, beside the keys.
        gate_first = torch.arange(2 * len(heads) * head_dim).view(-1, 2, head_dim).transpose(0, 1).flip(0).flatten()
        query_and_gate = self._take(f"{prefix}q_proj.weight", 2 * q_size, hidden).rows([scaled(heads, 2 * head_dim)]).select_rows(gate_first)
        key, value = (self._take(f"{prefix}{name}.weight", kv_size, hidden).rows([scaled(kv_heads, head_dim)]) for name in ("k_proj", "v_proj"))
        query_norm, key_norm = (self._take_norm(f"{prefix}{name}.weight", head_dim) for name in ("q_norm", "k_norm"))
        spec = AttentionSpec(len(heads), len(kv_heads), head_dim, self._rope, query_norm=query_norm, key_norm=key_norm, gated=True)
        output = self._take(f"{prefix}o_proj.weight", hidden, q_size).columns([scaled(heads, head_dim)])
        return [query_and_gate, key, value], self._build.attention(spec), output

    def _build_delta_net(self, prefix: str) -> tuple[list[StoredTensor], Mixer, StoredTensor]:
        hidden, sizes, heads = self.config.hidden_size, self.config.delta_net, self.config.delta_net.num_value_heads
        value_heads, qkv = sizes.value_heads(self._share), sizes.channels(self._share)
        values = [scaled(part, sizes.value_dim) for part in value_heads]
        shapes = {
            "in_proj_qkv": (sizes.conv_dim, qkv),
            "in_proj_z": (sizes.value_size, values),
            "in_proj_b": (heads, value_heads),
            "in_proj_a": (heads, value_heads),
        }
        in_proj = [self._take(f"{prefix}{name}.weight", size, hidden).rows(mine) for name, (size, mine) in shapes.items()]
        conv_shape = (sizes.conv_dim, sizes.conv_kernel) if self._is_gguf else (sizes.conv_dim, 1, sizes.conv_kernel)
        conv = self._take(f"{prefix}conv1d.weight", *conv_shape).rows(qkv).float().view(-1, sizes.conv_kernel)
        rate = self._take(f"{prefix}A_log", heads).rows(value_heads).float()
        norm = self._build.norm(self._take(f"{prefix}norm.weight", sizes.value_dim), self.config.rms_norm_eps)
        dt_bias = self._take(f"{prefix}dt_bias", heads).rows(value_heads).float()
        own = sizes.dealt_out(self._share)
        mixer = self._build.delta_net(DeltaNetWeights(own, conv.T.contiguous(), rate if self._is_gguf else -rate.exp(), dt_bias, norm))
        return in_proj, mixer, self._take(f"{prefix}out_proj.weight", hidden, sizes.value_size).columns(values)


@dataclass(frozen=True, slots=True)
class _Layer:
    is_attention: bool
    projection: Projection
    mixer: Mixer
    output: Addition
    feed_forward: FeedForward

    @property
    def num_bytes(self) -> int:
        return self.projection.num_bytes + self.output.num_bytes + self.feed_forward.num_bytes


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
