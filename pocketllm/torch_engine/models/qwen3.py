"""qwen3: a qwen2 decoder that normalises each head of queries and keys in place of biases (Yang et al., 2025)."""

from __future__ import annotations

from typing import ClassVar

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.decoder import Decoder
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, need, only, read_spec, windows_of


class Qwen3(Decoder):
    """The model on one device; arguments and errors are those of model.ModelClass."""

    gguf_layer_names: ClassVar = {
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }

    @staticmethod
    def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
        only(checkpoint, mlp_bias=False)
        bias = need(checkpoint, "attention_bias")
        return read_spec(checkpoint, qkv_bias=bias, output_bias=bias, head_norms=True, windows=windows_of(checkpoint))
