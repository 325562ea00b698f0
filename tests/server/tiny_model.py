"""A small random llama with a tokenizer of bytes and a chat template, for the real torch plane behind a server."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.fake_serving import TEMPLATE, qwen_tokenizer
from tests.kernels.tiny_llama import CONFIG, tiny_tensors

CONTEXT = 2048
POISON = "N"  # in a poisoned model, what has this letter before it has logits that are no numbers


def write_tiny_chat_model(directory: Path, *, is_poisoned: bool = False) -> Path:
    """A checkpoint directory. Greedy answers are bytes without sense, the same ones for the same prompt."""
    tokenizer = qwen_tokenizer()
    generator = torch.Generator().manual_seed(11)
    tensors = tiny_tensors()
    embedding = torch.randn((tokenizer.vocab_size, 32), generator=generator)
    tensors["model.embed_tokens.weight"], tensors["lm_head.weight"] = embedding, torch.randn((tokenizer.vocab_size, 32), generator=generator) / 4
    if is_poisoned:
        embedding[ord(POISON)] = float("nan")
    config = {**CONFIG, "vocab_size": tokenizer.vocab_size, "max_position_embeddings": CONTEXT}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.vocab_size - 1}), encoding="utf-8")
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    tokenizer.backend.save(str(directory / "tokenizer.json"))
    save_file(tensors, directory / "model.safetensors")
    return directory
