"""What a checkpoint of a known architecture may ask for and no model here computes: refused by its key and value, before a weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pocketllm.errors import PocketLLMError, UnsupportedFeatureError
from tests.models.plane import check_close, expected_logits, logits_of
from tests.models.tiny import PROMPTS
from tests.models.variants import VARIANTS

PLAIN = {variant.architecture: variant for variant in VARIANTS if variant.is_plain}


def change(path: Path, **changes: Any) -> None:
    """Change keys of config.json, and delete those that become ..."""
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


LOCAL_LINEAR = {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}}
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'rope_type': 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 3}}, "'twist': 3"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor = 'two'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor = None"),
    ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "beta_fast": "x"}}, "beta_fast = 'x'"),
    ("llama", {"attention_bias": "yes"}, "attention_bias = 'yes'"),
    ("mistral", {"sliding_window": ...}, "lacks the key sliding_window"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    ("mistral", {"rope_parameters": ...}, "lacks the key rope_theta"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types = "),
    ("qwen2", {"num_key_value_heads": ...}, "lacks the key num_key_value_heads"),
    ("qwen2", {"layer_types": ["full_attention"]}, "3 layers, and layer_types does not name as many"),
    ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "a layer of the type 'linear_attention'"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layers with sliding attention and no sliding_window"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ..., "max_window_layers": ...}, "lacks the key max_window_layers"),
    ("qwen3_moe", {"num_local_experts": ...}, "lacks the key num_experts"),
    ("qwen3_moe", {"num_local_experts": 2}, "num_experts_per_tok = 3 of 2 experts"),
    ("qwen3_moe", {"mlp_only_layers": [0.5]}, "mlp_only_layers = [0.5]"),
    ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step = 0"),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention = True"),
    ("gemma3_text", {"query_pre_attn_scalar": ...}, "lacks the key query_pre_attn_scalar"),
    ("gemma3_text", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0"),
    ("gemma3_text", {"final_logit_softcapping": "x"}, "final_logit_softcapping = 'x'"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, "lacks the key rope_local_base_freq"),
    ("gemma3_text", {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": "x"}}}, "rope_local_base_freq = 'x'"),
    ("gemma3_text", LOCAL_LINEAR, "rope_local_scaling = {'rope_type': 'linear'"),
    ("gemma3_text", {"layer_types": ..., "_sliding_window_pattern": ...}, "lacks the key layer_types"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": ...}, "lacks the key sliding_window"),
    ("qwen3", {"head_dim": ...}, "lacks the key head_dim"),
    ("qwen3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
]


@pytest.mark.parametrize(("architecture", "changes", "words"), REFUSED, ids=str)
def test_a_variant_that_is_not_computed(architecture: str, changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    PLAIN[architecture].save(tmp_path)
    change(tmp_path, **changes)
    with pytest.raises(PocketLLMError) as caught:
        logits_of(tmp_path, PROMPTS[:1], 0)
    message = str(caught.value)
    assert words in message
    assert str(tmp_path) in message
    assert "\n" not in message


def test_a_refusal_names_the_architecture(tmp_path: Path) -> None:
    PLAIN["llama"].save(tmp_path)
    change(tmp_path, hidden_act="relu")
    with pytest.raises(UnsupportedFeatureError, match="not supported for llama yet"):
        logits_of(tmp_path, PROMPTS[:1], 0)


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_that_is_stored_counts_where_it_differs(equal: bool, tmp_path: Path) -> None:
    oracle = PLAIN["llama"].save(tmp_path)
    tensors = dict(oracle.state_dict())
    if equal:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        oracle.lm_head.weight = torch.nn.Parameter(tensors["lm_head.weight"])
    save_file(tensors, tmp_path / "model.safetensors")
    change(tmp_path, tie_word_embeddings=True)
    reread = type(oracle).from_pretrained(tmp_path, dtype=torch.float32)
    expected = expected_logits(oracle, PROMPTS[1])
    check_close(expected_logits(reread, PROMPTS[1]), expected)
    check_close(logits_of(tmp_path, PROMPTS[1:2], 0)[0], expected)


def test_rotary_frequencies_of_old_files_are_passed_over(tmp_path: Path) -> None:
    oracle = PLAIN["llama"].save(tmp_path)
    tensors = {**oracle.state_dict(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    check_close(logits_of(tmp_path, PROMPTS[1:2], 0)[0], expected_logits(oracle, PROMPTS[1]))


def test_windows_without_layer_types(tmp_path: Path) -> None:
    variant = next(variant for variant in VARIANTS if variant.name == "qwen2-windows")
    oracle = variant.save(tmp_path)
    change(tmp_path, layer_types=...)
    check_close(logits_of(tmp_path, PROMPTS[4:], 0)[0], expected_logits(oracle, PROMPTS[4]))


@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_read_one_by_one_or_fused(fused: bool, tmp_path: Path) -> None:
    oracle = PLAIN["qwen3_moe"].save(tmp_path)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in oracle.state_dict().items():
        if fused or tensor.dim() < 3:
            tensors[name] = tensor
        elif name.endswith("gate_up_proj"):
            for place, both in enumerate(tensor):
                gate, up = both.chunk(2)
                prefix = name.replace("gate_up_proj", str(place))
                tensors |= {f"{prefix}.gate_proj.weight": gate.clone(), f"{prefix}.up_proj.weight": up.clone()}
        else:
            tensors |= {f"{name.replace('down_proj', str(place))}.down_proj.weight": one.clone() for place, one in enumerate(tensor)}
    save_file(tensors, tmp_path / "model.safetensors")
    check_close(logits_of(tmp_path, PROMPTS[4:], 0)[0], expected_logits(oracle, PROMPTS[4]))


def test_gemma_keys_of_transformers_4(tmp_path: Path) -> None:
    oracle = PLAIN["gemma3_text"].save(tmp_path)
    changes: dict[str, Any] = dict.fromkeys(
        ("rope_parameters", "layer_types", "_sliding_window_pattern", "tie_word_embeddings", "final_logit_softcapping"), ...
    )
    change(tmp_path, **changes, rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling={"rope_type": "linear", "factor": 8.0}, sliding_window_pattern=2)
    reread = type(oracle).from_pretrained(tmp_path, dtype=torch.float32)
    expected = expected_logits(reread, PROMPTS[4])
    assert not torch.allclose(expected, expected_logits(oracle, PROMPTS[4])), "the scaling counts"
    check_close(logits_of(tmp_path, PROMPTS[4:], 0)[0], expected)


def test_keys_of_transformers_4(tmp_path: Path) -> None:
    oracle = PLAIN["llama"].save(tmp_path)
    change(tmp_path, rope_parameters=..., rope_theta=10000.0, rope_scaling=None, dtype=..., torch_dtype="float32")
    check_close(logits_of(tmp_path, PROMPTS[1:2], 0)[0], expected_logits(oracle, PROMPTS[1]))
