"""mistral: llama with a sliding window in every layer, where the checkpoint has one (Jiang et al., 2023)."""

from __future__ import annotations

from typing import ClassVar

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.decoder import Decoder
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, need, only, read_spec


class Mistral(Decoder):
    """The model on one device; arguments and errors are those of model.ModelClass. A GGUF calls it llama."""

    gguf_layer_names: ClassVar = {"post_attention_layernorm": "ffn_norm"}

    @staticmethod
    def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
        only(checkpoint, attention_bias=False, mlp_bias=False, layer_types=None)
        return read_spec(checkpoint, windows=(need(checkpoint, "sliding_window"),) * need(checkpoint, "num_hidden_layers"))
