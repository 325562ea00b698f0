"""Checkpoints in FP8 E4M3 with a scale for each block of 128 x 128, against transformers on the same numbers dequantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pocketllm.backends.select import explain
from pocketllm.checkpoint import open_checkpoint
from tests.models.plane import check_close, expected_logits, logits_of
from tests.models.tiny import PROMPTS, Variant

BLOCK = 128
SIZES = {"hidden_size": 160, "intermediate_size": 272}  # of more than one block, and of no whole number of them
VARIANTS = [
    Variant("llama", "llama", SIZES),
    Variant("qwen3", "qwen3", SIZES),
    Variant("qwen3-moe", "qwen3_moe", {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 144, "norm_topk_prob": True}),
]


def quantize(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[out, in] -> float8 values, bfloat16 scales, and their products as float32 [out, in]."""
    rows, columns = weight.shape
    scales = torch.empty(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.bfloat16)
    values, products = torch.empty_like(weight, dtype=torch.float8_e4m3fn), torch.empty_like(weight)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scale = scales[row, column] = (weight[part].abs().max() / 448 * 1.01).bfloat16()
            values[part] = (weight[part] / scale.float()).to(torch.float8_e4m3fn)
            products[part] = values[part].float() * scale.float()
    return values, scales, products


def save_fp8(variant: Variant, directory: Path) -> PreTrainedModel:
    """Write the variant in FP8, and return transformers' model of what it holds."""
    plain = directory / "plain"
    variant.save(plain)
    tensors: dict[str, torch.Tensor] = {}
    dequantized: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            tensors[name], tensors[f"{name}_scale_inv"], dequantized[name] = quantize(tensor)
        else:
            tensors[name] = dequantized[name] = tensor
    save_file(tensors, directory / "model.safetensors")
    save_file(dequantized, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((plain / "config.json").read_text(encoding="utf-8"))
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": ["lm_head", "model.embed_tokens"],
    }
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return type(variant.build()).from_pretrained(plain, dtype=torch.float32).eval()


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_logits(variant: Variant, tmp_path: Path) -> None:
    oracle = save_fp8(variant, tmp_path)
    assert explain(open_checkpoint(tmp_path))[0].runs
    for found, prompt in zip(logits_of(tmp_path, PROMPTS, 17), PROMPTS, strict=True):
        check_close(found, expected_logits(oracle, prompt))
