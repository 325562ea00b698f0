"""config.json and generation_config.json of a Hugging Face checkpoint, in one flat mapping."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pocketllm.errors import ConfigurationError

_COMMON = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
)
# Keys without which the model is not known. What transformers would put in their place suits one checkpoint and no other.
_REQUIRED = {
    "llama": _COMMON,
    "mistral": (*_COMMON, "num_key_value_heads", "rope_theta"),
    "qwen2": (*_COMMON, "num_key_value_heads", "rope_theta"),
    "qwen3": (*_COMMON, "num_key_value_heads", "rope_theta", "head_dim"),
    "qwen3_moe": (
        *_COMMON,
        "num_key_value_heads",
        "rope_theta",
        "num_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "norm_topk_prob",
        "decoder_sparse_step",
        "mlp_only_layers",
    ),
    "gemma3_text": (
        *_COMMON,
        "num_key_value_heads",
        "rope_theta",
        "rope_local_base_freq",
        "head_dim",
        "query_pre_attn_scalar",
        "sliding_window",
        "hidden_activation",
    ),
}
# Of architectures that read their own keys, those that a plane needs before the model is looked at.
_REQUIRED_EARLY = dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "deepseek_v4"), ("vocab_size", "max_position_embeddings"))
_ROPE_KINDS = frozenset({"full_attention", "sliding_attention", "main", "compress"})  # of layers, in rope_parameters
# Keys that must be there too, and may be null.
_NULLABLE = {"mistral": ("sliding_window",)}
# Other names of keys, in architectures that are not listed here. The first that is there counts.
_OTHER_NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_sequence_length", "max_seq_len"),
}
# What transformers' configs mean by a key that is left out.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 10000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    "mistral": {"hidden_act": "silu"},
    "qwen2": {"hidden_act": "silu", "use_sliding_window": False},
    "qwen3": {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
    "qwen3_moe": {"hidden_act": "silu", "use_sliding_window": False, "attention_bias": False},
    "gemma3_text": {"attention_bias": False, "tie_word_embeddings": True},
}
_POSITIVE_INTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
)
# The same of the architectures whose keys are known.
_MORE_POSITIVE_INTS = ("sliding_window", "num_experts", "num_experts_per_tok", "moe_intermediate_size", "decoder_sparse_step")
_POSITIVE_NUMBERS = ("rope_theta", "rope_local_base_freq", "rms_norm_eps", "query_pre_attn_scalar", "final_logit_softcapping")
_BOOLEANS = ("attention_bias", "mlp_bias", "use_sliding_window", "norm_topk_prob")


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises:
        ConfigurationError: the file is missing, unreadable or no JSON object; the message ends with `remedy`.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"{path.parent} has no {path.name}: {remedy}.", param="model") from None
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read ({error.strerror or error}): check its permissions.", param="model") from None
    except (ValueError, RecursionError):
        raise ConfigurationError(f"{path} is not valid JSON: download it again.", param="model") from None
    if not isinstance(value, dict):
        raise ConfigurationError(f"{path} holds no JSON object: download it again.", param="model")
    return value


def hf_config(raw: Mapping[str, Any], path: Path) -> tuple[str, dict[str, Any]]:
    """model_type and one flat config: a multimodal checkpoint's text_config is laid over its top level.

    Both spellings of rotary embeddings are read: `rope_parameters` (transformers 5) and `rope_theta` with `rope_scaling`.

    Raises:
        ConfigurationError: a key is missing or has the wrong type.
    """
    architecture = raw.get("model_type")
    if not isinstance(architecture, str) or not architecture:
        raise ConfigurationError(f"{path} lacks the key model_type: download it again.", param="model")
    text = raw.get("text_config")
    config = {name: value for name, value in raw.items() if name not in ("text_config", "vision_config")}
    if isinstance(text, dict):
        config.update(text)
        config["model_type"] = architecture
    if config.get("num_experts") is None and "num_local_experts" in config:  # as transformers 5 writes it
        config["num_experts"] = config["num_local_experts"]
    if architecture not in _REQUIRED:
        for name, others in _OTHER_NAMES.items():
            if config.get(name) is None and (value := next((config[other] for other in others if config.get(other) is not None), None)) is not None:
                config[name] = value
    _check_ints(config, _POSITIVE_INTS, path)
    _normalize_rope(config, path)
    for name in (*_REQUIRED.get(architecture, ()), *_REQUIRED_EARLY.get(architecture, ())):
        if config.get(name) is None:
            raise ConfigurationError(f"{path} lacks the key {name}: download it again.", param="model")
    for name in _NULLABLE.get(architecture, ()):
        if name not in config:
            raise ConfigurationError(f"{path} lacks the key {name}: download it again.", param="model")
    if architecture in _REQUIRED:
        _complete(config, architecture, path)
    config["tie_word_embeddings"] = bool(config.get("tie_word_embeddings", False))
    return architecture, config


def hf_generation_defaults(raw: Mapping[str, Any], generation: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Keywords of GenerationDefaults.

    Sampling values are taken where generation_config.json has them, whatever `do_sample` says. EOS ids come from
    generation_config.json, which knows the end of a turn, else from config.json.
    """
    text = raw.get("text_config")
    sources = [generation, raw, text if isinstance(text, dict) else {}]
    eos = next((source["eos_token_id"] for source in sources if source.get("eos_token_id") is not None), ())
    ids = tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)
    if not all(type(id_) is int and id_ >= 0 for id_ in ids):
        raise ConfigurationError(f"{directory} has eos_token_id = {eos!r}, which should be a token id or a list of them: download it again.", param="model")
    defaults: dict[str, Any] = {"eos_token_ids": ids}
    for name in ("temperature", "top_p", "top_k"):
        value = generation.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int if name == "top_k" else (int, float))):
            raise ConfigurationError(
                f"{directory / 'generation_config.json'} has {name} = {value!r}, which should be a number: correct or delete it.", param="model"
            )
        defaults[name] = value
    return defaults


