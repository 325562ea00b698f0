"""Which class runs which architecture. backends/select.py holds the same names, for those who may not import torch."""

from __future__ import annotations

from collections.abc import Callable

from pocketllm.checkpoint import Checkpoint
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
}

# Those of them whose layers are not all attention -> how the sizes of their caches are read.
HYBRIDS: dict[str, Callable[[Checkpoint], Qwen3_5Config]] = {
    "qwen3_5": Qwen3_5Config.from_checkpoint,
    "qwen3_5_text": Qwen3_5Config.from_checkpoint,
    "qwen3_5_moe": Qwen3_5Config.from_checkpoint,
    "qwen3_5_moe_text": Qwen3_5Config.from_checkpoint,
}
