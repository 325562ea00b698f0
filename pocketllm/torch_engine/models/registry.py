"""Which class runs which architecture. backends/select.py holds the same names, for those who may not import torch."""

from __future__ import annotations

from pocketllm.torch_engine.models.llama import Llama
from pocketllm.torch_engine.models.mistral import Mistral
from pocketllm.torch_engine.models.model import ModelClass

# Hugging Face's model_type -> the model
MODELS: dict[str, ModelClass] = {
    "llama": Llama,
    "mistral": Mistral,
}
