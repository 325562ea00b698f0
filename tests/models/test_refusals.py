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


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"hidden_act": "relu"}, "hidden_act = 'relu'"),
    ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
    ("llama", {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}, "'rope_type': 'longrope'"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "twist": 3}}, "'twist': 3"),
    ("llama", {"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor = 'two'"),
    ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor = None"),
    ("mistral", {"sliding_window": ...}, "lacks the key sliding_window"),
    ("mistral", {"sliding_window": 0}, "sliding_window = 0"),
    ("mistral", {"rope_parameters": ...}, "lacks the key rope_theta"),
    ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types = "),
    ("qwen2", {"num_key_value_heads": ...}, "lacks the key num_key_value_heads"),
    ("qwen2", {"layer_types": ["full_attention"]}, "3 layers, and layer_types does not name as many"),
    ("qwen2", {"layer_types": ["full_attention", "linear_attention", "full_attention"]}, "a layer of the type 'linear_attention'"),
    ("qwen2", {"layer_types": ["sliding_attention"] * 3}, "layers with sliding attention and no sliding_window"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "layer_types": ..., "max_window_layers": ...}, "max_window_layers = None"),
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


def test_keys_of_transformers_4(tmp_path: Path) -> None:
    oracle = PLAIN["llama"].save(tmp_path)
    change(tmp_path, rope_parameters=..., rope_theta=10000.0, rope_scaling=None, dtype=..., torch_dtype="float32")
    check_close(logits_of(tmp_path, PROMPTS[1:2], 0)[0], expected_logits(oracle, PROMPTS[1]))
