"""Routing of DeepSeek-V4 (2026): experts by score, or by the token's id, and how they are mixed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from pocketllm.torch_engine.layers.feed_forward import MixExperts, TokenWise


@dataclass(frozen=True, slots=True)
class ClampedSwiGLU:
    """silu(gate) * up of x = [gate | up], gate at most `limit` and up within it: [num_tokens, 2 * size] -> [num_tokens, size] in x's dtype."""

    limit: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate.clamp(max=self.limit)).mul_(up.clamp(-self.limit, self.limit))


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses each token's experts and their shares: sqrt(softplus(score)), brought to the sum `scale`.

    Args:
        weight: [num_experts, hidden_size] float32; it computes in float32 under every dtype, for near ties change experts.
        bias: [num_experts] float32, added when the `top_k` best are chosen and not to their shares; None where the id chooses.
        by_token: [vocab_size, top_k] int64, the experts of each token id; None where the scores choose.
        top_k: experts a token.
        scale: sum of a token's shares.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    by_token: torch.Tensor | None
    top_k: int
    scale: float

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.weight, self.bias, self.by_token) if tensor is not None)

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x: [num_tokens, hidden_size], token_ids: [num_tokens] -> experts int64 and shares float32, both [num_tokens, top_k]."""
        scores = F.softplus(F.linear(x.float(), self.weight)).sqrt()
        if self.by_token is not None:
            chosen = self.by_token[token_ids]
        else:
            assert self.bias is not None
            chosen = (scores + self.bias).topk(self.top_k, dim=-1).indices
        shares = scores.gather(1, chosen)
        return chosen, shares / (shares.sum(-1, keepdim=True) + 1e-20) * self.scale


class RoutedExperts:
    """Experts that a router chooses, and one that every token has.

    Args:
        router: chooses.
        mix: x, experts and shares to the sum of the experts' results, weighted; in x's dtype.
        shared: every token's.
        expert_bytes: of the experts that `mix` has loaded.

    Attributes:
        is_capturable: a CUDA graph can hold them: they never wait for the device.
    """

    is_capturable = False

    def __init__(self, router: Router, mix: MixExperts, shared: TokenWise, expert_bytes: int) -> None:
        self._router, self._mix, self._shared = router, mix, shared
        self.num_bytes = router.num_bytes + shared.num_bytes + expert_bytes

    def __call__(self, x: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size] in the activations' dtype -> the same shape, float32."""
        chosen, shares = self._router(x, token_ids)
        return self._mix(x, chosen, shares).float() + self._shared(x).float()
