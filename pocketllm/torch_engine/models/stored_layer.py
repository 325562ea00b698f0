"""A decoder layer's tensors as the file holds them, under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, Experts
from pocketllm.torch_engine.share import Share, scaled
from pocketllm.torch_engine.weights import StoredExperts, StoredFeedForward, StoredMatrix, StoredTensor, Weights


@dataclass(frozen=True, slots=True)
class StoredLayer:
    """One layer, the rows of query and key in halves of a head. Norms that the architecture has not are None."""

    input_norm: StoredTensor
    qkv: StoredMatrix
    head_norms: tuple[StoredTensor, StoredTensor] | None
    output: StoredMatrix
    attention_norm: StoredTensor | None
    feed_forward_input_norm: StoredTensor
    feed_forward: StoredFeedForward | StoredExperts
    feed_forward_norm: StoredTensor | None

    @property
    def linears(self) -> Iterator[StoredTensor]:
        yield from self.qkv.tensors
        yield from self.output.tensors
        yield from self.feed_forward.linears


def take_head(checkpoint: Checkpoint, weights: Weights, table: StoredTensor, share: Share, *, tied: bool) -> StoredTensor:
    """Of the output head, or of `table`, the embeddings, that it is `tied` to, the ids of `share`.

    A tied one that is stored too counts where it differs, as for transformers.
    """
    head = table
    if not tied or "lm_head.weight" in {info.name for info in checkpoint.tensors}:
        head = weights.take("lm_head.weight", table.shape)
        if tied and torch.equal(head.float(), table.float()):
            head = table
    return head.rows([share.nearly(table.shape[0])])


def take_layer(weights: Weights, spec: DecoderSpec, index: int, share: Share) -> StoredLayer:
    """Take layer `index` out of `weights`, of its heads and its inner values those of `share`.

    Raises:
        ConfigurationError: a tensor is missing or has another shape.
    """
    prefix = f"model.layers.{index}."
    hidden, head_dim = spec.hidden_size, spec.head_dim
    q_size, kv_size = spec.num_attention_heads * head_dim, spec.num_key_value_heads * head_dim

    def take(name: str, *shape: int) -> StoredTensor:
        return weights.take(f"{prefix}{name}", shape)

    def matrix(shapes: dict[str, tuple[int, int]], has_bias: bool) -> StoredMatrix:
        return _take_matrix(weights, prefix, shapes, has_bias=has_bias)

    input_norm = take("input_layernorm.weight", hidden)
    qkv = matrix({"self_attn.q_proj": (q_size, hidden), "self_attn.k_proj": (kv_size, hidden), "self_attn.v_proj": (kv_size, hidden)}, spec.qkv_bias)
    queries, keys = (scaled(share.of(count), head_dim) for count in (spec.num_attention_heads, spec.num_key_value_heads))
    for tensors in (qkv.tensors, qkv.biases):
        tensors[:] = [tensor.rows([part]) for tensor, part in zip(tensors, (queries, keys, keys), strict=False)]
    if spec.interleaved:
        for tensors in (qkv.tensors, qkv.biases):
            tensors[:2] = [tensor.select_rows(_half_split_order(tensor.shape[0], head_dim)) for tensor in tensors[:2]]
    head_norms = (take("self_attn.q_norm.weight", head_dim), take("self_attn.k_norm.weight", head_dim)) if spec.head_norms else None
    output = _columns(matrix({"self_attn.o_proj": (hidden, q_size)}, spec.output_bias), queries, share)
    after_attention = take("post_attention_layernorm.weight", hidden)
    before_feed_forward = take("pre_feedforward_layernorm.weight", hidden) if spec.sandwich_norms else after_attention
    if spec.experts is not None and index in spec.experts.layers:
        feed_forward: StoredFeedForward | StoredExperts = take_experts(weights, f"{prefix}mlp.", spec.experts, hidden, spec.hidden_act, share)
    else:
        feed_forward = take_feed_forward(weights, f"{prefix}mlp.", hidden, spec.intermediate_size, spec.hidden_act, share, has_bias=spec.mlp_bias)
    return StoredLayer(
        input_norm,
        qkv,
        head_norms,
        output,
        after_attention if spec.sandwich_norms else None,
        before_feed_forward,
        feed_forward,
        take("post_feedforward_layernorm.weight", hidden) if spec.sandwich_norms else None,
    )


def take_feed_forward(weights: Weights, prefix: str, hidden: int, size: int, activation: str, share: Share, *, has_bias: bool = False) -> StoredFeedForward:
    """A dense feed-forward of `size` inner values, of which those of `share`."""
    mine = share.of(size)
    gate_up = _take_matrix(weights, prefix, {"gate_proj": (size, hidden), "up_proj": (size, hidden)}, has_bias=has_bias)
    for tensors in (gate_up.tensors, gate_up.biases):
        tensors[:] = [tensor.rows([mine]) for tensor in tensors]
    down = _take_matrix(weights, prefix, {"down_proj": (hidden, size)}, has_bias=has_bias)
    return StoredFeedForward(gate_up, _columns(down, mine, share), activation)


def take_experts(weights: Weights, prefix: str, experts: Experts, hidden: int, activation: str, share: Share) -> StoredExperts:
    """A router and its experts, of each of which the inner values of `share`."""
    router = weights.take(f"{prefix}gate.weight", (experts.count, hidden)).float()
    size, count = experts.intermediate_size, experts.count
    if experts.layout == "separate":
        parts = [take_feed_forward(weights, f"{prefix}experts.{place}.", hidden, size, activation, share) for place in range(count)]
    else:
        mine = share.of(size)
        own_rows = [mine]
        if experts.layout == "fused":
            own_rows = [mine, scaled(mine, 1, size)]
            gate_up = [weights.take(f"{prefix}experts.gate_up_proj", (count, 2 * size, hidden))]
            down = weights.take(f"{prefix}experts.down_proj", (count, hidden, size))
        else:
            gate_up = [weights.take(f"{prefix}experts.{name}.weight", (count, size, hidden)) for name in ("gate_proj", "up_proj")]
            down = weights.take(f"{prefix}experts.down_proj.weight", (count, hidden, size))
        parts = [
            StoredFeedForward(
                StoredMatrix([tensor.part(place).rows(own_rows) for tensor in gate_up], []),
                StoredMatrix([down.part(place).columns([mine])], []),
                activation,
            )
            for place in range(count)
        ]
    return StoredExperts(router, parts, experts.top_k, experts.normalize)


def _take_matrix(weights: Weights, prefix: str, shapes: dict[str, tuple[int, int]], *, has_bias: bool) -> StoredMatrix:
    biases = [weights.take(f"{prefix}{name}.bias", (out,)) for name, (out, _) in shapes.items()] if has_bias else []
    return StoredMatrix([weights.take(f"{prefix}{name}.weight", shape) for name, shape in shapes.items()], biases)


def _columns(matrix: StoredMatrix, part: range, share: Share) -> StoredMatrix:
    """The columns of `part`, whose product is one summand of the ranks' sum; the bias is rank 0's to add."""
    return StoredMatrix([tensor.columns([part]) for tensor in matrix.tensors], matrix.biases if share.index == 0 else [])


def _half_split_order(num_rows: int, head_dim: int) -> torch.Tensor:
    """Row order from GGUF's llama layout, where the two values that rotate together are neighbours, to halves of a head."""
    return torch.arange(num_rows).view(-1, head_dim // 2, 2).transpose(1, 2).flatten()
