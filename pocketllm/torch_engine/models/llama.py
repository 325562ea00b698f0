"""llama: pre-norm decoder with grouped-query attention, rotary positions and a SwiGLU feed-forward (Touvron et al., 2023)."""

from __future__ import annotations

from typing import ClassVar

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.decoder import Decoder
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, need, read_spec


class Llama(Decoder):
    """The model on one device; arguments and errors are those of model.ModelClass."""

    gguf_layer_names: ClassVar = {"post_attention_layernorm": "ffn_norm"}

    @staticmethod
    def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
        bias = need(checkpoint, "attention_bias")
        return read_spec(
            checkpoint,
            qkv_bias=bias,
            output_bias=bias,
            mlp_bias=need(checkpoint, "mlp_bias"),
            interleaved=checkpoint.gguf is not None,
        )
