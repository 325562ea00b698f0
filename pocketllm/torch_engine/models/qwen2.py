"""qwen2: llama with biases on queries, keys and values, and sliding windows in layers that the checkpoint names (Yang et al., 2024)."""

from __future__ import annotations

from typing import ClassVar

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.decoder import Decoder
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, only, read_spec, windows_of


class Qwen2(Decoder):
    """The model on one device; arguments and errors are those of model.ModelClass."""

    gguf_layer_names: ClassVar = {"post_attention_layernorm": "ffn_norm"}

    @staticmethod
    def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
        only(checkpoint, mlp_bias=False)
        return read_spec(checkpoint, qkv_bias=True, windows=windows_of(checkpoint))
