"""DeepSeek-V4's choice of experts on a GPU, and what gate and up are held within."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs


def route_by_softplus(
    scores: torch.Tensor, bias: torch.Tensor | None, by_token: torch.Tensor | None, token_ids: torch.Tensor, top_k: int, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """What layers.routed_experts.Router computes of its product.

    Args:
        scores: [T, num_experts] float32, contiguous.
        bias: [num_experts] float32, or None.
        by_token: [vocab_size, top_k] int64, contiguous, or None; then by score, of equal ones the first.
        token_ids: [T] int64.
        top_k: experts a token.
        scale: sum of a token's shares.

    Returns:
        Experts int32 and shares float32, both [T, top_k].
    """
    T, E = scores.shape
    chosen = torch.empty(T, top_k, dtype=torch.int32, device=scores.device)
    shares = torch.empty(T, top_k, dtype=torch.float32, device=scores.device)
    padded = triton.next_power_of_2(E)
    _route_kernel[(T,)](
        scores, scores if bias is None else bias, token_ids if by_token is None else by_token, token_ids, chosen, shares, E, scale,
        BY_TOKEN=by_token is not None, TOP_K=top_k, PADDED=padded, PADDED_K=triton.next_power_of_2(top_k), num_warps=1, **launch_options(scores.device),
    )  # fmt: skip
    return chosen, shares


@triton.jit
def _root_of_softplus(x):
    """sqrt(log(1 + exp(x))), of small results as exact as of others."""
    small = tl.exp(-tl.abs(x))
    series = small * (1.0 - small * (0.5 - small * (0.3333333333 - 0.25 * small)))
    return tl.sqrt(tl.maximum(x, 0.0) + tl.where(small < 0.03, series, tl.log(1.0 + small)))


@triton.jit
def _route_kernel(
    scores, bias, by_token, token_ids, chosen, shares, num_experts, scale,
    BY_TOKEN: tl.constexpr, TOP_K: tl.constexpr, PADDED: tl.constexpr, PADDED_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, PADDED)
    number = tl.arange(0, PADDED_K)
    inside = lane < num_experts
    added = tl.zeros([PADDED], tl.float32)
    if not BY_TOKEN:
        added += tl.load(bias + lane, mask=inside, other=0.0)
    wait_for_inputs(PDL)
    score = _root_of_softplus(tl.load(scores + token * num_experts + lane, mask=inside, other=0.0))
    left = tl.where(inside, score + added, float("-inf"))
    own = tl.zeros([PADDED_K], tl.float32)
    for place in tl.static_range(TOP_K):
        if BY_TOKEN:
            expert = tl.load(by_token + tl.load(token_ids + token) * TOP_K + place).to(tl.int32)
        else:
            best = tl.max(left, 0)
            # of values that are no numbers too: an expert that there is
            expert = tl.minimum(tl.min(tl.where(left == best, lane, PADDED - 1), 0), num_experts - 1)
            left = tl.where(lane == expert, float("-inf"), left)
        tl.store(chosen + token * TOP_K + place, expert)
        own = tl.where(number == place, tl.sum(tl.where(lane == expert, score, 0.0), 0), own)
    own = own / (tl.sum(own, 0) + 1e-20) * scale
    tl.store(shares + token * TOP_K + number, own, mask=number < TOP_K)


def clamped_gate(x: torch.Tensor, limit: float) -> torch.Tensor:
    """layers.routed_experts.ClampedSwiGLU of x [T, 2 * size], any float dtype, contiguous, computed in float32: [T, size] in x's dtype."""
    T, size = x.shape[0], x.shape[1] // 2
    out = torch.empty(T, size, dtype=x.dtype, device=x.device)
    if T:
        block = min(512, triton.next_power_of_2(size))
        _clamped_gate_kernel[(triton.cdiv(size, block), T)](x, out, size, limit, BLOCK=block, num_warps=4, **launch_options(x.device))
    return out


@triton.jit
def _clamped_gate_kernel(x, out, size, limit, BLOCK: tl.constexpr, PDL: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_inputs(PDL)
    gate = tl.minimum(tl.load(x + row * 2 * size + columns, mask=inside, other=0.0).to(tl.float32), limit)
    up = tl.load(x + row * 2 * size + size + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.minimum(tl.maximum(up, -limit), limit)
    tl.store(out + row * size + columns, (gate * tl.sigmoid(gate) * up).to(out.dtype.element_ty), mask=inside)
