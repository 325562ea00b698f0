"""The architectures, each in its plain form and with what its checkpoints vary."""

from __future__ import annotations

from typing import Any

from tests.models.tiny import WINDOW, Variant


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **numbers}}


def gemma(**keys: Any) -> dict[str, Any]:
    """Sizes of a gemma3 with both kinds of layers, whose scale is not that of its heads."""
    return {"sliding_window": WINDOW, "query_pre_attn_scalar": 24, "tie_word_embeddings": True, **keys}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 24}

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
    Variant("qwen3", "qwen3", is_plain=True),
    Variant(
        "qwen3-biases-windows",
        "qwen3",
        {"attention_bias": True, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    Variant("gemma3", "gemma3_text", gemma(layer_types=["sliding_attention", "full_attention", "sliding_attention"]), is_plain=True),
    Variant(
        "gemma3-untied-scaled-capped",
        "gemma3_text",
        gemma(
            tie_word_embeddings=False,
            final_logit_softcapping=2.0,
            attention_bias=True,
            layer_types=["full_attention", "sliding_attention", "sliding_attention"],
            rope_parameters={
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
    Variant("qwen3-moe", "qwen3_moe", {**EXPERTS, "norm_topk_prob": True}, is_plain=True),
    Variant(
        "qwen3-moe-mixed",
        "qwen3_moe",
        {**EXPERTS, "decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3], "use_sliding_window": True, "sliding_window": WINDOW},
    ),
]
