"""gemma3_text: norms before and after each part, five layers with a window to one without, each kind with its own rotation (Gemma team, 2025)."""

from __future__ import annotations

from typing import ClassVar

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.decoder import Decoder
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, Rope, need, only, read_spec, windows_of


class Gemma3Text(Decoder):
    """The model on one device; arguments and errors are those of model.ModelClass."""

    gguf_layer_names: ClassVar = {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
        "self_attn.q_norm": "attn_q_norm",
        "self_attn.k_norm": "attn_k_norm",
    }

    @staticmethod
    def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
        # transformers computes no soft cap of the scores for this architecture, whatever the key says.
        only(checkpoint, mlp_bias=False, attn_logit_softcapping=None, rope_local_scaling=None, use_bidirectional_attention=False)
        bias = need(checkpoint, "attention_bias")
        return read_spec(
            checkpoint,
            hidden_act=need(checkpoint, "hidden_activation"),
            windows=windows_of(checkpoint),
            local_rope=Rope(need(checkpoint, "rope_local_base_freq"), None),
            qkv_bias=bias,
            output_bias=bias,
            head_norms=True,
            sandwich_norms=True,
            norm_offset=1.0 if checkpoint.gguf is None else 0.0,  # a GGUF holds the sums
            embedding_scale=need(checkpoint, "hidden_size") ** 0.5,
            attention_scale=need(checkpoint, "query_pre_attn_scalar") ** -0.5,
            logit_softcap=checkpoint.config.get("final_logit_softcapping"),
        )
