"""Random weights in the shape of DeepSeek-V4 Flash, as they are published: experts in FP4, other matrices in FP8, the rest in float types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

FLASH_LAYERS = 43
_FP8_EXPONENT, _FP4_EXPONENT = 115, 120  # of scales 2^-12 and 2^-7: weights of about 0.02
_BLOCK, _GROUP = 128, 32

Tensors = Iterator[tuple[str, tuple[int, ...], str]]


def flash_config(layers: int = FLASH_LAYERS) -> dict[str, Any]:
    """config.json of Flash without model_type, cut to its first `layers`: two of them keep a window alone, then the two ways to compress take turns."""
    return {
        "hidden_size": 4096,
        "num_hidden_layers": layers,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 6,
        "norm_topk_prob": True,
        "scoring_func": "sqrtsoftplus",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "num_hash_layers": min(3, layers),
        "compress_ratios": ([0, 0] + [4, 128] * layers)[:layers],
        "compress_rope_theta": 160000.0,
        "sliding_window": 128,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1},
        "max_position_embeddings": 1048576,
        "vocab_size": 129280,
        "tie_word_embeddings": False,
        "expert_dtype": "fp4",
    }


def tiny_config() -> dict[str, Any]:
    """The same with every kind of layer, small."""
    small = {"hidden_size": 128, "num_attention_heads": 4, "head_dim": 64, "qk_rope_head_dim": 16, "q_lora_rank": 64, "o_groups": 2, "o_lora_rank": 64}
    experts = {"moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 3, "num_hash_layers": 1}
    index = {"index_n_heads": 16, "index_head_dim": 32, "index_topk": 8, "sliding_window": 32}
    return flash_config(4) | small | experts | index | {"vocab_size": 1000, "max_position_embeddings": 8192, "hc_sinkhorn_iters": 3}


def tensor_kinds(config: dict[str, Any]) -> Tensors:
    """Names, shapes and what each is: "fp8" and "fp4" matrices, which have scales beside them, "bf16", "f32", "norm", and "ids" of experts."""
    c = config
    hidden, rank, dim, heads, lanes = c["hidden_size"], c["q_lora_rank"], c["head_dim"], c["num_attention_heads"], c["hc_mult"]
    yield "embed.weight", (c["vocab_size"], hidden), "bf16"
    for layer in range(c["num_hidden_layers"]):
        prefix = f"layers.{layer}."
        for site in ("attn", "ffn"):
            yield f"{prefix}{site}_norm.weight", (hidden,), "norm"
            yield from _mixing(f"{prefix}hc_{site}", (2 + lanes) * lanes, 3, lanes * hidden)
        yield f"{prefix}attn.attn_sink", (heads,), "f32"
        yield f"{prefix}attn.wq_a.weight", (rank, hidden), "fp8"
        yield f"{prefix}attn.q_norm.weight", (rank,), "norm"
        yield f"{prefix}attn.wq_b.weight", (heads * dim, rank), "fp8"
        yield f"{prefix}attn.wkv.weight", (dim, hidden), "fp8"
        yield f"{prefix}attn.kv_norm.weight", (dim,), "norm"
        yield f"{prefix}attn.wo_a.weight", (c["o_groups"] * c["o_lora_rank"], heads * dim // c["o_groups"]), "fp8"
        yield f"{prefix}attn.wo_b.weight", (hidden, c["o_groups"] * c["o_lora_rank"]), "fp8"
        ratio = c["compress_ratios"][layer]
        if ratio:
            yield from _compressor(f"{prefix}attn.compressor.", ratio, dim, hidden)
        if ratio == 4:
            yield from _compressor(f"{prefix}attn.indexer.compressor.", ratio, c["index_head_dim"], hidden)
            yield f"{prefix}attn.indexer.wq_b.weight", (c["index_n_heads"] * c["index_head_dim"], rank), "fp8"
            yield f"{prefix}attn.indexer.weights_proj.weight", (c["index_n_heads"], hidden), "bf16"
        yield from _experts(f"{prefix}ffn.", layer, c)
    yield from _mixing("hc_head", lanes, 1, lanes * hidden)
    yield "norm.weight", (hidden,), "norm"
    yield "head.weight", (c["vocab_size"], hidden), "bf16"


def _mixing(name: str, count: int, scales: int, columns: int) -> Tensors:
    yield f"{name}_fn", (count, columns), "f32"
    yield f"{name}_base", (count,), "f32"
    yield f"{name}_scale", (scales,), "f32"


def _compressor(prefix: str, ratio: int, width: int, hidden: int) -> Tensors:
    rows = width * (2 if ratio == 4 else 1)
    yield f"{prefix}ape", (ratio, rows), "f32"
    yield f"{prefix}norm.weight", (width,), "norm"
    for name in ("wkv", "wgate"):
        yield f"{prefix}{name}.weight", (rows, hidden), "bf16"


def _experts(prefix: str, layer: int, c: dict[str, Any]) -> Tensors:
    count, hidden, size = c["n_routed_experts"], c["hidden_size"], c["moe_intermediate_size"]
    yield f"{prefix}gate.weight", (count, hidden), "bf16"
    if layer < c["num_hash_layers"]:
        yield f"{prefix}gate.tid2eid", (c["vocab_size"], c["num_experts_per_tok"]), "ids"
    else:
        yield f"{prefix}gate.bias", (count,), "f32"
    for owner, kind in [("shared_experts", "fp8"), *((f"experts.{place}", "fp4") for place in range(count))]:
        for name, shape in (("w1", (size, hidden)), ("w2", (hidden, size)), ("w3", (size, hidden))):
            yield f"{prefix}{owner}.{name}.weight", shape, kind


def stored_bytes(size: tuple[int, ...], kind: str) -> int:
    """Of the tensor, without its scales."""
    return int(math.prod(size) * {"fp4": 0.5, "fp8": 1, "bf16": 2, "norm": 2, "f32": 4, "ids": 8}[kind])


def draw_tensor(name: str, size: tuple[int, ...], kind: str, config: dict[str, Any], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The tensor, and its scales."""
    device = generator.device
    if kind == "ids":  # each token's experts differ: one after another, from any on
        first = torch.randint(0, config["n_routed_experts"], (size[0], 1), generator=generator, device=device)
        return {name: (first + 7 * torch.arange(size[1], device=device)) % config["n_routed_experts"]}
    if kind == "fp4":
        values = torch.empty(size[0], size[1] // 2, dtype=torch.uint8, device=device).random_(0, 256, generator=generator)
        scales = _powers((size[0], size[1] // _GROUP), _FP4_EXPONENT, device)
        return {name: values.view(torch.int8), name.removesuffix("weight") + "scale": scales}
    values = torch.empty(size, dtype=torch.float32 if kind == "f32" else torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
    if kind == "fp8":
        scales = _powers((-(-size[0] // _BLOCK), -(-size[1] // _BLOCK)), _FP8_EXPONENT, device)
        return {name: (values * 2**12).clamp(-448, 448).to(torch.float8_e4m3fn), name.removesuffix("weight") + "scale": scales}
    if kind == "norm" or name.endswith("_scale"):
        values += 1
    return {name: values}


def _powers(size: tuple[int, ...], exponent: int, device: torch.device) -> torch.Tensor:
    return torch.full(size, exponent, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)
