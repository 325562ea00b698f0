"""GGUF metadata of each architecture under config.json's names, and what of it is refused."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.errors import ConfigurationError, PocketLLMError, UnsupportedFeatureError

DECODER = {
    "block_count": 12,
    "context_length": 4096,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 0.5,
    "rope.freq_base": 5e5,
}
MORE = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"attention.key_length": 32, "attention.value_length": 32},
    "qwen3moe": {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "expert_count": 8,
        "expert_used_count": 2,
        "expert_feed_forward_length": 48,
    },
    "gemma3": {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 512},
    "qwen35": {
        "attention.key_length": 32,
        "attention.value_length": 32,
        "rope.dimension_count": 8,
        "rope.dimension_sections": [1, 1, 1, 0],
        "full_attention_interval": 4,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 16,
        "ssm.group_count": 2,
        "ssm.time_step_rank": 4,
        "ssm.inner_size": 96,
    },
}


@pytest.fixture
def config_of(write_gguf):
    """config_of(architecture, tensors=None, **changes): the config of a file with those keys; `__` stands for `.`, None leaves a key out."""

    def read(architecture, tensors=None, **changes):
        keys = {**DECODER, **MORE[architecture], **{key.replace("__", "."): value for key, value in changes.items()}}
        named = {f"{architecture}.{key}": value for key, value in keys.items()}
        return dict(open_checkpoint(write_gguf(architecture=architecture, tensors=tensors, **named)).config)

    return read


def test_numbers_that_every_decoder_has(config_of):
    for architecture in ("llama", "qwen2", "qwen3", "qwen3moe", "gemma3", "qwen35"):
        config = config_of(architecture)
        head_dim = 32 if "attention.key_length" in MORE[architecture] else 16
        expected = {
            "hidden_size": 64,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": head_dim,
            "rms_norm_eps": 0.5,
            "rope_theta": 5e5,
            "rope_scaling": None,
            "max_position_embeddings": 4096,
            "vocab_size": 262,
            "intermediate_size": 96,
            "tie_word_embeddings": True,
            "hidden_act": "gelu_pytorch_tanh" if architecture == "gemma3" else "silu",
        }
        assert {name: config[name] for name in expected} == expected


def test_an_output_matrix_means_that_embeddings_are_not_tied(config_of):
    tensors = {"token_embd.weight": np.ones((262, 64), np.float32), "output.weight": np.ones((262, 64), np.float32)}
    assert config_of("qwen2", tensors)["tie_word_embeddings"] is False


def test_model_types_and_kinds_of_layers(config_of):
    qwen2, qwen3 = config_of("qwen2"), config_of("qwen3")
    assert (qwen2["model_type"], qwen3["model_type"]) == ("qwen2", "qwen3")
    assert qwen2["layer_types"] == qwen3["layer_types"] == ["full_attention"] * 12
    assert (qwen3["sliding_window"], qwen3["use_sliding_window"], qwen3["attention_bias"]) == (None, False, False)


def test_qwen3_moe(config_of):
    config = config_of("qwen3moe", feed_forward_length=None)
    assert config["model_type"] == "qwen3_moe"
    assert (config["num_experts"], config["num_experts_per_tok"], config["moe_intermediate_size"], config["norm_topk_prob"]) == (8, 2, 48, True)
    assert (config["decoder_sparse_step"], config["mlp_only_layers"]) == (1, [])


def test_gemma3(config_of):
    config = config_of("gemma3")
    assert config["model_type"] == "gemma3_text"
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 2
    assert (config["sliding_window"], config["rope_local_base_freq"], config["query_pre_attn_scalar"]) == (512, 10000.0, 32)
    assert (config["final_logit_softcapping"], config["attn_logit_softcapping"], config["use_bidirectional_attention"]) == (None, None, False)
    other = config_of("gemma3", final_logit_softcapping=30.0, rope__freq_base_swa=20000.0, attention__sliding_window_pattern=2)
    assert (other["final_logit_softcapping"], other["rope_local_base_freq"]) == (30.0, 20000.0)
    assert other["layer_types"] == ["sliding_attention", "full_attention"] * 6
    listed = config_of("gemma3", attention__sliding_window_pattern=[True, False, False] * 4)
    assert listed["layer_types"] == ["sliding_attention", "full_attention", "full_attention"] * 4
    scaled = config_of("gemma3", rope__scaling__type="linear", rope__scaling__factor=8.0)
    assert scaled["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_gemma3_without_a_window_attends_to_all(config_of):
    config = config_of("gemma3", attention__sliding_window=None)
    assert (config["sliding_window"], set(config["layer_types"])) == (None, {"full_attention"})


def test_the_largest_gemma3_has_a_scale_of_its_own(config_of):
    assert config_of("gemma3", block_count=62)["query_pre_attn_scalar"] == 16


def test_qwen3_5(config_of):
    config = config_of("qwen35")
    assert config["model_type"] == "qwen3_5_text"
    assert config["layer_types"] == (["linear_attention"] * 3 + ["full_attention"]) * 3
    assert config["partial_rotary_factor"] == 0.25
    linear = {name: value for name, value in config.items() if name.startswith("linear_")}
    assert linear == {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    }
    ahead = config_of("qwen35", nextn_predict_layers=1, full_attention_interval=None, attention__recurrent_layers=[True] * 10 + [False] * 2)
    assert (ahead["num_hidden_layers"], ahead["layer_types"]) == (11, ["linear_attention"] * 10 + ["full_attention"])


def test_rope_scaling(config_of):
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 1024}
    plain = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
    assert config_of("qwen2", **yarn)["rope_scaling"] == plain
    assert config_of("qwen2", **yarn, rope__scaling__yarn_beta_fast=16.0)["rope_scaling"] == {**plain, "beta_fast": 16.0}
    louder = config_of("qwen2", **yarn, rope__scaling__attn_factor=2.0)["rope_scaling"]
    assert louder["attention_factor"] == pytest.approx(2.0 * (0.1 * np.log(4.0) + 1))
    assert config_of("qwen2", rope__scale_linear=2.0)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config_of("qwen2", rope__scaling__factor=2.0)["rope_scaling"] == {"rope_type": "linear", "factor": 2.0}
    assert config_of("qwen2", rope__scaling__type="none", rope__scaling__factor=0.0)["rope_scaling"] is None
    tensors = {"rope_freqs.weight": np.ones(8, np.float32)}
    assert config_of("llama", tensors)["rope_scaling"] == {"rope_type": "frequency_factors", "tensor": "rope_freqs.weight"}


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("qwen2", "attention.value_length", 8),
        ("qwen2", "attention.sliding_window", 128),
        ("qwen2", "attention.causal", False),
        ("qwen2", "expert_count", 4),
        ("llama", "attention.scale", 0.5),
        ("llama", "logit_scale", 2.0),
        ("llama", "residual_scale", 2.0),
        ("llama", "attention.temperature_scale", 0.1),
        ("qwen2", "rope.scaling.type", "longrope"),
        ("qwen2", "rope.scaling.attn_factor", 2.0),
        ("qwen2", "rope.scaling.yarn_log_multiplier", 0.1),
        ("qwen3moe", "expert_shared_count", 1),
        ("qwen3moe", "expert_weights_norm", False),
        ("qwen3moe", "expert_group_count", 2),
        ("gemma3", "attn_logit_softcapping", 50.0),
        ("gemma3", "attention.key_length_swa", 64),
    ],
)
def test_a_variant_that_no_model_computes_is_refused_by_key_and_value(config_of, architecture, key, value):
    with pytest.raises(UnsupportedFeatureError, match=re.escape(f"{architecture}.{key} = {value!r}"[:60])) as caught:
        config_of(architecture, **{key.replace(".", "__"): np.float32(value).item() if isinstance(value, float) else value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("architecture", "key", "value"),
    [
        ("qwen2", "rope.freq_base", None),
        ("qwen3moe", "expert_count", None),
        ("qwen3moe", "expert_feed_forward_length", None),
        ("qwen3moe", "expert_used_count", 9),
        ("gemma3", "attention.sliding_window_pattern", "all"),
        ("gemma3", "attention.sliding_window_pattern", [True]),
        ("gemma3", "attention.sliding_window", "all"),
        ("qwen35", "ssm.inner_size", 97),
        ("qwen35", "ssm.state_size", None),
        ("qwen35", "nextn_predict_layers", 12),
        ("qwen35", "attention.recurrent_layers", [True]),
        ("qwen35", "full_attention_interval", None),
        ("llama", "rope.scaling.factor", -2.0),
    ],
)
def test_a_key_that_is_missing_or_makes_no_sense_is_named(config_of, architecture, key, value):
    with pytest.raises(ConfigurationError, match=re.escape(f"{architecture}.{key}")):
        config_of(architecture, **{key.replace(".", "__"): value})


def test_a_token_that_ends_a_turn_ends_an_answer_though_the_file_names_only_eos(write_gguf):
    tokens = ["<eos>", "<end_of_turn>", "<|im_end|>", *"abc"]
    path = write_gguf(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=[3, 3, 1, 1, 1, 1], tokenizer__ggml__eos_token_id=0)
    assert open_checkpoint(path).generation_defaults.eos_token_ids == (0, 1)
    path = write_gguf(tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=[3] * 6, tokenizer__ggml__eos_token_id=0, tokenizer__ggml__eot_token_id=2)
    assert open_checkpoint(path).generation_defaults.eos_token_ids == (0, 2)


def test_keys_that_compute_nothing_are_left_alone(config_of):
    config = config_of("gemma3", mm__tokens_per_image=256, vocab_size=262, attention__max_alibi_bias=0.0, tensor_data_layout="x")
    assert config["vocab_size"] == 262


def test_frequency_factors_beside_a_scaling_are_refused(config_of):
    with pytest.raises(PocketLLMError, match=r"rope\.scaling\.type"):
        config_of("llama", {"rope_freqs.weight": np.ones(8, np.float32)}, rope__scaling__type="linear", rope__scaling__factor=2.0)
