"""A small random llama on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "max_position_embeddings": 64,
    "vocab_size": 50,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
}


def tiny_tensors() -> dict[str, torch.Tensor]:
    """Weights of CONFIG by Hugging Face name, float32, always the same."""
    generator = torch.Generator().manual_seed(7)

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    tensors = {"model.embed_tokens.weight": matrix(50, 32) * 6, "lm_head.weight": matrix(50, 32), "model.norm.weight": torch.ones(32)}
    for layer in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, rows, columns in (
            ("self_attn.q_proj", 32, 32),
            ("self_attn.k_proj", 16, 32),
            ("self_attn.v_proj", 16, 32),
            ("self_attn.o_proj", 32, 32),
            ("mlp.gate_proj", 64, 32),
            ("mlp.up_proj", 64, 32),
            ("mlp.down_proj", 32, 64),
        ):
            tensors[f"{prefix}{name}.weight"] = matrix(rows, columns)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = 1 + matrix(32) / 4
    return tensors


def write_tiny_llama(directory: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A safetensors checkpoint with `tensors`."""
    (directory / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    save_file(tensors, directory / "model.safetensors")
    return directory
