"""Small random qwen3_5 models of transformers, on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from pocketllm.checkpoint import open_checkpoint
from pocketllm.torch_engine.layers.cpu import CpuDevice
from pocketllm.torch_engine.models.qwen3_5 import Qwen3_5
from pocketllm.torch_engine.models.registry import MODELS
from tests.models.plain_torch import Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 151,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 512,
    "full_attention_interval": 2,
}

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64}


def fill(model: torch.nn.Module, seed: int = 11) -> None:
    """Random weights, large enough that greedy answers wander."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("A_log"):
                weight.copy_(noise.abs() / 2)
            elif "norm" in name or name.endswith("dt_bias"):
                weight.add_(noise / 4)
            elif "embed_tokens" in name:
                weight.copy_(noise * 2)
            elif weight.ndim > 1:
                weight.copy_(noise / weight.shape[-1] ** 0.5)


def write_tiny(directory: Path, **sizes: Any) -> Qwen3_5ForCausalLM:
    """A text checkpoint in `directory`. Returns the same model in transformers."""
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**{**SIZES, **sizes})).eval()
    fill(model)
    model.save_pretrained(directory)
    return model


def write_tiny_moe(directory: Path, **sizes: Any) -> Qwen3_5MoeForCausalLM:
    """A text checkpoint with experts in `directory`. Returns the same model in transformers."""
    model = Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**{**SIZES, **EXPERTS, **sizes})).eval()
    fill(model)
    model.save_pretrained(directory)
    return model


def write_fp8(directory: Path, model: Any) -> None:
    """Turn the matrices of the checkpoint that `model` was saved as into FP8 with block scales, but for those that such checkpoints keep, and give the
    model the values that they then stand for."""
    kept = ["lm_head", "model.embed_tokens", *(name for name, _ in model.named_modules() if name.endswith(("in_proj_a", "in_proj_b", "conv1d")))]
    tensors = load_file(directory / "model.safetensors")
    for name, weight in list(tensors.items()):
        if weight.ndim != 2 or name.removesuffix(".weight") in kept:
            continue
        rows, columns = weight.shape
        scales = torch.rand(-(-rows // 128), -(-columns // 128), generator=torch.Generator().manual_seed(5)).add(0.5).div(100).bfloat16()
        spread = scales.float().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        tensors[name] = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scales
        model.get_parameter(name).data = tensors[name].float() * spread
    save_file(tensors, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": kept}
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))


def write_tiny_gguf(path: Path, model: Any, matrix_type: gguf.GGMLQuantizationType) -> None:
    """`model` as llama.cpp's converter writes it. Matrices are quantized to `matrix_type`, and rounded so in `model` too."""
    config = model.config
    has_experts = "moe" in config.model_type
    architecture = "qwen35moe" if has_experts else "qwen35"
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    if has_experts:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim // 4)
    writer.add_rope_dimension_sections([1, 1, 0, 0])
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_uint32(f"{architecture}.full_attention_interval", SIZES["full_attention_interval"])
    key_heads, value_heads, value_dim = config.linear_num_key_heads, config.linear_num_value_heads, config.linear_value_head_dim
    tiled = torch.arange(value_heads).view(key_heads, -1).T.flatten()  # heads that share a key head stand apart
    tiled_rows = (tiled[:, None] * value_dim + torch.arange(value_dim)).flatten()
    keys = 2 * key_heads * config.linear_key_head_dim
    qkv_rows = torch.cat([torch.arange(keys), keys + tiled_rows])
    gguf_name = MODELS[config.model_type].gguf_name  # type: ignore[attr-defined]
    with torch.no_grad():
        for name, weight in model.named_parameters():
            is_matrix = weight.ndim >= 2 and "conv1d" not in name and "shared_expert_gate" not in name
            if is_matrix:
                rounded = gguf.dequantize(gguf.quantize(weight.numpy(), matrix_type), matrix_type)
                weight.copy_(torch.from_numpy(rounded))
            kind = name.split(".linear_attn.")[-1]
            stored = weight.clone()
            if "norm" in name and kind != "norm.weight":
                stored = weight + 1
            elif kind == "A_log":
                stored = -weight.exp()
            elif kind == "conv1d.weight":
                stored = weight.squeeze(1)
            if kind in ("in_proj_qkv.weight", "conv1d.weight"):
                stored = stored[qkv_rows]
            elif kind == "in_proj_z.weight":
                stored = stored[tiled_rows]
            elif kind in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
                stored = stored[tiled]
            elif kind == "out_proj.weight":
                stored = stored[:, tiled_rows]
            stacked = {name: stored}
            if name.endswith("gate_up_proj"):
                gate, up = stored.chunk(2, dim=1)
                stacked = {name.replace("gate_up_proj", "gate_proj.weight"): gate, name.replace("gate_up_proj", "up_proj.weight"): up}
            elif name.endswith("experts.down_proj"):
                stacked = {f"{name}.weight": stored}
            for one, values in stacked.items():
                data = gguf.quantize(values.contiguous().numpy(), matrix_type) if is_matrix else values.numpy()
                writer.add_tensor(gguf_name(one), data, raw_dtype=matrix_type if is_matrix else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load(directory: Path) -> Qwen3_5:
    checkpoint = open_checkpoint(directory)
    with torch.inference_mode():
        model = MODELS[checkpoint.architecture](checkpoint, CpuDevice(torch.float32), SIZES["max_position_embeddings"], lambda done: None)
    assert isinstance(model, Qwen3_5)
    return model
