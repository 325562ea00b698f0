"""Random weights in a Qwen3.5 shape as a GGUF file in BF16, without a vocabulary: for llama.cpp's benchmark programs, which draw ids themselves."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from random_checkpoint import SHAPES, tensor_shapes

_POOL = 2**24  # random values, which are repeated: speed does not depend on them
_NAMES = {  # Hugging Face's, without "model." and ".weight", to llama.cpp's
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv",
    "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta",
    "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d",
    "linear_attn.A_log": "ssm_a",
    "linear_attn.dt_bias": "ssm_dt.bias",
    "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "lm_head": "output",
}


def write_random_gguf(path: Path, shape: str) -> None:
    """Write a model of `shape`, one of random_checkpoint's of Qwen3.5, to `path`."""
    config = SHAPES[shape].config
    writer = GGUFWriter(str(path), "qwen35", use_temp_file=False)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"] // 4)
    writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(config["linear_conv_kernel_dim"])
    writer.add_ssm_inner_size(config["linear_num_value_heads"] * config["linear_value_head_dim"])
    writer.add_ssm_state_size(config["linear_key_head_dim"])
    writer.add_ssm_time_step_rank(config["linear_num_value_heads"])
    writer.add_ssm_group_count(config["linear_num_key_heads"])
    writer.add_uint32("qwen35.full_attention_interval", config["full_attention_interval"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    writer.add_file_type(32)  # mostly BF16
    for name, values, kind in _tensors(shape):
        writer.add_tensor_info(name, values.shape, values.dtype, values.nbytes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, values, _ in _tensors(shape):
        writer.write_tensor_data(values)
    writer.close()


def _tensors(shape: str) -> Iterator[tuple[str, npt.NDArray[Any], GGMLQuantizationType]]:
    values = np.random.default_rng(0).standard_normal(_POOL, dtype=np.float32) * np.float32(0.02)
    halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    for name, size in tensor_shapes(SHAPES[shape]):
        matched = re.fullmatch(r"(?:model\.)?(?:layers\.(\d+)\.)?(.+?)(\.weight)?", name)
        assert matched is not None
        layer, what, ending = matched.groups()
        target = ("" if layer is None else f"blk.{layer}.") + _NAMES[what] + (ending or "")
        if len(size) != 2:  # vectors, and the convolution [channels, 1, taps]
            size = (size[0], size[2]) if len(size) == 3 else size
            yield target, np.full(size, -0.5 if what.endswith("A_log") else 1.0, np.float32), GGMLQuantizationType.F32
        else:
            yield target, np.resize(halves, math.prod(size)).reshape(size), GGMLQuantizationType.BF16
