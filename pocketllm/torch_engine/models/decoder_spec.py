"""What a pre-norm decoder is made of, and how a checkpoint's config says it. Nothing has a default of our own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.layers.activation import GATED_ACTIVATIONS
from pocketllm.torch_engine.layers.rope import ROPE_TYPES

# Numbers that each kind of rope_scaling needs, then what it may say besides.
_ROPE_KEYS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "linear": (("factor",), ()),
    "dynamic": (("factor",), ("original_max_position_embeddings",)),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor", "original_max_position_embeddings"),
        ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "frequency_factors": ((), ("tensor",)),
}
assert _ROPE_KEYS.keys() == set(ROPE_TYPES)


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding: `theta`, and `scaling` as layers/rope.py takes it."""

    theta: float
    scaling: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts.

    Args:
        count, top_k, intermediate_size: experts of a layer, of those a token's, and the width of each.
        normalize: the shares of a token's experts sum up to 1.
        layers: layers that have it; the others are dense.
        layout: "separate" in the file is a tensor for each matrix, "fused" two a layer, gate and up in one, "stacked" three a layer.
    """

    count: int
    top_k: int
    intermediate_size: int
    normalize: bool
    layers: frozenset[int]
    layout: Literal["separate", "fused", "stacked"]


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder of layers x + attention(norm(x)), then x + feed_forward(norm(x)).

    Args:
        hidden_size to hidden_act: config.json's numbers, under their own names.
        rope: of the layers, or of those without a window where `local_rope` is set.
        local_rope: of the layers with a window.
        windows: a layer, how many tokens a token attends to, itself included; None is all.
        qkv_bias, output_bias, mlp_bias: linear layers that have one.
        head_norms: each head of queries and keys is normalised before it is rotated.
        sandwich_norms: what attention and feed-forward give is normalised too, before it is added.
        norm_offset: added to all stored norm weights.
        embedding_scale: of the embeddings.
        attention_scale: of the scores; None is head_dim^-0.5.
        logit_softcap: c of c * tanh(logits / c); None is none.
        experts: None is a dense feed-forward in every layer.
        interleaved: the file keeps the two values of a head that rotate together as neighbours.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    hidden_act: str
    rope: Rope
    windows: tuple[int | None, ...]
    local_rope: Rope | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    head_norms: bool = False
    sandwich_norms: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    logit_softcap: float | None = None
    experts: Experts | None = None
    interleaved: bool = False

    @property
    def unsuited_for_decode_step(self) -> str | None:
        """Why the native step of all layers, which computes the plain form, does not do; None when it does."""
        for is_other, what in (
            (self.qkv_bias or self.output_bias or self.mlp_bias, "biases"),
            (self.head_norms, "normalised heads"),
            (self.sandwich_norms, "norms after attention and feed-forward"),
            (any(window is not None for window in self.windows), "sliding windows"),
            (self.attention_scale is not None, "a scale of its own for attention"),
            (self.hidden_act != "silu", f"{self.hidden_act} as activation"),
            (self.experts is not None, "a mixture of experts"),
        ):
            if is_other:
                return what
        return None


def read_spec(checkpoint: Checkpoint, **traits: Any) -> DecoderSpec:
    """The spec of a checkpoint whose config has the usual keys; `traits` are fields of DecoderSpec that its architecture sets.

    Raises:
        ConfigurationError: a key is missing.
        UnsupportedFeatureError: the config asks for what no decoder here computes.
    """
    only(checkpoint, partial_rotary_factor=1.0)
    numbers = {name: traits[name] if name in traits else need(checkpoint, name) for name in _NUMBERS}
    if numbers["hidden_act"] not in GATED_ACTIVATIONS:
        raise unsupported(checkpoint, "hidden_act", " or ".join(map(repr, GATED_ACTIVATIONS)))
    if numbers["head_dim"] % 2:
        raise UnsupportedFeatureError(f"{checkpoint.path} has heads of {numbers['head_dim']} values, which can't be rotated in pairs.", param="model")
    rope = Rope(need(checkpoint, "rope_theta"), read_scaling(checkpoint))
    return DecoderSpec(**{"windows": (None,) * numbers["num_hidden_layers"], **numbers, "rope": rope, **traits})


_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "tie_word_embeddings",
    "hidden_act",
)


def need(checkpoint: Checkpoint, name: str) -> Any:
    """The value of a key that has no default; it may be None only by being there.

    Raises:
        ConfigurationError: it is missing.
    """
    if name not in checkpoint.config:
        raise ConfigurationError(f"{checkpoint.path} does not say {name}, which a {checkpoint.architecture} model needs: convert it again.", param="model")
    return checkpoint.config[name]


def only(checkpoint: Checkpoint, **wanted: Any) -> None:
    """Refuse a checkpoint with another value under a key than the one that is computed; a key left out has that value.

    Raises:
        UnsupportedFeatureError: naming key and value.
    """
    for key, value in wanted.items():
        if checkpoint.config.get(key, value) != value:
            raise unsupported(checkpoint, key, f"only {value!r}")


def unsupported(checkpoint: Checkpoint, key: str, supported: str) -> UnsupportedFeatureError:
    found = checkpoint.config.get(key)
    return UnsupportedFeatureError(
        f"{checkpoint.path} has {key} = {found!r}, which is not supported for {checkpoint.architecture} yet ({supported}): use another model.", param="model"
    )


def windows_of(checkpoint: Checkpoint) -> tuple[int | None, ...]:
    """Each layer's window, from layer_types and sliding_window.

    Raises:
        UnsupportedFeatureError: layers of another kind.
        ConfigurationError: the number of layers differs, or there is no window to slide.
    """
    kinds, count = need(checkpoint, "layer_types"), need(checkpoint, "num_hidden_layers")
    if not isinstance(kinds, list) or len(kinds) != count:
        raise ConfigurationError(f"{checkpoint.path} has {count} layers, and layer_types does not name as many: download it again.", param="model")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise UnsupportedFeatureError(
                f"{checkpoint.path} has a layer of the type {kind!r}, which is not supported for {checkpoint.architecture}: use another model.", param="model"
            )
    window = need(checkpoint, "sliding_window") if "sliding_attention" in kinds else None
    if "sliding_attention" in kinds and window is None:
        raise ConfigurationError(f"{checkpoint.path} has layers with sliding attention and no sliding_window: download it again.", param="model")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_scaling(checkpoint: Checkpoint, key: str = "rope_scaling") -> Mapping[str, Any] | None:
    """The scaling of rotary embeddings under `key`.

    Raises:
        UnsupportedFeatureError: a type, or a key of a type, that layers/rope.py does not compute.
        ConfigurationError: a number is missing or no number above 0.
    """
    scaling = need(checkpoint, key)
    if scaling is None:
        return None
    kind = scaling.get("rope_type")
    if not isinstance(kind, str) or kind not in _ROPE_KEYS:
        raise unsupported(checkpoint, key, f"rope_type is one of {', '.join(ROPE_TYPES)}")
    needed, possible = _ROPE_KEYS[kind]
    for name in scaling:
        if name not in ("rope_type", *needed, *possible):
            raise unsupported(checkpoint, key, f"rope_type {kind!r} takes {', '.join(needed + possible)}")
    complete = dict(scaling)
    if complete.get("original_max_position_embeddings") is None and "original_max_position_embeddings" in needed:
        complete["original_max_position_embeddings"] = need(checkpoint, "max_position_embeddings")
    numbers = [name for name in possible if name not in ("truncate", "tensor") and complete.get(name) is not None]
    for name in (*needed, *numbers):
        value = complete.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise ConfigurationError(
                f"{checkpoint.path} has {key} with {name} = {value!r}, which should be a number above 0: download it again.", param="model"
            )
    return complete
