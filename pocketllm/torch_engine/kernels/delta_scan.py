"""The gated delta rule token by token: for float32, and for GPUs whose tensor cores Triton does not use (before compute capability 8.0)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.causal_conv import silu, softplus
from pocketllm.torch_engine.kernels.chunk_plan import ChunkPlan
from pocketllm.torch_engine.layers.gated_delta_net import DeltaNetSizes


@triton.jit(do_not_specialize_on_alignment=["state_slots"])
def _scan_kernel(
    query,
    key,
    value,
    mixed,
    recurrent,
    state_slots,
    row_starts,
    decay_rate,
    dt_bias,
    norm_weight,
    out,
    mixed_stride,
    out_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):
    """One program: a row, one value head, whose matrix stays in registers."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0)
    row = tl.program_id(1)
    key_head = head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)
    key_dims, value_dims = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    in_key, in_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    slot = tl.load(state_slots + row).to(tl.int64)
    if slot < 0:
        return
    in_state = in_key[:, None] & in_value[None, :]
    matrix = recurrent + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM) + (key_dims[:, None] * VALUE_DIM + value_dims[None, :])
    state = tl.load(matrix, mask=in_state, other=0.0)
    rate = tl.load(decay_rate + head)
    bias = tl.load(dt_bias + head)
    weight = tl.load(norm_weight + value_dims, mask=in_value, other=0.0)

    start = tl.load(row_starts + row).to(tl.int64)
    length = tl.load(row_starts + row + 1) - tl.load(row_starts + row)
    query += (start * KEY_HEADS + key_head) * KEY_DIM
    key += (start * KEY_HEADS + key_head) * KEY_DIM
    value += (start * VALUE_HEADS + head) * VALUE_DIM
    gates = mixed + start * mixed_stride + CHANNELS
    out += start * out_stride + head * VALUE_DIM
    for _ in range(0, length):
        q = tl.load(query + key_dims, mask=in_key, other=0.0).to(tl.float32)
        k = tl.load(key + key_dims, mask=in_key, other=0.0).to(tl.float32)
        v = tl.load(value + value_dims, mask=in_value, other=0.0).to(tl.float32)
        z = tl.load(gates + head * VALUE_DIM + value_dims, mask=in_value, other=0.0).to(tl.float32)
        beta = 1.0 / (1.0 + tl.exp(-tl.load(gates + VALUE_HEADS * VALUE_DIM + head).to(tl.float32)))
        a = tl.load(gates + VALUE_HEADS * VALUE_DIM + VALUE_HEADS + head).to(tl.float32)

        state *= tl.exp(rate * softplus(a + bias))
        correction = (v - tl.sum(state * k[:, None], axis=0)) * beta
        state += k[:, None] * correction[None, :]
        read = tl.sum(state * q[:, None], axis=0)
        read *= tl.rsqrt(tl.sum(read * read, axis=0) / VALUE_DIM + eps)
        tl.store(out + value_dims, (read * weight * silu(z)).to(out.dtype.element_ty), mask=in_value)
        query += KEY_HEADS * KEY_DIM
        key += KEY_HEADS * KEY_DIM
        value += VALUE_HEADS * VALUE_DIM
        gates += mixed_stride
        out += out_stride
    tl.store(matrix, state, mask=in_state)


def scanned_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixed: torch.Tensor,
    recurrent: torch.Tensor,
    state_slots: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    sizes: DeltaNetSizes,
    plan: ChunkPlan,
    out: torch.Tensor,
    num_warps: int = 8,
) -> None:
    """What chunked_rule does, with the same arguments."""
    _scan_kernel[(sizes.num_value_heads, plan.num_rows)](
        query,
        key,
        value,
        mixed,
        recurrent,
        state_slots,
        plan.row_starts,
        decay_rate,
        dt_bias,
        norm_weight,
        out,
        mixed.stride(0),
        out.stride(0),
        eps,
        KEY_HEADS=sizes.num_key_heads,
        VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        TILED=sizes.tiled,
        BLOCK_KEY=triton.next_power_of_2(sizes.key_dim),
        BLOCK_VALUE=triton.next_power_of_2(sizes.value_dim),
        num_warps=num_warps,
    )
