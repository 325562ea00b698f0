"""The model: a Qwen3.5 with every part of its architecture in small."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .vocabulary import END_OF_TEXT, TURN_END, write_tokenizer

_MAX_LENGTH = 4096
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 416,
    "num_hidden_layers": 8,  # three of linear attention, then one of full attention, twice
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
}


def make_model(tokenizer: Tokenizer, seed: int, **sizes: Any) -> Qwen3_5ForCausalLM:
    """Random weights in float32.

    Args:
        tokenizer: whose ids it reads; the embedding is padded to a multiple of 64 rows.
        seed: of the weights.
        sizes: instead of those in SIZES.
    """
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        **{**SIZES, **sizes},
        vocab_size=-(-tokenizer.get_vocab_size() // 64) * 64,
        max_position_embeddings=_MAX_LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2], "mrope_interleaved": True},
        initializer_range=0.03,
        bos_token_id=None,
        eos_token_id=tokenizer.token_to_id(END_OF_TEXT),
        pad_token_id=None,
    )
    return Qwen3_5ForCausalLM(config)


def write_checkpoint(model: Qwen3_5ForCausalLM, tokenizer: Tokenizer, directory: Path) -> None:
    """The model in bfloat16 with its tokenizer, as transformers and PocketLLM read it. `model` becomes bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    model.bfloat16()
    model.config.dtype = torch.bfloat16
    ends = [tokenizer.token_to_id(TURN_END), tokenizer.token_to_id(END_OF_TEXT)]
    model.generation_config = GenerationConfig(eos_token_id=ends, pad_token_id=ends[1], do_sample=False)
    model.save_pretrained(directory)
    write_tokenizer(tokenizer, directory, _MAX_LENGTH)
