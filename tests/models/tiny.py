"""Random tiny checkpoints: transformers' own model of each variant, saved by its own writer."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from pocketllm.backends.base import EngineRequest

VOCAB_SIZE = 97
CONTEXT = 256
WINDOW = 21  # neither a whole number of blocks nor of chunks

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # not hidden_size / num_attention_heads
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclass(frozen=True)
class Variant:
    """One architecture with what it may vary, as keys of transformers' config; plain is without any of that. `biases` says how large biases are."""

    name: str
    architecture: str
    keys: dict[str, Any] = field(default_factory=dict)
    is_plain: bool = False
    biases: float = 1.0

    def build(self) -> PreTrainedModel:
        """transformers' model with random float32 weights, always the same, of a size that makes its answers differ by their prompts."""
        config = AutoConfig.for_model(self.architecture, **{**_SIZES, **self.keys})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        generator = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                values = torch.randn(parameter.shape, generator=generator)
                if "norm" in name and parameter.dim() == 1:
                    values = values / 4 + (0 if "gemma" in self.architecture else 1)
                elif any(word in name for word in ("embed_tokens", "wte", "embed_in")):
                    values *= 0.3 if "gemma" in self.architecture else 2
                elif parameter.dim() > 1:
                    values /= parameter.shape[-1] ** 0.5
                parameter.copy_(values * self.biases if name.endswith(".bias") else values)
            model.tie_weights()
        return model

    def save(self, directory: Path, dtype: torch.dtype = torch.float32, shard_size: str = "1GB") -> PreTrainedModel:
        """Write a checkpoint, and return the model with the weights that it holds, in float32."""
        model = self.build()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.to(dtype))
        model.save_pretrained(directory, state_dict={name: tensor.to(dtype) for name, tensor in model.state_dict().items()}, max_shard_size=shard_size)
        return model


def prompt_of(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def request(name: str, prompt: list[int], max_tokens: int) -> EngineRequest:
    return EngineRequest(name, tuple(prompt), max_tokens)


PROMPTS = [prompt_of(length, seed) for seed, length in enumerate((1, 9, 33, 50, 70))]
