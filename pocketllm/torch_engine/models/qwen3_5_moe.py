"""qwen3_5_moe and qwen3_5_moe_text: qwen3_5 with a mixture of experts in every layer, and one expert that all tokens share."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from pocketllm.torch_engine.models.qwen3_5 import GGUF_LAYER_NAMES, Qwen3_5
from pocketllm.torch_engine.models.stored_layer import take_experts, take_feed_forward
from pocketllm.torch_engine.weights import StoredExperts


class Qwen3_5Moe(Qwen3_5):
    """The model on one device; arguments and errors are those of model.ModelClass."""

    gguf_layer_names: ClassVar = GGUF_LAYER_NAMES | {
        "mlp.gate.weight": "ffn_gate_inp.weight",
        "mlp.experts.gate_proj.weight": "ffn_gate_exps.weight",
        "mlp.experts.up_proj.weight": "ffn_up_exps.weight",
        "mlp.experts.down_proj.weight": "ffn_down_exps.weight",
        "mlp.shared_expert.gate_proj.weight": "ffn_gate_shexp.weight",
        "mlp.shared_expert.up_proj.weight": "ffn_up_shexp.weight",
        "mlp.shared_expert.down_proj.weight": "ffn_down_shexp.weight",
        "mlp.shared_expert_gate.weight": "ffn_gate_inp_shexp.weight",
    }

    def _take_feed_forward(self, prefix: str) -> StoredExperts:
        config, hidden = self.config, self.config.hidden_size
        assert config.experts is not None
        mixture = take_experts(self._weights, prefix, config.experts, hidden, "silu", self._share)
        gate_name = f"{prefix}shared_expert_gate.weight"
        gate = self._weights.take(gate_name, (hidden,) if self._is_vector(gate_name) else (1, hidden)).float().view(1, hidden)
        shared = take_feed_forward(self._weights, f"{prefix}shared_expert.", hidden, config.intermediate_size, "silu", self._share)
        return replace(mixture, shared=shared, shared_gate=gate)
