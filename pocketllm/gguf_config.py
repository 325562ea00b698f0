"""GGUF metadata under Hugging Face's config names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.errors import ConfigurationError
from pocketllm.gguf_file import GGUFFile

_MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5_text",
    "qwen35moe": "qwen3_5_moe_text",
    "gemma3": "gemma3_text",
    "deepseek4": "deepseek_v4",
}

# HF name -> GGUF key after "<architecture>."
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
    "num_local_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
    "full_attention_interval": "full_attention_interval",
}
_POSITIVE_INTS = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings")
_REQUIRED = {
    "llama": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps", "max_position_embeddings"),
}


def gguf_model_type(file: GGUFFile) -> str:
    """Hugging Face's model_type of the file's architecture, or GGUF's own word where there is no known counterpart."""
    architecture = _architecture(file)
    if architecture == "llama" and _number(file, "llama.expert_count", int, 0):
        return "mixtral"  # GGUF writes both as "llama"
    return _MODEL_TYPES.get(architecture, architecture)


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's numbers under config.json's names. Complete for llama; for another architecture, what the file has.

    Raises:
        ConfigurationError: a key that llama needs is missing, or a value has the wrong type or is out of range.
    """
    architecture, metadata = _architecture(file), file.metadata
    config: dict[str, Any] = {name: metadata[f"{architecture}.{key}"] for name, key in _KEYS.items() if f"{architecture}.{key}" in metadata}
    for name in _REQUIRED.get(architecture, ()):
        if name not in config:
            raise ConfigurationError(f"{file.path} lacks the key {architecture}.{_KEYS[name]}: download or convert it again.", param="model")
    for name in _POSITIVE_INTS:
        per_layer = architecture not in _REQUIRED and isinstance(config.get(name), list)
        if name in config and not per_layer and not (type(config[name]) is int and config[name] > 0):
            raise _bad_value(file, f"{architecture}.{_KEYS[name]}", "a whole number above 0")
    for name in ("rms_norm_eps", "rope_theta"):
        if name in config and not (isinstance(config[name], float) and 0 < config[name] < float("inf")):
            raise _bad_value(file, f"{architecture}.{_KEYS[name]}", "a number above 0")
    config["model_type"] = gguf_model_type(file)
    config["vocab_size"] = _vocab_size(file, architecture)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in file.tensors
    config["rope_scaling"] = _rope_scaling(file, architecture)
    if architecture == "llama":
        _complete_llama(file, config)
    return config


def gguf_generation_defaults(file: GGUFFile) -> dict[str, Any]:
    """Keywords of GenerationDefaults: general.sampling.* and the tokenizer's EOS and end-of-turn ids."""
    eos = [_number(file, f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot")]
    top_k = _number(file, "general.sampling.top_k", int, None)
    return {
        "temperature": _number(file, "general.sampling.temp", float, None),
        "top_p": _number(file, "general.sampling.top_p", float, None),
        "top_k": top_k,
        "eos_token_ids": tuple(dict.fromkeys(id_ for id_ in eos if id_ is not None)),
    }


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ConfigurationError(f"{file.path} lacks the key general.architecture: download or convert it again.", param="model")
    return architecture


def _complete_llama(file: GGUFFile, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    config.setdefault("num_key_value_heads", heads)
    if heads % config["num_key_value_heads"]:
        raise _bad_value(file, "llama.attention.head_count_kv", f"a divisor of llama.attention.head_count = {heads}")
    if "head_dim" not in config:
        if config["hidden_size"] % heads:
            raise _bad_value(file, "llama.attention.head_count", f"a divisor of llama.embedding_length = {config['hidden_size']}")
        config["head_dim"] = config["hidden_size"] // heads
    config.setdefault("rope_theta", 10000.0)  # llama's own; GGUF writers leave it out at this value
    config["hidden_act"] = "silu"
    rotary_dim = _number(file, "llama.rope.dimension_count", int, config["head_dim"])
    if rotary_dim != config["head_dim"]:
        config["partial_rotary_factor"] = rotary_dim / config["head_dim"]


def _vocab_size(file: GGUFFile, architecture: str) -> int:
    if embedding := file.tensors.get("token_embd.weight"):
        if len(embedding.shape) != 2:
            raise ConfigurationError(f"{file.path} has a token_embd.weight that is no matrix: download or convert it again.", param="model")
        return int(embedding.shape[1])
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, list) else 0
    return int(_number(file, f"{architecture}.vocab_size", int, listed) or 0)


def _rope_scaling(file: GGUFFile, architecture: str) -> Mapping[str, Any] | None:
    kind = file.metadata.get(f"{architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in file.tensors:
        # Llama 3.1 files carry the result of their scaling, a divisor for each frequency, in place of its parameters.
        return {"rope_type": "frequency_factors", "tensor": "rope_freqs.weight"}
    if kind == "none":
        # Files from before rope.scaling.type have only a linear factor.
        factor = _number(file, f"{architecture}.rope.scale_linear", float, 1.0)
        return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": _number(file, f"{architecture}.rope.scaling.factor", float, 1.0)}
    names = {
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    for name, key in names.items():
        if (value := file.metadata.get(f"{architecture}.rope.scaling.{key}")) is not None:
            scaling[name] = value
    return scaling


def _number(file: GGUFFile, key: str, kind: type, default: Any) -> Any:
    value = file.metadata.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise _bad_value(file, key, "a number" if kind is float else "a whole number")
    return kind(value)


def _bad_value(file: GGUFFile, key: str, wanted: str) -> ConfigurationError:
    value = repr(file.metadata.get(key))
    shown = value if len(value) <= 60 else value[:60] + "…"
    return ConfigurationError(f"{file.path} has {key} = {shown}, which should be {wanted}: download or convert it again.", param="model")
