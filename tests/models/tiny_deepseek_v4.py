"""Small random deepseek_v4 models of transformers, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from pocketllm.checkpoint import open_checkpoint
from pocketllm.torch_engine.layers.cpu import CpuDevice
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.models.deepseek_v4 import DeepseekV4
from pocketllm.torch_engine.models.deepseek_v4_names import gguf_name
from pocketllm.torch_engine.models.registry import MODELS

KINDS = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention", "compressed_sparse_attention"]
SIZES: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 32,
    "q_lora_rank": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "partial_rotary_factor": 0.25,
    "layer_types": KINDS,
    "compress_rates": {KINDS[1]: 4, KINDS[2]: 16},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"],
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "hc_sinkhorn_iters": 3,
    "index_n_heads": 8,
    "index_head_dim": 16,
    "index_topk": 6,
    "swiglu_limit": 1.5,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
}


def fill(model: torch.nn.Module, seed: int = 3) -> None:
    """Random weights, large enough that greedy answers wander, and every branch counts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in [*model.named_parameters(), *model.named_buffers()]:
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("tid2eid"):
                order = torch.rand(weight.shape[0], SIZES["n_routed_experts"], generator=generator).argsort(-1)
                weight.copy_(order[:, : weight.shape[1]])
            elif name.endswith("e_score_correction_bias"):
                weight.copy_(noise / 4)
            elif "inv_freq" in name:
                continue
            elif "embed_tokens" in name:
                weight.copy_(noise * 2)
            elif "norm" in name or name.endswith(("scale", "position_bias", "sinks", "base")):
                weight.add_(noise / 4)
            elif weight.ndim > 1:
                weight.copy_(noise / weight.shape[-1] ** 0.5)


def write_tiny(directory: Path, **sizes: Any) -> DeepseekV4ForCausalLM:
    """A checkpoint in `directory`, under transformers' names. Returns the same model in transformers."""
    model = DeepseekV4ForCausalLM(DeepseekV4Config(**{**SIZES, **sizes})).eval()
    fill(model)
    model.save_pretrained(directory)
    return model


def published_names(saved: Path, directory: Path, ratios: list[int] | None = None) -> None:
    """Write the checkpoint in `saved` as the publisher spells it, and with two tensors of a layer that predicts further tokens.

    Args:
        ratios: of the layers, in place of their types.
    """
    tensors = {}
    for name, tensor in load_file(saved / "model.safetensors").items():
        tensors[published_name(name)] = tensor
    tensors |= {"mtp.0.e_proj.weight": torch.zeros(4, 4), "mtp.0.norm.weight": torch.zeros(4)}
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((saved / "config.json").read_text())
    rope = config.pop("rope_parameters")
    scaling = {"type": "yarn"} | {name: rope["compress"][name] for name in ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")}
    config |= {"rope_theta": rope["main"]["rope_theta"], "rope_scaling": scaling}
    del config["partial_rotary_factor"]
    kinds = config.pop("mlp_layer_types")
    config["num_hash_layers"] = kinds.index("moe")
    assert "hash_moe" not in kinds[config["num_hash_layers"] :]
    if ratios is not None:
        del config["layer_types"], config["compress_rates"]
        config["compress_ratios"] = ratios
    (directory / "config.json").write_text(json.dumps(config))


def load(directory: Path, expert_cache: ExpertCache | None = None) -> DeepseekV4:
    checkpoint = open_checkpoint(directory)
    with torch.inference_mode():
        model = MODELS[checkpoint.architecture](
            checkpoint, CpuDevice(torch.float32, expert_cache=expert_cache), SIZES["max_position_embeddings"], lambda done: None
        )
    assert isinstance(model, DeepseekV4)
    return model


def quantized(saved: Path, directory: Path) -> DeepseekV4ForCausalLM:
    """Write the checkpoint in `saved` with experts in FP4 and other matrices in FP8, as they are published. Returns transformers' model of what it holds."""
    published_names(saved, directory)
    tensors, plain = load_file(directory / "model.safetensors"), load_file(saved / "model.safetensors")
    dequantized = dict(plain)
    for name in plain:
        mine = published_name(name)
        if ".ffn.experts." in mine:
            tensors[mine], scales, dequantized[name] = _to_fp4(plain[name])
        elif mine.endswith(("wq_a.weight", "wq_b.weight", ".attn.wkv.weight", "wo_a.weight", "wo_b.weight")) or ".shared_experts." in mine:
            tensors[mine], scales, dequantized[name] = _to_fp8(plain[name])
        else:
            continue
        tensors[f"{mine.removesuffix('.weight')}.scale"] = scales
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization, "expert_dtype": "fp4"}))
    save_file(dequantized, saved / "model.safetensors", {"format": "pt"})
    return DeepseekV4ForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()


