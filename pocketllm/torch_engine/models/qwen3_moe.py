"""qwen3_moe: qwen3 with a mixture of experts in most layers (Yang et al., 2025)."""

from __future__ import annotations

from typing import ClassVar

from pocketllm.checkpoint import Checkpoint
from pocketllm.torch_engine.models.decoder import Decoder
from pocketllm.torch_engine.models.decoder_spec import DecoderSpec, Experts, need, only, read_spec
from pocketllm.torch_engine.models.qwen3 import Qwen3


class Qwen3Moe(Decoder):
    """The model on one device; arguments and errors are those of model.ModelClass."""

    gguf_layer_names: ClassVar = Qwen3.gguf_layer_names | {
        "mlp.gate": "ffn_gate_inp",
        "mlp.experts.gate_proj": "ffn_gate_exps",
        "mlp.experts.up_proj": "ffn_up_exps",
        "mlp.experts.down_proj": "ffn_down_exps",
    }

    @staticmethod
    def read_spec(checkpoint: Checkpoint) -> DecoderSpec:
        only(checkpoint, mlp_bias=False)
        bias = need(checkpoint, "attention_bias")
        step, dense = need(checkpoint, "decoder_sparse_step"), need(checkpoint, "mlp_only_layers")
        fused = any(info.name.endswith(".mlp.experts.gate_up_proj") for info in checkpoint.tensors)
        experts = Experts(
            count=need(checkpoint, "num_experts"),
            top_k=need(checkpoint, "num_experts_per_tok"),
            intermediate_size=need(checkpoint, "moe_intermediate_size"),
            normalize=need(checkpoint, "norm_topk_prob"),
            layers=frozenset(layer for layer in range(need(checkpoint, "num_hidden_layers")) if layer not in dense and (layer + 1) % step == 0),
            layout="stacked" if checkpoint.gguf is not None else "fused" if fused else "separate",
        )
        windows = (need(checkpoint, "sliding_window"),) * need(checkpoint, "num_hidden_layers")
        return read_spec(checkpoint, qkv_bias=bias, output_bias=bias, head_norms=True, windows=windows, experts=experts)
