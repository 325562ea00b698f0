"""GGUF metadata under Hugging Face's config names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from pocketllm.errors import ConfigurationError
from pocketllm.gguf_file import GGUFFile
from pocketllm.gguf_keys import GGUFKeys, bad_value

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
# Of an architecture whose keys are not read in full below: HF name -> GGUF key after "<architecture>."
_COMMON_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "max_position_embeddings": "context_length",
}
_GEMMA3_27B_LAYERS = 62
# How model families spell the end of a turn. Many files name the end of a text alone as EOS, though a chat never reaches it.
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<end_of_turn>")
_MARKED = (3, 4)  # values of tokenizer.ggml.token_type: control, user-defined


def gguf_model_type(file: GGUFFile) -> str:
    """Hugging Face's model_type of the file's architecture, or GGUF's own word where there is no known counterpart."""
    architecture = _architecture(file)
    if architecture == "llama" and _number(file, "llama.expert_count", int, 0):
        return "mixtral"  # GGUF writes both as "llama"
    return _MODEL_TYPES.get(architecture, architecture)


def gguf_config(file: GGUFFile) -> dict[str, Any]:
    """The model's numbers under config.json's names. Complete for the architectures in `_READERS`; of another, what the file has.

    Raises:
        ConfigurationError: a key that the architecture needs is missing, or a value has the wrong type or is out of range.
        UnsupportedFeatureError: a value, or a key, that asks for what no model here computes.
    """
    architecture, model_type = _architecture(file), gguf_model_type(file)
    common = {
        "model_type": model_type,
        "vocab_size": _vocab_size(file, architecture),
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    if model_type not in _READERS:
        found = {name: file.metadata.get(f"{architecture}.{key}") for name, key in _COMMON_KEYS.items()}
        return common | {name: value for name, value in found.items() if value is not None}
    keys = GGUFKeys(file, architecture)
    config = common | _decoder(keys)
    _READERS[model_type](keys, config)
    keys.only("attention.causal", True)
    keys.refuse_unread()
    return config


def gguf_generation_defaults(file: GGUFFile) -> dict[str, Any]:
    """Keywords of GenerationDefaults: general.sampling.* and the tokenizer's EOS and end-of-turn ids."""
    eos = [_number(file, f"tokenizer.ggml.{name}_token_id", int, None) for name in ("eos", "eot")]
    if eos[1] is None:
        eos += _ends_of_turn(file)
    top_k = _number(file, "general.sampling.top_k", int, None)
    return {
        "temperature": _number(file, "general.sampling.temp", float, None),
        "top_p": _number(file, "general.sampling.top_p", float, None),
        "top_k": top_k,
        "eos_token_ids": tuple(dict.fromkeys(id_ for id_ in eos if id_ is not None)),
    }


def _ends_of_turn(file: GGUFFile) -> list[int]:
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(types, list) or len(tokens) != len(types):
        return []  # which the tokenizer reports
    return [id_ for id_, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind in _MARKED and token in _ENDS_OF_TURN]


def _architecture(file: GGUFFile) -> str:
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ConfigurationError(f"{file.path} lacks the key general.architecture: download or convert it again.", param="model")
    return architecture


def _decoder(keys: GGUFKeys) -> dict[str, Any]:
    """What every decoder has but for its feed-forward."""
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    kv_heads = keys.whole("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise keys.bad("attention.head_count_kv", f"a divisor of {keys.architecture}.attention.head_count = {heads}")
    if keys.value("attention.key_length") is None and hidden % heads:
        raise keys.bad("attention.head_count", f"a divisor of {keys.architecture}.embedding_length = {hidden}")
    head_dim = keys.whole("attention.key_length", hidden // heads)
    keys.only("attention.value_length", head_dim)
    context = keys.whole("context_length")
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": keys.whole("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": keys.real("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": context,
        "rope_scaling": _rope_scaling(keys, context),
        "hidden_act": "silu",
    }
    if (rotary_dim := keys.whole("rope.dimension_count", head_dim)) != head_dim:
        config["partial_rotary_factor"] = rotary_dim / head_dim
    return config


def _llama(keys: GGUFKeys, config: dict[str, Any]) -> None:
    config["intermediate_size"] = keys.whole("feed_forward_length")
    config["rope_theta"] = keys.real("rope.freq_base", 10000.0)  # llama's own; GGUF writers leave it out at this value
    config["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in keys.file.tensors


def _qwen2(keys: GGUFKeys, config: dict[str, Any]) -> None:
    config["intermediate_size"] = keys.whole("feed_forward_length")
    config["rope_theta"] = keys.real("rope.freq_base")
    config |= {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * config["num_hidden_layers"]}


def _qwen3(keys: GGUFKeys, config: dict[str, Any]) -> None:
    _qwen2(keys, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in keys.file.tensors


def _qwen3_moe(keys: GGUFKeys, config: dict[str, Any]) -> None:
    experts, top_k = keys.whole("expert_count"), keys.whole("expert_used_count")
    if top_k > experts:
        raise keys.bad("expert_used_count", f"at most {keys.architecture}.expert_count = {experts}")
    keys.only("expert_shared_count", 0)
    keys.only("expert_weights_norm", True)
    keys.only("expert_weights_scale", 0.0, 1.0)
    width = keys.whole("expert_feed_forward_length")
    config |= {
        "intermediate_size": keys.whole("feed_forward_length", width),  # of dense layers, which there are none of
        "moe_intermediate_size": width,
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,  # what the architecture means in GGUF
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "rope_theta": keys.real("rope.freq_base"),
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "use_sliding_window": False,
        "sliding_window": None,
    }


def _gemma3(keys: GGUFKeys, config: dict[str, Any]) -> None:
    config["intermediate_size"] = keys.whole("feed_forward_length")
    config["rope_theta"] = keys.real("rope.freq_base")
    config["rope_local_base_freq"] = keys.real("rope.freq_base_swa", 10000.0)  # gemma3's own; GGUF writers leave it out at this value
    window = keys.whole("attention.sliding_window") if keys.value("attention.sliding_window") else None
    config["sliding_window"] = window
    config["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in _gemma3_pattern(keys, config["num_hidden_layers"], window)]
    # GGUF does not store the scale. The largest model alone has another than its head size, and is known by its layers.
    largest = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    config["query_pre_attn_scalar"] = config["hidden_size"] // config["num_attention_heads"] if largest else config["head_dim"]
    cap = keys.value("final_logit_softcapping", 0.0)
    config["final_logit_softcapping"] = keys.real("final_logit_softcapping") if cap else None
    keys.only("attn_logit_softcapping", 0.0)
    for key in ("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"):
        keys.only(key, config["head_dim"])
    config |= {
        "attn_logit_softcapping": None,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
        "use_bidirectional_attention": False,
    }


def _gemma3_pattern(keys: GGUFKeys, num_layers: int, window: int | None) -> list[bool]:
    """Whether each layer's attention is local: a list says so, or a number n says that each n-th is not."""
    pattern = keys.value("attention.sliding_window_pattern", 6)
    if isinstance(pattern, list):
        if len(pattern) < num_layers or not all(isinstance(slides, bool) for slides in pattern):
            raise keys.bad("attention.sliding_window_pattern", f"a list of {num_layers} booleans")
        local = pattern[:num_layers]
    else:
        period = keys.whole("attention.sliding_window_pattern", 6)
        local = [(layer + 1) % period != 0 for layer in range(num_layers)]
    return [slides and window is not None for slides in local]


def _qwen3_5(keys: GGUFKeys, config: dict[str, Any]) -> None:
    # The layers that predict further tokens come last, and are no part of the decoder.
    extra = keys.value("nextn_predict_layers", 0) and keys.whole("nextn_predict_layers")
    if extra >= config["num_hidden_layers"]:
        raise keys.bad("nextn_predict_layers", f"less than {keys.architecture}.block_count = {config['num_hidden_layers']}")
    config["num_hidden_layers"] = layers = config["num_hidden_layers"] - extra
    recurrent = keys.value("attention.recurrent_layers")
    if recurrent is None:
        interval = keys.whole("full_attention_interval")
        recurrent = [(layer + 1) % interval != 0 for layer in range(layers)]
    elif not isinstance(recurrent, list) or len(recurrent) < layers or not all(isinstance(one, bool) for one in recurrent):
        raise keys.bad("attention.recurrent_layers", f"a list of {layers} booleans")
    keys.value("full_attention_interval")
    keys.value("rope.dimension_sections")  # positions of images; a text has the same in each section
    inner, value_heads = keys.whole("ssm.inner_size"), keys.whole("ssm.time_step_rank")
    if inner % value_heads:
        raise keys.bad("ssm.inner_size", f"a multiple of {keys.architecture}.ssm.time_step_rank = {value_heads}")
    config |= {
        "rope_theta": keys.real("rope.freq_base"),
        "layer_types": ["linear_attention" if one else "full_attention" for one in recurrent[:layers]],
        "linear_conv_kernel_dim": keys.whole("ssm.conv_kernel"),
        "linear_key_head_dim": keys.whole("ssm.state_size"),
        "linear_value_head_dim": inner // value_heads,
        "linear_num_key_heads": keys.whole("ssm.group_count"),
        "linear_num_value_heads": value_heads,
        "attn_output_gate": True,
        "attention_bias": "blk.0.attn_q.bias" in keys.file.tensors,
    }
    config.setdefault("partial_rotary_factor", 1.0)
    if config["model_type"] == "qwen3_5_text":
        config["intermediate_size"] = keys.whole("feed_forward_length")
        return
    experts, top_k = keys.whole("expert_count"), keys.whole("expert_used_count")
    if top_k > experts:
        raise keys.bad("expert_used_count", f"at most {keys.architecture}.expert_count = {experts}")
    config |= {
        "num_experts": experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": keys.whole("expert_feed_forward_length"),
        "shared_expert_intermediate_size": keys.whole("expert_shared_feed_forward_length"),
    }


def _deepseek_v4(keys: GGUFKeys, config: dict[str, Any]) -> None:
    layers = config["num_hidden_layers"]
    # The layers that predict further tokens come last, where the file has them.
    extra = keys.value("nextn_predict_layers", 0) and keys.whole("nextn_predict_layers")
    if extra and f"blk.{layers - extra}.nextn.eh_proj.weight" in keys.file.tensors:
        layers -= extra
        config |= {"num_hidden_layers": layers, "num_nextn_predict_layers": extra}
    keys.only("expert_gating_func", 4)  # the square root of softplus
    keys.only("expert_weights_norm", True)
    keys.only("expert_shared_count", 1)
    limits = [_same(keys, f"swiglu_clamp_{name}", layers) for name in ("exp", "shexp") if keys.value(f"swiglu_clamp_{name}") is not None]
    if not limits:
        keys.real("swiglu_clamp_exp")
    if len({*limits}) > 1:
        raise keys.unsupported("swiglu_clamp_shexp", "the same as swiglu_clamp_exp")
    scaling = config["rope_scaling"]
    if scaling is not None and "attention_factor" not in scaling:
        config["rope_scaling"] = {**scaling, "attention_factor": 1.0}
    config |= {
        "moe_intermediate_size": _same(keys, "expert_feed_forward_length", layers),
        "n_routed_experts": keys.whole("expert_count"),
        "num_experts_per_tok": keys.whole("expert_used_count"),
        "n_shared_experts": 1,
        "routed_scaling_factor": keys.real("expert_weights_scale"),
        "swiglu_limit": limits[0] if limits else None,
        "scoring_func": "sqrtsoftplus",
        "q_lora_rank": keys.whole("attention.q_lora_rank"),
        "sliding_window": keys.whole("attention.sliding_window"),
        "o_groups": keys.whole("attention.output_group_count"),
        "o_lora_rank": keys.whole("attention.output_lora_rank"),
        "compress_ratios": keys.value("attention.compress_ratios"),
        "compress_rope_theta": keys.real("attention.compress_rope_freq_base"),
        "rope_theta": keys.real("rope.freq_base"),
        "qk_rope_head_dim": keys.whole("rope.dimension_count"),
        "index_n_heads": keys.whole("attention.indexer.head_count"),
        "index_head_dim": keys.whole("attention.indexer.key_length"),
        "index_topk": keys.whole("attention.indexer.top_k"),
        "hc_mult": keys.whole("hyper_connection.count"),
        "hc_sinkhorn_iters": keys.whole("hyper_connection.sinkhorn_iterations"),
        "hc_eps": keys.real("hyper_connection.epsilon"),
        "num_hash_layers": keys.value("hash_layer_count"),
    }


def _same(keys: GGUFKeys, key: str, count: int) -> Any:
    """A number above 0 that is stored once, or for each of at least `count` layers, all of them the same."""
    value = keys.value(key)
    if not isinstance(value, list):
        return keys.real(key) if isinstance(value, float) else keys.whole(key)
    if len(value) < count or any(isinstance(one, bool) or not isinstance(one, (int, float)) or not one > 0 for one in value[:count]):
        raise keys.bad(key, f"a list of {count} numbers above 0")
    if len({*value[:count]}) > 1:
        raise keys.unsupported(key, "the same in every layer")
    return value[0]


# model_type -> what it adds to, or corrects in, the numbers that every decoder has
_READERS: dict[str, Callable[[GGUFKeys, dict[str, Any]], None]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma3_text": _gemma3,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "deepseek_v4": _deepseek_v4,
}


def _vocab_size(file: GGUFFile, architecture: str) -> int:
    if embedding := file.tensors.get("token_embd.weight"):
        if len(embedding.shape) != 2:
            raise ConfigurationError(f"{file.path} has a token_embd.weight that is no matrix: download or convert it again.", param="model")
        return int(embedding.shape[1])
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    listed = len(tokens) if isinstance(tokens, list) else 0
    return int(_number(file, f"{architecture}.vocab_size", int, listed) or 0)


def _rope_scaling(keys: GGUFKeys, context: int) -> Mapping[str, Any] | None:
    kind = keys.value("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise keys.unsupported("rope.scaling.type", "none, linear or yarn")
    # Files from before rope.scaling.* have only a linear factor. Some writers put 0 where nothing is scaled.
    factor_key = "rope.scaling.factor" if keys.value("rope.scaling.factor") is not None else "rope.scale_linear"
    factor = keys.real(factor_key, 1.0) if keys.value(factor_key) else 1.0
    original = keys.whole("rope.scaling.original_context_length", context)
    bounds = {name: keys.real(key) for name in ("beta_fast", "beta_slow") if keys.value(key := f"rope.scaling.yarn_{name}") is not None}
    magnitude = keys.real("rope.scaling.attn_factor", 1.0)
    keys.only("rope.scaling.yarn_attn_factor", 1.0)
    keys.only("rope.scaling.yarn_ext_factor", 1.0, -1.0)
    keys.only("rope.scaling.yarn_log_multiplier", 0.0)
    keys.value("rope.scaling.finetuned")  # says where the factor came from
    if kind != "yarn" and magnitude != 1.0:
        raise keys.unsupported("rope.scaling.attn_factor", "for yarn alone")
    if "rope_freqs.weight" in keys.file.tensors:
        # Llama 3.1 files carry the result of their scaling, a divisor for each frequency, in place of its parameters.
        if kind == "yarn" or factor != 1.0:
            raise keys.unsupported("rope.scaling.type", "none together with the tensor rope_freqs.weight")
        return {"rope_type": "frequency_factors", "tensor": "rope_freqs.weight"}
    if kind == "none" or factor == 1.0:
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **bounds}
    if magnitude != 1.0:  # GGUF's multiplies the magnitude that YaRN has for its scale, config.json's replaces it
        scaling["attention_factor"] = magnitude * (0.1 * math.log(factor) + 1.0)
    return scaling


def _number(file: GGUFFile, key: str, kind: type, default: Any) -> Any:
    value = file.metadata.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float) if kind is float else int):
        raise bad_value(file, key, "a number" if kind is float else "a whole number")
    return kind(value)
