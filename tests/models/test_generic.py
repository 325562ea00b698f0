"""The way through transformers' modules: what is refused and why, that weights are taken strictly, dtypes, windows of masks, and the check after loading.

test_against_transformers.py compares the architectures that it runs.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from transformers.models.olmo2.modeling_olmo2 import Olmo2MLP

from pocketllm.backends.select import TORCH_ARCHITECTURES, explain
from pocketllm.checkpoint import Checkpoint, GenerationDefaults, TensorInfo, open_checkpoint
from pocketllm.cli.inspect import describe
from pocketllm.errors import ConfigurationError, PocketLLMError, UnsupportedFeatureError
from pocketllm.torch_engine.layers.linear import has_bfloat16_units
from pocketllm.torch_engine.models.generic_layout import _window_of, read_layout
from tests.models.plane import backend_of, check_close, expected_logits, generate, logits_of, opened
from tests.models.tiny import CONTEXT, PROMPTS, VOCAB_SIZE, WINDOW, Variant

OLMO2 = Variant("olmo2", "olmo2")
FEW = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": CONTEXT}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 32}
GEMMA4 = {"num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 4}


def config_of(path: Path, architecture: str, **keys: Any) -> Checkpoint:
    """A checkpoint whose weights nobody reads: a config.json of transformers' own, and one tensor's header."""
    AutoConfig.for_model(architecture, **keys).save_pretrained(path)
    save_file({"w": torch.zeros(1)}, path / "model.safetensors")
    return open_checkpoint(path)


def change(path: Path, changes: dict[str, Any]) -> None:
    config = json.loads((path / "config.json").read_text()) | changes
    (path / "config.json").write_text(json.dumps(config))


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mamba", FEW, "keep a recurrent state"),
    ("falcon_mamba", FEW, "keep a recurrent state"),
    ("jamba", FEW, "keep a recurrent state"),
    ("recurrent_gemma", FEW, "keep a recurrent state"),
    ("lfm2", {**FEW, "layer_types": ["conv", "full_attention"]}, "layers of the type 'conv'"),
    ("llama4_text", FEW, "layers of the type 'chunked_attention'"),
    ("t5", {}, "an encoder-decoder model"),
    ("bart", {}, "an encoder-decoder model"),
    ("whisper", {}, "an encoder-decoder model"),
    ("vit", {}, "no causal language model"),
    ("bert", FEW, "neither causal nor a sliding window"),
    ("bloom", {**FEW, "n_layer": 2, "n_head": 4}, "positions can't be passed"),
    ("mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT}, "positions can't be passed"),
    ("xglm", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "max_position_embeddings": CONTEXT}, "is not plain attention"),
    ("gemma2", {**FEW, "num_key_value_heads": 2, "head_dim": 16}, "a soft cap on attention scores"),
    ("gpt_oss", {**FEW, **EXPERTS}, "attention sinks"),
    ("doge", {**FEW, "num_key_value_heads": 2}, "a bias on its attention scores"),
    ("diffllama", {**FEW, "num_key_value_heads": 2}, "compute attention 4 times with 2 sets of weights"),
    ("gemma4_text", {**FEW, **GEMMA4}, "keys and values of different shapes"),
    ("deepseek_v32", {**FEW, **LATENT}, "layers of the type 'indexed_attention'"),
    ("qwen9", {}, "does not know it"),
]


@pytest.mark.parametrize(("architecture", "keys", "words"), REFUSED, ids=[architecture for architecture, _, _ in REFUSED])
def test_what_is_not_plain_attention_is_refused_before_a_weight_is_read(architecture: str, keys: dict[str, Any], words: str, tmp_path: Path) -> None:
    if architecture == "qwen9":
        checkpoint = config_of(tmp_path, "olmo2", **FEW)
        change(tmp_path, {"model_type": "qwen9"})
        checkpoint = open_checkpoint(tmp_path)
    else:
        checkpoint = config_of(tmp_path, architecture, **keys)
    verdict = explain(checkpoint)[0]
    assert not verdict.runs
    assert words in verdict.reason
    assert verdict.reason.startswith(f"the architecture {architecture!r} is not supported, since ")
    assert "\n" not in verdict.reason
    with pytest.raises(UnsupportedFeatureError) as caught:
        backend_of(tmp_path)
    assert words in str(caught.value)
    assert caught.value.param == "model"


def test_inspect_says_by_which_way_it_runs(tmp_path: Path) -> None:
    OLMO2.save(tmp_path)
    assert describe(open_checkpoint(tmp_path))["planes"][0] == {
        "backend": "torch",
        "runs": True,
        "reason": "it runs olmo2 from safetensors through transformers' modules (generic path, slower)",
    }


def test_a_config_that_transformers_does_not_take(tmp_path: Path) -> None:
    config_of(tmp_path, "olmo2", **FEW)
    change(tmp_path, {"num_attention_heads": 7, "hidden_act": "no such function"})
    reason = explain(open_checkpoint(tmp_path))[0].reason
    assert "the architecture 'olmo2' is not supported, since " in reason
    assert "\n" not in reason


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings"])
def test_a_config_that_lacks_what_callers_ask_for(key: str, tmp_path: Path) -> None:
    config_of(tmp_path, "olmo2", **FEW)
    config = json.loads((tmp_path / "config.json").read_text())
    del config[key]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"since its config.json lacks the key {key}; supported are " in explain(open_checkpoint(tmp_path))[0].reason


@pytest.mark.parametrize(
    ("version", "words"), [(None, "once they are installed: pip install 'pocketllm[generic]'"), ("4.57.1", "and 4.57.1 is installed: pip")]
)
def test_without_transformers(version: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = importlib.metadata.version

    def other(name: str) -> str:
        if name != "transformers":
            return installed(name)
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    checkpoint = config_of(tmp_path, "olmo2", **FEW)
    monkeypatch.setattr(importlib.metadata, "version", other)
    reason = explain(checkpoint)[0].reason
    assert reason.startswith(f"the architecture 'olmo2' is not supported; supported are {', '.join(sorted(TORCH_ARCHITECTURES))}")
    assert words in reason


def test_a_gguf_does_not_go_this_way(tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, "gguf", "m", "olmo2", {}, 64, GenerationDefaults(), (TensorInfo("w", (2, 32), "Q4_0", 36, tmp_path),))
    assert explain(checkpoint)[0].reason.endswith("and others through transformers' modules from safetensors")


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16], ids=str)
def test_16_bit_shards(stored: torch.dtype, tmp_path: Path) -> None:
    oracle = OLMO2.save(tmp_path, stored, shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check_close(logits_of(tmp_path, PROMPTS[2:3], 0)[0], expected_logits(oracle, PROMPTS[2]))


@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [("auto", 5e-3), pytest.param("bfloat16", 0.15, marks=pytest.mark.skipif(not has_bfloat16_units(), reason="this processor has no bfloat16 units"))],
)
@pytest.mark.parametrize("variant", [OLMO2, Variant("gpt2", "gpt2", {"hidden_size": 64}, biases=0.1)], ids=lambda variant: variant.name)
def test_other_compute_dtypes_are_close(variant: Variant, dtype: str, tolerance: float, tmp_path: Path) -> None:
    oracle = variant.save(tmp_path)
    for found, prompt in zip(logits_of(tmp_path, PROMPTS, 30, dtype), PROMPTS, strict=True):
        check_close(found, expected_logits(oracle, prompt), tolerance)


def test_float16_on_a_cpu_is_refused(tmp_path: Path) -> None:
    OLMO2.save(tmp_path)
    with pytest.raises(UnsupportedFeatureError) as caught:
        logits_of(tmp_path, PROMPTS[:1], 0, "float16")
    assert caught.value.param == "dtype"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "lacks the tensor model.layers.1.mlp.up_proj.weight"),
        (lambda tensors: tensors.update({"model.extra.weight": torch.zeros(3)}), "no place for, model.extra.weight"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.zeros(5)}), "do not suit its config.json"),
        (lambda tensors: tensors.update({"model.norm.weight_scale_inv": torch.zeros(5)}), "model.norm.weight_scale_inv"),
    ],
)
def test_weights_are_taken_strictly(edit: Callable[[dict[str, torch.Tensor]], object], words: str, tmp_path: Path) -> None:
    OLMO2.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    edit(tensors)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError) as caught:
        logits_of(tmp_path, PROMPTS[:1], 0)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """As they were published, before transformers fused them: its own conversion is applied."""
    oracle = Variant("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}).save(tmp_path)
    assert "model.layers.0.block_sparse_moe.experts.3.w1.weight" in load_file(tmp_path / "model.safetensors")
    check_close(logits_of(tmp_path, PROMPTS[3:4], 0)[0], expected_logits(oracle, PROMPTS[3]))


def test_longrope_runs_where_it_turns_one_way(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0, 1.5, 2.0, 2.5] * 2, "long_factor": [2.0, 4.0, 8.0, 9.0] * 2}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128, **factors}
    oracle = Variant("phi3", "phi3", {"rope_parameters": rope, "original_max_position_embeddings": 128, "hidden_size": 64}).save(tmp_path)
    check_close(logits_of(tmp_path, PROMPTS[4:], 17, max_model_len=128)[0], expected_logits(oracle, PROMPTS[4]))
    with pytest.raises(UnsupportedFeatureError, match="Set max_model_len to 128 or less") as caught:
        logits_of(tmp_path, PROMPTS[4:], 0)
    assert caught.value.param == "max_model_len"


def test_a_module_that_mixes_tokens_is_found_when_the_model_has_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    OLMO2.save(tmp_path)
    forward = Olmo2MLP.forward
    monkeypatch.setattr(Olmo2MLP, "forward", lambda module, x: forward(module, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]))  # sees the token before
    with pytest.raises(UnsupportedFeatureError, match="depend on what it is computed together with"):
        logits_of(tmp_path, PROMPTS[:1], 0)


def test_what_the_plane_reports(tmp_path: Path) -> None:
    oracle = OLMO2.save(tmp_path)
    with opened(tmp_path) as backend:
        details = backend.capabilities.details
        assert details["native_kernels"] == "not in use: the model runs through transformers' modules"
        assert details["weight_bytes"] == sum(parameter.nbytes for parameter in oracle.parameters())
        assert backend.capabilities.vocab_size == VOCAB_SIZE
        seeds = [generate(backend, PROMPTS[1:2], 8) for _ in range(2)]
    assert seeds[0] == seeds[1]


def test_a_layout(tmp_path: Path) -> None:
    layout = read_layout(config_of(tmp_path, "cohere2", **{**FEW, "num_key_value_heads": 2, "sliding_window": WINDOW, "head_dim": 16}))
    assert layout.decoder == "model"
    assert layout.attentions == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert layout.windows == (WINDOW, WINDOW)
    assert (layout.num_kv_heads, layout.head_dim, layout.vocab_size) == (2, 16, VOCAB_SIZE)


def _causal(batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return key <= query


@pytest.mark.parametrize(
    ("function", "window"),
    [
        (_causal, None),
        (lambda b, h, q, k: (k <= q) & (k > q - 9), 9),
        (lambda b, h, q, k: (k <= q) & (k > q - 500), None),
        (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), "a mask that is neither causal nor a sliding window"),
        (lambda b, h, q, k: k == k, "a mask that is neither causal nor a sliding window"),
        (lambda b, h, q, k: (k <= q) & ((k > q - 9) | (k < 2)), "a mask that is neither causal nor a sliding window"),
        (lambda b, h, q, k: k.no_such_thing(), "a mask that can't be examined ('Tensor' object has no attribute 'no_such_thing')"),
    ],
)
def test_the_window_of_a_mask(function: Any, window: int | str | None) -> None:
    assert _window_of(function, 200) == window


def test_errors_are_of_this_package(tmp_path: Path) -> None:
    config_of(tmp_path, "olmo2", **FEW)
    with pytest.raises(PocketLLMError, match="lacks the tensor"):
        logits_of(tmp_path, PROMPTS[:1], 0)
