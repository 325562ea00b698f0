"""The numbers of qwen3_5's text decoder, without defaults of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.torch_engine.layers.gated_delta_net import DeltaNetSizes
from pocketllm.torch_engine.models.config_keys import bad, real, required, whole
from pocketllm.torch_engine.models.decoder_spec import Experts, only

_KINDS = ("linear_attention", "full_attention")
_COUNTS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)
_EXPERT_COUNTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
# What the model computes. A key that is left out means this too.
_ONLY: dict[str, Any] = {
    "rope_scaling": None,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attn_output_gate": True,
    "output_gate_type": "swish",
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
}


@dataclass(frozen=True, slots=True)
class Qwen3_5Config:
    """What the model reads, under config.json's names where it has them.

    Args:
        intermediate_size: of a layer's feed-forward, or of the expert that all tokens share.
        layer_types: a layer: "linear_attention" or "full_attention".
        rotary_dim: leading values of a head that are rotated.
        delta_net: sizes of a linear attention layer.
        experts: of each layer's feed-forward, or None where it is dense.
    """

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
    layer_types: tuple[str, ...]
    rotary_dim: int
    delta_net: DeltaNetSizes
    experts: Experts | None

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint) -> Qwen3_5Config:
        """Raises:
        ConfigurationError: a key is missing or makes no sense.
        UnsupportedFeatureError: the config asks for a variant that this model does not compute.
        """
        config = checkpoint.config
        only(checkpoint, **_ONLY)
        has_experts = checkpoint.architecture.startswith("qwen3_5_moe")
        size_key = "shared_expert_intermediate_size" if has_experts else "intermediate_size"
        for key in (*_COUNTS, *(_EXPERT_COUNTS if has_experts else (size_key,))):
            whole(checkpoint, key)
        for key in ("rms_norm_eps", "rope_theta", "partial_rotary_factor"):
            real(checkpoint, key)
        for many, few in (("num_attention_heads", "num_key_value_heads"), ("linear_num_value_heads", "linear_num_key_heads")):
            if config[many] % config[few]:
                raise bad(checkpoint, few, config[few], f"a divisor of {many} = {config[many]}")
        if config["linear_conv_kernel_dim"] < 2:
            raise bad(checkpoint, "linear_conv_kernel_dim", config["linear_conv_kernel_dim"], "at least 2")
        rotary_dim = int(config["head_dim"] * config["partial_rotary_factor"])
        if rotary_dim % 2 or not 0 < rotary_dim <= config["head_dim"]:
            raise bad(checkpoint, "partial_rotary_factor", config["partial_rotary_factor"], f"an even part of head_dim = {config['head_dim']}")
        return cls(
            hidden_size=config["hidden_size"],
            intermediate_size=config[size_key],
            num_hidden_layers=config["num_hidden_layers"],
            num_attention_heads=config["num_attention_heads"],
            num_key_value_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            rms_norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(config["rope_theta"]),
            vocab_size=config["vocab_size"],
            tie_word_embeddings=config["tie_word_embeddings"],
            layer_types=_layer_types(checkpoint, config),
            rotary_dim=rotary_dim,
            delta_net=DeltaNetSizes(
                num_key_heads=config["linear_num_key_heads"],
                num_value_heads=config["linear_num_value_heads"],
                key_dim=config["linear_key_head_dim"],
                value_dim=config["linear_value_head_dim"],
                conv_kernel=config["linear_conv_kernel_dim"],
                tiled=checkpoint.gguf is not None,
            ),
            experts=_experts(checkpoint, config) if has_experts else None,
        )

    @property
    def num_attention_layers(self) -> int:
        return self.layer_types.count("full_attention")

    @property
    def num_state_layers(self) -> int:
        return self.layer_types.count("linear_attention")


def _layer_types(checkpoint: Checkpoint, config: Mapping[str, Any]) -> tuple[str, ...]:
    count, types = config["num_hidden_layers"], config.get("layer_types")
    if types is None:
        interval = required(checkpoint, "full_attention_interval")
        if type(interval) is not int or not 0 < interval <= count:
            raise bad(checkpoint, "full_attention_interval", interval, f"a whole number from 1 to num_hidden_layers = {count}")
        return tuple(_KINDS[(index + 1) % interval == 0] for index in range(count))
    if not isinstance(types, list) or len(types) != count:
        raise bad(checkpoint, "layer_types", types, f"a list of {count}")
    for kind in types:
        if kind not in _KINDS:
            raise UnsupportedFeatureError(
                f"{checkpoint.path} has a layer of type {kind!r}, which is not supported for {checkpoint.architecture} (only {' and '.join(_KINDS)}): "
                "use another model.",
                param="model",
            )
    if _KINDS[1] not in types:
        raise bad(checkpoint, "layer_types", types, "a list with at least one full_attention")
    return tuple(types)


def _experts(checkpoint: Checkpoint, config: Mapping[str, Any]) -> Experts:
    if config["num_experts_per_tok"] > config["num_experts"]:
        raise bad(checkpoint, "num_experts_per_tok", config["num_experts_per_tok"], f"at most num_experts = {config['num_experts']}")
    is_fused = any(tensor.name.endswith(".mlp.experts.gate_up_proj") for tensor in checkpoint.tensors)
    return Experts(
        count=config["num_experts"],
        top_k=config["num_experts_per_tok"],
        intermediate_size=config["moe_intermediate_size"],
        normalize=True,
        layers=frozenset(range(config["num_hidden_layers"])),
        layout="stacked" if checkpoint.gguf is not None else "fused" if is_fused else "separate",
    )
