"""qwen3_5_moe and qwen3_5_moe_text: qwen3_5 with a mixture of experts in every layer, and one expert that all tokens share."""

from __future__ import annotations

from typing import ClassVar

import torch
import torch.nn.functional as F

from pocketllm.torch_engine.layers.activation import silu_and_mul
from pocketllm.torch_engine.layers.feed_forward import FeedForward, GatedFeedForward, MixtureOfExperts
from pocketllm.torch_engine.layers.linear import build_linear
from pocketllm.torch_engine.models.qwen3_5 import GGUF_LAYER_NAMES, Qwen3_5
from pocketllm.torch_engine.models.stored_layer import joined_experts


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

    def _build_feed_forward(self, prefix: str) -> FeedForward:
        config, experts, hidden = self.config, self.config.experts, self.config.hidden_size
        assert experts is not None
        router = self._take(f"{prefix}gate.weight", experts.count, hidden).float()
        if experts.layout == "separate":
            parts = [self._build_gated(f"{prefix}experts.{place}.", experts.intermediate_size) for place in range(experts.count)]
        else:
            stored = joined_experts(self._weights, f"{self._prefix}{prefix}experts.", experts, hidden)
            parts = [
                GatedFeedForward(build_linear(one.gate_up.tensors, self.compute_dtype), build_linear(one.down.tensors, self.compute_dtype), silu_and_mul)
                for one in stored
            ]
        gate_name = f"{prefix}shared_expert_gate.weight"
        shared_gate = self._take(gate_name, *((hidden,) if self._is_vector(gate_name) else (1, hidden))).float().view(1, hidden)
        shared = self._build_gated(f"{prefix}shared_expert.", config.intermediate_size)
        return _SharedExpert(MixtureOfExperts(router, parts, experts.top_k, normalize=experts.normalize), shared, shared_gate)


class _SharedExpert:
    """mixture(x) + sigmoid(gate x) * shared(x). gate: [1, hidden_size] float32."""

    def __init__(self, mixture: MixtureOfExperts, shared: GatedFeedForward, gate: torch.Tensor) -> None:
        self._mixture, self._shared, self._gate = mixture, shared, gate
        self.num_bytes = mixture.num_bytes + shared.num_bytes + gate.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        share = F.linear(x.float(), self._gate).sigmoid_()  # [num_tokens, 1]
        return self._mixture(x) + (self._shared(x) * share).to(x.dtype)
