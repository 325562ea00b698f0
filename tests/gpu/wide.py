"""Models of few and narrow layers whose heads have the sizes of public checkpoints, which kernels have paths of their own for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.models.tiny import Variant
from tests.models.tiny_qwen3_5 import write_tiny, write_tiny_moe

CONTEXT = 2048
VOCAB_SIZE = 640
LENGTHS = (5, 64, 129, 700, 1500)  # of one block and many, of one chunk of linear attention and many, around their bounds

_SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": CONTEXT}
_HYBRID: dict[str, Any] = {
    **_SIZES,
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_DENSE: dict[str, Any] = {**_SIZES, "num_hidden_layers": 2, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}

NAMES = ("qwen3_5", "qwen3_5_moe", "qwen3", "llama", "gemma3")


def write_wide(name: str, directory: Path) -> Any:
    """The checkpoint `name`. Returns the same model in transformers."""
    if name == "qwen3_5":
        return write_tiny(directory, **_HYBRID)
    if name == "qwen3_5_moe":
        return write_tiny_moe(directory, **_HYBRID, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=128, shared_expert_intermediate_size=128)
    if name == "gemma3":
        layers = ["sliding_attention", "full_attention"]
        keys = {**_DENSE, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "query_pre_attn_scalar": 256}
        return Variant(name, "gemma3_text", {**keys, "layer_types": layers, "tie_word_embeddings": True}).save(directory)
    return Variant(name, name, _DENSE).save(directory)


def wide_prompts() -> list[list[int]]:
    return [torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in LENGTHS]
