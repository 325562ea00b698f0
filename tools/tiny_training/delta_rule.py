"""The recurrent parts of the model in plain torch, for training: quick without kernels of their own, and differentiable on every device.

They stand in for transformers' functions of the same purpose, whose torch forms are slow and whose kernels have no gradient on some GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5

_CHUNK = 64


@contextmanager
def fast_training() -> Iterator[None]:
    """Within it, every Qwen3.5 of transformers uses the functions below. None of them continues from a cache."""
    originals = modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn
    modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn = _transformers_delta_rule, causal_conv
    try:
        yield
    finally:
        modeling_qwen3_5.torch_chunk_gated_delta_rule, modeling_qwen3_5.causal_conv1d_fn = originals


def chunked_delta_rule(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """The gated delta rule over whole rows: state = exp(decay) state; state += key (beta (value - stateᵀ key))ᵀ; output = stateᵀ query.

    Within a chunk the updates are one triangular system. From chunk to chunk the state goes through an affine map, which is known before any state is: what is
    left to do in order is one small product a chunk.

    Args:
        query, key: [rows, width, key_heads, key_dim]; they are normalized here.
        value: [rows, width, value_heads, value_dim]; consecutive heads share a key head.
        decay, beta: [rows, width, value_heads]; decay is a logarithm.

    Returns:
        [rows, width, value_heads, value_dim] in value's dtype. The work is in float32.
    """
    with torch.autocast(value.device.type, enabled=False):
        width, heads, value_dim = value.shape[1:]
        shared = heads // key.shape[2]
        q, k = (_normalized(x.float()).repeat_interleave(shared, dim=2) for x in (query, key))
        q, k, v = (_chunks(x) for x in (q * q.shape[-1] ** -0.5, k, value.float()))  # [rows, heads, chunks, _CHUNK, dim]
        gate, weight = (_chunks(x.float().unsqueeze(-1)) for x in (decay, beta))  # [rows, heads, chunks, _CHUNK, 1]
        total = gate.cumsum(3)
        later = torch.ones(_CHUNK, _CHUNK, dtype=torch.bool, device=value.device).triu(1)
        between = (total - total.transpose(3, 4)).masked_fill(later, float("-inf")).exp()  # decay from one token to a later one

        system = (k * weight) @ k.transpose(3, 4) * between  # what is below its diagonal counts
        sides = torch.cat([v * weight, k * (weight * total.exp())], dim=4)
        new, old = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True).split([value_dim, k.shape[-1]], dim=4)
        last = total[:, :, :, -1:]
        left = (k * (last - total).exp()).transpose(3, 4)
        maps = torch.eye(k.shape[-1], device=value.device) * last.exp() - left @ old  # [rows, heads, chunks, key_dim, key_dim]
        steps = left @ new  # [rows, heads, chunks, key_dim, value_dim]

        state = torch.zeros_like(steps[:, :, 0])
        states = [state]
        for chunk in range(steps.shape[2] - 1):
            state = maps[:, :, chunk] @ state + steps[:, :, chunk]
            states.append(state)
        before = torch.stack(states, dim=2)
        output: torch.Tensor = (q * total.exp()) @ before + (q @ k.transpose(3, 4) * between) @ (new - old @ before)
        return output.flatten(2, 3)[:, :, :width].transpose(1, 2).to(value.dtype)


def causal_conv(hidden_states: torch.Tensor, weight: torch.Tensor, bias: None = None, activation: str | None = None, **rest: Any) -> torch.Tensor:
    """A depthwise convolution and SiLU, as a sum of shifts: convolution libraries are slow at the gradient of its few weights.

    Args:
        hidden_states: [rows, channels, width].
        weight: [channels, kernel].
    """
    if bias is not None or activation != "silu":
        raise ValueError(f"Qwen3.5's convolution has no bias and ends in SiLU, not in {activation}.")
    kernel, width = weight.shape[1], hidden_states.shape[2]
    padded = F.pad(hidden_states.transpose(1, 2), (0, 0, kernel - 1, 0))  # [rows, width + kernel - 1, channels]
    taps = weight.to(padded.dtype).unbind(1)
    total = padded[:, :width] * taps[0]
    for place, tap in enumerate(taps[1:], start=1):
        total = total + padded[:, place : place + width] * tap
    return F.silu(total).transpose(1, 2)


def _transformers_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, **rest: Any
) -> tuple[torch.Tensor, None]:
    if rest.get("initial_state") is not None or rest.get("output_final_state"):
        raise ValueError("The training form of the delta rule has no cache: call the model with use_cache=False.")
    return chunked_delta_rule(query, key, value, g, beta), None


def _normalized(x: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)
    return found


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[rows, width, heads, dim] as [rows, heads, chunks, _CHUNK, dim], with zeros up to a whole chunk: they change no state."""
    padding = -x.shape[1] % _CHUNK
    return F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(1, 2).reshape(x.shape[0], x.shape[2], -1, _CHUNK, x.shape[3])
