"""Which class runs which architecture. backends/select.py holds the same names, for those who may not import torch."""

from __future__ import annotations

from pocketllm.torch_engine.models.gemma3_text import Gemma3Text
from pocketllm.torch_engine.models.llama import Llama
from pocketllm.torch_engine.models.mistral import Mistral
from pocketllm.torch_engine.models.model import ModelClass
from pocketllm.torch_engine.models.qwen2 import Qwen2
from pocketllm.torch_engine.models.qwen3 import Qwen3
from pocketllm.torch_engine.models.qwen3_moe import Qwen3Moe

# Hugging Face's model_type -> the model
MODELS: dict[str, ModelClass] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_moe": Qwen3Moe,
    "gemma3_text": Gemma3Text,
}
