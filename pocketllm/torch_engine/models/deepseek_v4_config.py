"""The numbers of deepseek_v4, without defaults of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.torch_engine.layers.compressed_attention import IndexerSizes
from pocketllm.torch_engine.layers.compressed_cache import CompressedShape, LayerShape
from pocketllm.torch_engine.models.config_keys import bad, real, required, whole
from pocketllm.torch_engine.models.decoder_spec import only, read_scaling

_SLIDING, _SPARSE, _HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
_BY_RATIO = {0: _SLIDING, 4: _SPARSE, 128: _HEAVY}  # as config.json of the first checkpoints spells layer_types and compress_rates at once
_EXPERTS = ("hash_moe", "moe")
# What the model computes. A key that is left out means this too.
_ONLY: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "n_shared_experts": 1,
    "num_key_value_heads": 1,
    "rope_main_scaling": None,
}


@dataclass(frozen=True, slots=True)
class DeepseekV4Config:
    """What the model reads, under config.json's names where it has them.

    Args:
        rotary_dim: last values of a head that are rotated.
        compress_scaling: of the rotation in layers that compress, as layers/rope.py takes it.
        layers: what each layer keeps.
        indexer: of the layers with two compressors; None where there are none.
        hash_layers: layers whose experts the token's id chooses.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    routed_scaling_factor: float
    swiglu_limit: float
    hc_mult: int
    hc_sinkhorn_iters: int
    hc_eps: float
    sliding_window: int
    rms_norm_eps: float
    rope_theta: float
    compress_rope_theta: float
    compress_scaling: Mapping[str, Any] | None
    rotary_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    layers: tuple[LayerShape, ...]
    indexer: IndexerSizes | None
    hash_layers: frozenset[int]

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> DeepseekV4Config:
        """Raises:
        ConfigurationError: a key is missing or makes no sense.
        UnsupportedFeatureError: the config asks for a variant that this model does not compute.
        """
        config = checkpoint.config
        only(checkpoint, **_ONLY)
        counts = {name: whole(checkpoint, name) for name in _WHOLE}
        numbers: dict[str, Any] = {name: real(checkpoint, name) for name in _REAL}
        if counts["num_attention_heads"] % counts["o_groups"]:
            raise bad(checkpoint, "o_groups", counts["o_groups"], f"a divisor of num_attention_heads = {counts['num_attention_heads']}")
        if counts["num_experts_per_tok"] > counts["n_routed_experts"]:
            raise bad(checkpoint, "num_experts_per_tok", counts["num_experts_per_tok"], f"at most n_routed_experts = {counts['n_routed_experts']}")
        layers = _layers(checkpoint, counts["num_hidden_layers"], counts["head_dim"])
        has_indexer = any(len(layer.widths) == 2 for layer in layers)
        index = [whole(checkpoint, name) for name in ("index_n_heads", "index_head_dim", "index_topk")] if has_indexer else []
        rotary_dim = _rotary_dim(checkpoint, counts["head_dim"])
        if index and index[1] < rotary_dim:
            raise bad(checkpoint, "index_head_dim", index[1], f"at least the {rotary_dim} values of a head that are rotated")
        scaling = read_scaling(checkpoint)
        if scaling is not None and scaling["rope_type"] == "yarn":
            scaling = {"attention_factor": 1.0, **scaling}  # YaRN's own magnitude is not applied in this architecture
        return cls(
            **counts,
            **numbers,
            compress_scaling=scaling,
            rotary_dim=rotary_dim,
            tie_word_embeddings=config["tie_word_embeddings"],
            layers=layers,
            indexer=IndexerSizes(*index) if index else None,
            hash_layers=_hash_layers(checkpoint, counts["num_hidden_layers"]),
        )

    @property
    def cache(self) -> CompressedShape:
        return CompressedShape(self.sliding_window, self.head_dim, self.layers)


_WHOLE = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "moe_intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "hc_mult",
    "hc_sinkhorn_iters",
    "sliding_window",
    "vocab_size",
)
_REAL = ("routed_scaling_factor", "swiglu_limit", "hc_eps", "rms_norm_eps", "rope_theta", "compress_rope_theta")


def _rotary_dim(checkpoint: Checkpoint, head_dim: int) -> int:
    if checkpoint.config.get("qk_rope_head_dim") is not None:
        key, rotary_dim = "qk_rope_head_dim", whole(checkpoint, "qk_rope_head_dim")
    else:
        key, rotary_dim = "partial_rotary_factor", int(head_dim * real(checkpoint, "partial_rotary_factor"))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise bad(checkpoint, key, checkpoint.config[key], f"an even part of head_dim = {head_dim}")
    return rotary_dim


def _layers(checkpoint: Checkpoint, count: int, head_dim: int) -> tuple[LayerShape, ...]:
    kinds, key = checkpoint.config.get("layer_types"), "layer_types"
    ratios = {ratio_kind: ratio for ratio, ratio_kind in _BY_RATIO.items()}
    if kinds is None:
        key = "compress_ratios"
        stored = required(checkpoint, key)
        _check_list(checkpoint, key, stored, count, _BY_RATIO)
        kinds = [_BY_RATIO[ratio] for ratio in stored]
    else:
        _check_list(checkpoint, key, kinds, count, ratios)
        rates = required(checkpoint, "compress_rates")
        if not isinstance(rates, Mapping):
            raise bad(checkpoint, "compress_rates", rates, "a mapping from types of layers to tokens")
        for kind in {*kinds} - {_SLIDING}:
            if type(rate := rates.get(kind)) is not int or rate < 1:
                raise bad(checkpoint, "compress_rates", rates, f"a mapping with a whole number above 0 for {kind}")
            ratios[kind] = rate
    shapes = {_SLIDING: LayerShape(), _HEAVY: LayerShape(ratios[_HEAVY], (head_dim,))}
    if _SPARSE in kinds[:count]:
        shapes[_SPARSE] = LayerShape(ratios[_SPARSE], (head_dim, whole(checkpoint, "index_head_dim")), overlaps=True)
    return tuple(shapes[kind] for kind in kinds[:count])


def _hash_layers(checkpoint: Checkpoint, count: int) -> frozenset[int]:
    kinds = checkpoint.config.get("mlp_layer_types")
    if kinds is None:
        first = required(checkpoint, "num_hash_layers")
        if type(first) is not int or first < 0:
            raise bad(checkpoint, "num_hash_layers", first, "a whole number, 0 or more")
        return frozenset(range(min(first, count)))
    _check_list(checkpoint, "mlp_layer_types", kinds, count, _EXPERTS)
    return frozenset(index for index in range(count) if kinds[index] == _EXPERTS[0])


def _check_list(checkpoint: Checkpoint, key: str, values: Any, count: int, known: Any) -> None:
    """Each layer's entry of a list, which may have more for layers that predict further tokens.

    Raises:
        ConfigurationError: it is no list, or too short.
        UnsupportedFeatureError: an entry is not `known`.
    """
    if not isinstance(values, list) or len(values) < count:
        raise bad(checkpoint, key, values, f"a list of {count}")
    for value in values[:count]:
        if isinstance(value, (list, dict)) or value not in known:
            raise UnsupportedFeatureError(
                f"{checkpoint.path} has {value!r} in {key}, which is not supported for {checkpoint.architecture} (only {', '.join(map(str, known))}): "
                "use another model.",
                param="model",
            )
