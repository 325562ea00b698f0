"""Every architecture from a GGUF: names, order of rows and sums of norms as llama.cpp's files have them; 4-bit weights on the native kernels too."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from pocketllm.checkpoint import Checkpoint, TensorInfo, open_checkpoint
from pocketllm.gguf_file import open_gguf
from pocketllm.torch_engine.batch import build_batch
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.kernels.native import library
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.cpu import CpuDevice
from pocketllm.torch_engine.models.registry import MODELS
from pocketllm.torch_engine.scheduler import Scheduler
from tests.models.plane import check_close, expected_logits
from tests.models.tiny import PROMPTS, Variant, request
from tests.models.variants import LLAMA3, gemma

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "gemma3_text": gguf.MODEL_ARCH.GEMMA3,
}
WIDE = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 112}  # what 4-bit blocks and the native kernels' tiles fit into
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
GEMMA = gemma(layer_types=["sliding_attention", "full_attention", "sliding_attention"])
VARIANTS = [
    Variant("llama", "llama", WIDE),
    Variant("llama-biases", "llama", {**WIDE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Variant("llama3", "llama", {**WIDE, **LLAMA3}),
    Variant("qwen2", "qwen2", WIDE),
    Variant("qwen3", "qwen3", WIDE),
    Variant("gemma3", "gemma3_text", {**WIDE, **GEMMA}),
    Variant("qwen3-moe", "qwen3_moe", {**WIDE, **EXPERTS}),
]
MOE = Variant("qwen3-moe", "qwen3_moe", {**WIDE, **EXPERTS})
STEP_PARTS = {
    "llama": None,
    "qwen2": "biases",
    "qwen3": "normalised heads",
    "qwen3-moe": "normalised heads",
    "gemma3": "normalised heads",
    "llama-biases": "biases",
    "llama3": None,
}


def save(variant: Variant, directory: Path, matrix_type: str) -> tuple[Checkpoint, PreTrainedModel]:
    """A GGUF of `variant` and transformers' model with its dequantized weights; the config comes from config.json, which is not what is tested here."""
    oracle = variant.save(directory)
    config = oracle.config
    names = gguf.get_tensor_name_map(ARCHITECTURES[variant.architecture], config.num_hidden_layers)
    path = directory / "model.gguf"
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHITECTURES[variant.architecture]])
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            stored_type = "F32" if parameter.dim() == 1 or name.endswith("mlp.gate.weight") else matrix_type
            if name.endswith(("embed_tokens.weight", "lm_head.weight")) and matrix_type != "F32":
                stored_type = "Q8_0"
            kind = gguf.GGMLQuantizationType[stored_type]
            for hf_name, values in parts(name, parameter.numpy(), config):
                gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
                assert gguf_name is not None, hf_name
                writer.add_tensor(gguf_name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)
            if stored_type != "F32":
                parameter.copy_(torch.from_numpy(gguf.dequantize(gguf.quantize(parameter.numpy(), kind), kind)))
    rope = getattr(config, "rope_parameters", {})
    if rope.get("rope_type") == "llama3":
        wavelengths = 2 * np.pi * 1e4 ** (np.arange(0, 16, 2) / 16)
        low, high, length = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
        kept = np.clip((length / wavelengths - low) / (high - low), 0, 1)
        writer.add_tensor("rope_freqs.weight", (1 / (kept + (1 - kept) / rope["factor"])).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = open_gguf(path)
    infos = tuple(
        TensorInfo(tensor.name, tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name, int(tensor.n_bytes), path)
        for tensor in file.tensors.values()
    )
    checkpoint = open_checkpoint(directory, "safetensors")
    known = dict(checkpoint.config)
    if "rope_freqs.weight" in file.tensors:
        known["rope_scaling"] = {"rope_type": "frequency_factors", "tensor": "rope_freqs.weight"}
    return replace(checkpoint, path=path, model_format="gguf", config=known, tensors=infos, gguf=file), oracle


def parts(name: str, values: np.ndarray, config: Any) -> list[tuple[str, np.ndarray]]:
    """What llama.cpp's converter makes of one of transformers' parameters."""
    if config.model_type == "llama" and (".q_proj." in name or ".k_proj." in name):
        return [(name, values.reshape(-1, 2, 8, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape))]
    if config.model_type == "gemma3_text" and "norm" in name:
        return [(name, values + 1)]
    if name.endswith("experts.gate_up_proj"):
        gate, up = np.split(values, 2, axis=1)
        return [(name.replace("gate_up_proj", "gate_proj") + ".weight", gate), (name.replace("gate_up_proj", "up_proj") + ".weight", up)]
    return [(name + ".weight" if name.endswith("experts.down_proj") else name, values)]


@torch.inference_mode()
def compute(checkpoint: Checkpoint, dtype: torch.dtype | None, threads: int = 0) -> tuple[str, list[torch.Tensor]]:
    """What the model says of its kernels, and logits of PROMPTS: their beginnings as prompts, then token by token, together."""
    model = MODELS[checkpoint.architecture](checkpoint, CpuDevice(dtype, threads), 128, lambda done: None)
    config = checkpoint.config
    kv_dtype = torch.float16 if threads else torch.float32
    cache = KVCache(config["num_hidden_layers"], 40, 16, config["num_key_value_heads"], config["head_dim"], kv_dtype)
    scheduler = Scheduler(BlockPool(40, 16, enable_prefix_caching=False), 8, 0)
    texts: dict[str, list[int]] = {}
    for place, text in enumerate(PROMPTS):
        texts[str(place)] = text
        beginning = max(1, len(text) - 6)
        scheduler.add(request(str(place), text[:beginning], len(text) - beginning + 1))
    found: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    while step := scheduler.schedule():
        batch = build_batch(step, 16, cache.dtype)
        logits = model.logits(model.forward(batch, cache))
        for scheduled, part in zip(batch.rows, logits.split([one.num_tokens for one in batch.rows]), strict=True):
            found[scheduled.row.request.request_id].append(part)
        forced = {place: (texts[one.row.request.request_id] + [0])[len(one.row.token_ids)] for place, one in enumerate(step)}
        scheduler.advance(step)
        scheduler.resolve(step, forced)
    return model.native_kernels, [torch.cat(found[name]) for name in texts]


@pytest.mark.parametrize("matrix_type", ["F32", "Q4_0", "Q8_0"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_float32(variant: Variant, matrix_type: str, tmp_path: Path) -> None:
    checkpoint, oracle = save(variant, tmp_path, matrix_type)
    for found, prompt in zip(compute(checkpoint, torch.float32)[1], PROMPTS, strict=True):
        check_close(found, expected_logits(oracle, prompt))


@pytest.mark.parametrize("matrix_type", ["F32", "Q4_0", "Q8_0", "Q5_1"])
def test_experts_in_float32(matrix_type: str, tmp_path: Path) -> None:
    checkpoint, oracle = save(MOE, tmp_path, matrix_type)
    for found, prompt in zip(compute(checkpoint, torch.float32)[1], PROMPTS, strict=True):
        check_close(found, expected_logits(oracle, prompt))


@pytest.mark.skipif(isinstance(library(), str), reason="the native library is not built here, or the processor has no AVX-512")
@pytest.mark.parametrize("matrix_type", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_native(variant: Variant, matrix_type: str, tmp_path: Path) -> None:
    checkpoint, oracle = save(variant, tmp_path, matrix_type)
    says, found = compute(checkpoint, None, threads=1)
    part = STEP_PARTS[variant.name]
    assert says == ("in use" if part is None else f"in use for products alone, since the model has {part}")
    for logits, prompt in zip(found, PROMPTS, strict=True):
        check_close(logits, expected_logits(oracle, prompt), 3e-3)  # cached keys and values are float16
