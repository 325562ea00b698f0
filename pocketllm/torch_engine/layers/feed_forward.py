"""The feed-forward part of a decoder layer on the CPU: dense, or a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from pocketllm.torch_engine.layers.linear import Linear

# x [num_tokens, hidden_size], experts and their shares [num_tokens, top_k] -> the weighted sum of what the experts give, in x's shape and dtype
MixExperts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class TokenWise(Protocol):
    """x: [num_tokens, hidden_size] in the activations' dtype -> the same shape and dtype."""

    num_bytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Experts(Protocol):
    """A layer's experts, by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, place: int, /) -> TokenWise: ...


class GatedFeedForward:
    """down(activation(gate x) * (up x)).

    Args:
        gate_up: both matrices, gate first.
        down: [hidden_size, intermediate_size].
        activation: one of activation.GATED_ACTIVATIONS.
    """

    def __init__(self, gate_up: Linear, down: Linear, activation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.gate_up, self.down, self._activation = gate_up, down, activation
        self.num_bytes = gate_up.num_bytes + down.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._activation(self.gate_up(x)))


class MixtureOfExperts:
    """Each token's `top_k` most likely experts, weighted by their share of the router's softmax over all experts (Shazeer et al., 2017).

    Args:
        router: [num_experts, hidden_size] float32; it computes in float32 under every dtype, for near ties change experts.
        experts: in the router's order.
        top_k: experts a token.
        normalize: divide the chosen shares by their sum.
    """

    def __init__(self, router: torch.Tensor, experts: Sequence[TokenWise], top_k: int, *, normalize: bool) -> None:
        self._router, self._experts, self._top_k, self._normalize = router, experts, top_k, normalize
        self.num_bytes = router.nbytes + sum(expert.num_bytes for expert in experts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shares, chosen = torch.nn.functional.linear(x.float(), self._router).softmax(-1).topk(self._top_k, dim=-1)  # [num_tokens, top_k]
        if self._normalize:
            shares = shares / shares.sum(-1, keepdim=True)
        return mix_experts(self._experts, x, chosen, shares)


def mix_experts(experts: Experts, x: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """The sum of the chosen experts' results for each token, weighted by their shares: each expert computes its tokens in one product.

    Args:
        experts: all of them.
        x: [num_tokens, hidden_size].
        chosen: [num_tokens, top_k] int64.
        shares: [num_tokens, top_k] float32.

    Returns:
        The shape and dtype of x.
    """
    order = chosen.flatten().argsort(stable=True)
    tokens = order // chosen.shape[1]  # [num_tokens * top_k]
    weights = shares.flatten()[order].unsqueeze(1)
    counts = chosen.flatten().bincount(minlength=len(experts)).tolist()
    mixed = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = 0
    for place, count in enumerate(counts):
        if count:
            mine = tokens[start : start + count]
            mixed.index_add_(0, mine, experts[place](x[mine]).float() * weights[start : start + count])
            start += count
    return mixed.to(x.dtype)


class SharedExpert:
    """mixture(x) + sigmoid(gate x) * shared(x). gate: [1, hidden_size] float32."""

    def __init__(self, mixture: TokenWise, shared: TokenWise, gate: torch.Tensor) -> None:
        self._mixture, self._shared, self._gate = mixture, shared, gate
        self.num_bytes = mixture.num_bytes + shared.num_bytes + gate.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        share = torch.nn.functional.linear(x.float(), self._gate).sigmoid_()  # [num_tokens, 1]
        return self._mixture(x) + (self._shared(x) * share).to(x.dtype)