def published_name(name: str) -> str:
    """The publisher's name of a tensor that transformers saved under `name`."""
    plain = name.removeprefix("model.").replace("hc_head.hc_", "hc_head_").replace("embed_tokens", "embed")
    return plain.replace(".attn.norm.", ".attn.kv_norm.")


def _to_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] -> int8 [out, in / 2], powers of two [out, in / 32], and what they stand for [out, in]."""
    groups = weight.unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1) / 6).log2().ceil().exp2().to(torch.float8_e8m0fnu)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
    codes = (groups / scales.float().unsqueeze(-1)).unsqueeze(-1).sub(table).abs().argmin(-1)
    pairs = codes.flatten(1).unflatten(1, (-1, 2)).to(torch.uint8)
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8), scales, (table[codes] * scales.float().unsqueeze(-1)).flatten(1)


def _to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] -> float8 values, powers of two for each 128 x 128 of them, and what they stand for."""
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 128) * 128)
    padded[:rows, :columns] = weight
    blocks = padded.unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    scales = (blocks.abs().amax((1, 3)) / 448).log2().ceil().exp2().to(torch.float8_e8m0fnu)
    spread = scales.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return values, scales, values.float() * spread


def write_gguf(saved: Path, path: Path) -> DeepseekV4ForCausalLM:
    """Write the checkpoint in `saved` as llama.cpp's converter does, experts in MXFP4 and other matrices in Q8_0. Returns transformers' model of it."""
    plain = load_file(saved / "model.safetensors")
    dequantized, named = dict(plain), {}
    stacked: dict[str, list[tuple[int, torch.Tensor]]] = {}
    for name, tensor in plain.items():
        mine = published_name(name)
        kind = _gguf_type(mine)
        if kind is not None:
            dequantized[name] = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
        if ".ffn.experts." in mine:
            layer, place, rest = mine.split(".experts.")[0], *mine.split(".experts.")[1].split(".", 1)
            stacked.setdefault(f"{layer}.experts.{rest}", []).append((int(place), tensor))
        else:
            named[mine] = tensor
    named |= {name: torch.stack([tensor for _, tensor in sorted(parts, key=lambda part: part[0])]) for name, parts in stacked.items()}
    writer = gguf.GGUFWriter(path, "deepseek4")
    _write_gguf_keys(writer, json.loads((saved / "config.json").read_text()))
    for name, tensor in named.items():
        kind = _gguf_type(name)
        data = tensor.to(torch.int32).numpy() if name.endswith("tid2eid") else tensor.numpy()
        writer.add_tensor(gguf_name(name), data if kind is None else gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(dequantized, saved / "model.safetensors", {"format": "pt"})
    return DeepseekV4ForCausalLM.from_pretrained(saved, dtype=torch.float32).eval()


def _gguf_type(name: str) -> gguf.GGMLQuantizationType | None:
    if ".ffn.experts." in name:
        return gguf.GGMLQuantizationType.MXFP4
    is_matrix = name in ("embed.weight", "head.weight") or (
        ".attn.w" in name or ".attn.indexer.w" in name or "compressor.w" in name or ".shared_experts." in name
    )
    return gguf.GGMLQuantizationType.Q8_0 if is_matrix else None


def _write_gguf_keys(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    scaling, layers, arch = config["rope_parameters"]["compress"], config["num_hidden_layers"], "deepseek4"
    ratios = {KINDS[0]: 0, **config["compress_rates"]}
    writer.add_block_count(layers)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1)
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["qk_rope_head_dim"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(scaling["factor"])
    writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
    writer.add_expert_count(config["n_routed_experts"])
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(1)
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(True)
    writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_uint32(f"{arch}.expert_gating_func", 4)
    writer.add_array(f"{arch}.swiglu_clamp_exp", [config["swiglu_limit"]] * layers)
    writer.add_array(f"{arch}.swiglu_clamp_shexp", [config["swiglu_limit"]] * layers)
    writer.add_array(f"{arch}.attention.compress_ratios", [ratios[kind] for kind in config["layer_types"]])
    writer.add_float32(f"{arch}.attention.compress_rope_freq_base", config["compress_rope_theta"])
    writer.add_float32(f"{arch}.hyper_connection.epsilon", config["hc_eps"])
    for key, name in {
        "attention.indexer.head_count": "index_n_heads",
        "attention.indexer.key_length": "index_head_dim",
        "attention.indexer.top_k": "index_topk",
        "attention.output_group_count": "o_groups",
        "attention.output_lora_rank": "o_lora_rank",
        "hyper_connection.count": "hc_mult",
        "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    }.items():
        writer.add_uint32(f"{arch}.{key}", config[name])
    writer.add_uint32(f"{arch}.hash_layer_count", config["mlp_layer_types"].count("hash_moe"))
    writer.add_uint32(f"{arch}.embedding_length_out", config["hidden_size"] * config["hc_mult"])
