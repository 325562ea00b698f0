"""Architectures that run through transformers' modules: what differs among them in positions, norms, windows, heads, experts and scales."""

from __future__ import annotations

from typing import Any

from tests.models.tiny import WINDOW, Variant

WIDE: dict[str, Any] = {"hidden_size": 64, "head_dim": 16}  # for those whose heads share out the hidden size
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
}
ROUTED: dict[str, Any] = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1}

GENERIC_VARIANTS = [
    Variant("gpt2", "gpt2", {"hidden_size": 64}, biases=0.1),
    Variant("gptj", "gptj", {"hidden_size": 64, "rotary_dim": 8}, biases=0.1),
    Variant("opt", "opt", {**WIDE, "ffn_dim": 80, "word_embed_proj_dim": 32}, biases=0.1),
    Variant("gpt-neox", "gpt_neox", WIDE, biases=0.1),
    Variant("olmo2", "olmo2"),
    Variant("phi3", "phi3", {"sliding_window": WINDOW}),
    Variant("starcoder2", "starcoder2", {"sliding_window": WINDOW}, biases=0.1),
    Variant("stablelm", "stablelm", WIDE, biases=0.1),
    Variant("granite", "granite", {"logits_scaling": 2.0, "residual_multiplier": 0.7, "embedding_multiplier": 1.5, "attention_multiplier": 0.2}),
    Variant("cohere", "cohere", {"use_qk_norm": True}),
    Variant("cohere2", "cohere2", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    Variant("glm4", "glm4", WIDE),
    Variant("smollm3", "smollm3", {"no_rope_layers": [1, 0, 1]}),
    Variant("exaone4", "exaone4", {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}),
    Variant("mixtral", "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Variant("deepseek-v3", "deepseek_v3", {**LATENT, **ROUTED, "first_k_dense_replace": 1}),
]