def _check_ints(config: Mapping[str, Any], names: tuple[str, ...], path: Path) -> None:
    for name in names:
        if config.get(name) is not None and not (type(config[name]) is int and config[name] > 0):
            raise ConfigurationError(f"{path} has {name} = {config[name]!r}, which should be a whole number above 0: download it again.", param="model")


def _is_positive(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and 0 < value < float("inf")


def _normalize_rope(config: dict[str, Any], path: Path) -> None:
    for key in ("rope_parameters", "rope_scaling"):
        _check_mapping(config.get(key), key, path)
    parameters = config.get("rope_parameters")
    if isinstance(parameters, dict):
        for kind in _ROPE_KINDS & parameters.keys():
            _check_mapping(parameters[kind], f"rope_parameters.{kind}", path)
    if isinstance(parameters, dict) and {"full_attention", "sliding_attention"} & parameters.keys():
        # One rotation for each kind of layer: the layers without a window are the rule, the local ones have keys of their own.
        local = parameters["sliding_attention"] if isinstance(parameters.get("sliding_attention"), dict) else {}
        config["rope_local_base_freq"] = local.get("rope_theta", config.get("rope_local_base_freq"))
        config["rope_local_scaling"] = _scaling(local, path)
        parameters = parameters.get("full_attention")
    elif isinstance(parameters, dict) and {"main", "compress"} & parameters.keys():
        # DeepSeek-V4: layers that compress their past rotate by another base, and theirs alone is scaled.
        for kind in ("main", "compress"):
            if parameters.get(kind) is None:
                raise ConfigurationError(f"{path} lacks the key rope_parameters.{kind}: download it again.", param="model")
        main, parameters = parameters["main"], parameters["compress"]
        config["rope_theta"] = main.get("rope_theta", config.get("rope_theta"))
        config["compress_rope_theta"] = parameters.get("rope_theta", config.get("compress_rope_theta"))
        config["rope_main_scaling"] = _scaling(main, path)
        parameters = {**parameters, "rope_theta": config["rope_theta"]}
    if not isinstance(parameters, dict):
        parameters = config.get("rope_scaling")
    if not isinstance(parameters, dict):
        parameters = {}
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is not None:
        config["rope_theta"] = float(theta) if _is_positive(theta) else theta
    if "partial_rotary_factor" in parameters:
        config["partial_rotary_factor"] = parameters["partial_rotary_factor"]
    config["rope_scaling"] = _scaling(parameters, path)


def _check_mapping(value: Any, key: str, path: Path) -> None:
    if value is not None and not isinstance(value, dict):
        raise ConfigurationError(f"{path} has {key} = {value!r}, which should be a mapping: download it again.", param="model")


def _scaling(parameters: Mapping[str, Any], path: Path) -> dict[str, Any] | None:
    kind = parameters.get("rope_type", parameters.get("type"))
    if kind is None and parameters.get("factor") is not None:
        raise ConfigurationError(
            f"{path} scales rotary embeddings by factor = {parameters['factor']!r} and has no rope_type: download it again.", param="model"
        )
    kind = "default" if kind is None else kind
    scaling = {name: value for name, value in parameters.items() if name not in ("rope_theta", "rope_type", "type", "partial_rotary_factor")}
    return None if kind == "default" else {"rope_type": kind, **scaling}


def _complete(config: dict[str, Any], architecture: str, path: Path) -> None:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if config.get("num_key_value_heads") is None:
        config["num_key_value_heads"] = heads
    if heads % config["num_key_value_heads"]:
        raise ConfigurationError(f"{path} has {heads} heads for {config['num_key_value_heads']} key-value heads: download it again.", param="model")
    if config.get("head_dim") is None:
        if hidden % heads:
            raise ConfigurationError(f"{path} has hidden_size = {hidden} for {heads} heads and no head_dim: download it again.", param="model")
        config["head_dim"] = hidden // heads
    _check_ints(config, _MORE_POSITIVE_INTS, path)
    for name in _POSITIVE_NUMBERS:
        if config.get(name) is not None and not _is_positive(config[name]):
            raise ConfigurationError(f"{path} has {name} = {config[name]!r}, which should be a number above 0: download it again.", param="model")
    for name, value in _DEFAULTS[architecture].items():
        config.setdefault(name, value)
    for name in _BOOLEANS:
        if not isinstance(config.get(name, False), bool):
            raise ConfigurationError(f"{path} has {name} = {config[name]!r}, which should be true or false: download it again.", param="model")
    if architecture.startswith("qwen"):
        if not config["use_sliding_window"]:
            config["sliding_window"] = None
        elif "sliding_window" not in config:
            raise ConfigurationError(f"{path} lacks the key sliding_window: download it again.", param="model")
    if architecture == "qwen3_moe":
        _check_experts(config, path)
    elif architecture == "gemma3_text":
        _name_gemma_layers(config, path)
    elif architecture in ("qwen2", "qwen3"):
        _name_qwen_layers(config, path)


def _check_experts(config: Mapping[str, Any], path: Path) -> None:
    count, top_k, dense = config["num_experts"], config["num_experts_per_tok"], config["mlp_only_layers"]
    if top_k > count:
        raise ConfigurationError(f"{path} has num_experts_per_tok = {top_k} of {count} experts: download it again.", param="model")
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigurationError(f"{path} has mlp_only_layers = {dense!r}, which should be a list of layers: download it again.", param="model")


def _name_gemma_layers(config: dict[str, Any], path: Path) -> None:
    """Of sliding_window_pattern layers the last one has no window, unless layer_types names them."""
    if config.get("layer_types") is None:
        period = config.get("sliding_window_pattern", config.get("_sliding_window_pattern"))
        if type(period) is not int or period < 1:
            raise ConfigurationError(f"{path} lacks the key layer_types, or sliding_window_pattern in its place: download it again.", param="model")
        config["layer_types"] = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(config["num_hidden_layers"])]


def _name_qwen_layers(config: dict[str, Any], path: Path) -> None:
    """With a window, layers from max_window_layers on have it, unless layer_types names them."""
    if config.get("layer_types") is None:
        window, first = config["sliding_window"], config.get("max_window_layers", -1)
        if window is not None and (type(first) is not int or first < 0):
            raise ConfigurationError(f"{path} has a sliding window and lacks the key max_window_layers: download it again.", param="model")
        config["layer_types"] = ["full_attention" if window is None or layer < first else "sliding_attention" for layer in range(config["num_hidden_layers"])]
