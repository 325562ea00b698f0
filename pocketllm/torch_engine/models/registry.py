"""Which class runs which architecture. backends/select.py holds the same names, for those who may not import torch.

Architectures that are not here run through transformers' modules, where those are plain attention.
"""

from __future__ import annotations

from collections.abc import Callable

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.deepseek_v4 import DeepseekV4
from pocketllm.torch_engine.models.deepseek_v4_config import DeepseekV4Config
from pocketllm.torch_engine.models.gemma3_text import Gemma3Text
from pocketllm.torch_engine.models.llama import Llama
from pocketllm.torch_engine.models.mistral import Mistral
from pocketllm.torch_engine.models.model import ModelClass
from pocketllm.torch_engine.models.qwen2 import Qwen2
from pocketllm.torch_engine.models.qwen3 import Qwen3
from pocketllm.torch_engine.models.qwen3_5 import Qwen3_5
from pocketllm.torch_engine.models.qwen3_5_config import Qwen3_5Config
from pocketllm.torch_engine.models.qwen3_5_moe import Qwen3_5Moe
from pocketllm.torch_engine.models.qwen3_moe import Qwen3Moe

# Hugging Face's model_type -> the model
MODELS: dict[str, ModelClass] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_5": Qwen3_5,
    "qwen3_5_text": Qwen3_5,
    "qwen3_5_moe": Qwen3_5Moe,
    "qwen3_5_moe_text": Qwen3_5Moe,
    "qwen3_moe": Qwen3Moe,
    "gemma3_text": Gemma3Text,
    "deepseek_v4": DeepseekV4,
}

# Those of them whose layers are not all attention -> how the sizes of their caches are read.
HYBRIDS: dict[str, Callable[[Checkpoint], Qwen3_5Config]] = {
    "qwen3_5": Qwen3_5Config.from_checkpoint,
    "qwen3_5_text": Qwen3_5Config.from_checkpoint,
    "qwen3_5_moe": Qwen3_5Config.from_checkpoint,
    "qwen3_5_moe_text": Qwen3_5Config.from_checkpoint,
}

# Those that keep recent tokens and a compressed past -> the same.
COMPRESSED: dict[str, Callable[[Checkpoint], DeepseekV4Config]] = {"deepseek_v4": DeepseekV4Config.from_checkpoint}


def model_class(checkpoint: Checkpoint) -> ModelClass:
    """What builds the model of `checkpoint`."""
    if checkpoint.architecture in MODELS:
        return MODELS[checkpoint.architecture]
    from pocketllm.torch_engine.models.generic import Generic  # transformers takes seconds to import, and need not be installed

    return Generic


def kv_sizes(checkpoint: Checkpoint) -> tuple[int, int, int]:
    """Layers of the model of `checkpoint`, and the KV heads and head dimension of those that keep keys and values."""
    if checkpoint.architecture in COMPRESSED:
        config = COMPRESSED[checkpoint.architecture](checkpoint)
        return config.num_hidden_layers, 1, config.head_dim
    if checkpoint.architecture in MODELS:
        return checkpoint.config["num_hidden_layers"], checkpoint.config["num_key_value_heads"], checkpoint.config["head_dim"]
    from pocketllm.torch_engine.models.generic_layout import read_layout

    layout = read_layout(checkpoint)
    return layout.num_layers, layout.num_kv_heads, layout.head_dim
