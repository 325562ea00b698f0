"""The architectures, each in its plain form and with what its checkpoints vary."""

from __future__ import annotations

from typing import Any

from tests.models.tiny import WINDOW, Variant


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)

VARIANTS = [
    Variant("llama", "llama", is_plain=True),
    Variant("llama-biases", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Variant("llama-rope-llama3", "llama", LLAMA3),
    Variant("llama-rope-linear", "llama", rope("linear", factor=3.0)),
    Variant("llama-rope-dynamic", "llama", rope("dynamic", factor=3.0)),
    Variant("llama-rope-yarn", "llama", rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    Variant("llama-rope-yarn-mscale", "llama", rope("yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.5, truncate=False)),
    Variant("mistral", "mistral", {"sliding_window": None}, is_plain=True),
    Variant("mistral-window", "mistral", {"sliding_window": WINDOW}),
    Variant("qwen2", "qwen2", is_plain=True),
    Variant("qwen2-windows", "qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1, "tie_word_embeddings": True}),
]
