"""Causal convolution of a Gated DeltaNet layer's prompt tokens, straight into queries, keys and values.

On a GPU the inputs that a row's next tokens look back on are a ring: entry p % conv_kernel of a slot holds the input of position p. A token
is written where none of the tokens that its neighbours still need lies, so the programs of a decode step need not wait for each other.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.chunk_plan import CHUNK, ChunkPlan
from pocketllm.torch_engine.layers.gated_delta_net import DeltaNetSizes, causal_conv

_L2_EPS = tl.constexpr(1e-6)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """log(1 + exp(x)), right to float32 rounding where exp(x) is lost beside 1, too."""
    small = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + small
    return tl.where(x > 20.0, x, tl.where(one_more == 1.0, small, tl.log(one_more) * small / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))


@triton.jit(do_not_specialize_on_alignment=["state_slots", "positions"])
def _conv_kernel(
    mixed,
    conv,
    weight,
    state_slots,
    positions,
    row_starts,
    row_chunks,
    chunk_rows,
    query,
    key,
    value,
    mixed_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DIM: tl.constexpr,
):
    """One program: a chunk's tokens, one head of queries, keys or values."""
    CHANNELS: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    row = tl.load(chunk_rows + chunk)
    if row < 0:
        return
    start = tl.load(row_starts + row).to(tl.int64)
    length = tl.load(row_starts + row + 1) - tl.load(row_starts + row)
    first = (chunk - tl.load(row_chunks + row)) * CHUNK  # the chunk's first token, counted in the row
    inputs = mixed + start * mixed_stride  # of the row

    of_values = head >= 2 * KEY_HEADS
    dim = tl.where(of_values, VALUE_DIM, KEY_DIM)
    dims = tl.arange(0, BLOCK_DIM)
    channels = tl.where(of_values, 2 * KEY_HEADS * KEY_DIM + (head - 2 * KEY_HEADS) * VALUE_DIM, head * KEY_DIM) + dims
    in_head = dims < dim
    places = first + tl.arange(0, CHUNK)
    live = places < length

    total = tl.zeros([CHUNK, BLOCK_DIM], dtype=tl.float32)
    for back in tl.static_range(0, TAPS):
        tap = tl.load(weight + (TAPS - 1 - back) * CHANNELS + channels, mask=in_head, other=0.0)
        seen = (live & (places >= back))[:, None] & in_head[None, :]
        chunk_inputs = inputs + (first - back).to(tl.int64) * mixed_stride
        x = tl.load(chunk_inputs + (tl.arange(0, CHUNK)[:, None] * mixed_stride + channels[None, :]), mask=seen, other=0.0)
        total += x.to(tl.float32) * tap[None, :]
    if first == 0:  # its first tokens look back on what the ring holds; then the ring takes the row's last inputs
        slot = tl.load(state_slots + row)
        ring = conv + slot.to(tl.int64) * (TAPS * CHANNELS)
        position = tl.load(positions + start)
        for back in tl.static_range(1, TAPS):
            tap = tl.load(weight + (TAPS - 1 - back) * CHANNELS + channels, mask=in_head, other=0.0)
            earlier = position + places - back
            kept = (places < back) & live & (earlier >= 0)
            entry = (earlier + TAPS) % TAPS
            past = tl.load(ring + entry[:, None] * CHANNELS + channels[None, :], mask=kept[:, None] & in_head[None, :], other=0.0)
            total += past * tap[None, :]
        tl.debug_barrier()  # every thread has read its part
        for back in tl.static_range(0, TAPS):
            place = length - 1 - back
            present = in_head & (place >= 0) & (slot >= 0)
            last = tl.load(inputs + place.to(tl.int64) * mixed_stride + channels, mask=present, other=0.0)
            entry = (position + place + TAPS) % TAPS
            tl.store(ring + entry * CHANNELS + channels, last.to(tl.float32), mask=present)

    total = silu(total)
    tokens = tl.arange(0, CHUNK)[:, None]
    start += first
    stored = live[:, None] & in_head[None, :]
    if of_values:
        head_values = value + (start * VALUE_HEADS + head - 2 * KEY_HEADS) * VALUE_DIM
        tl.store(head_values + (tokens * (VALUE_HEADS * VALUE_DIM) + dims[None, :]), total.to(value.dtype.element_ty), mask=stored)
    else:
        total *= tl.rsqrt(tl.sum(total * total, axis=1) + _L2_EPS)[:, None]
        places_in_head = tokens * (KEY_HEADS * KEY_DIM) + dims[None, :]
        if head < KEY_HEADS:
            head_queries = query + (start * KEY_HEADS + head) * KEY_DIM
            tl.store(head_queries + places_in_head, (total * KEY_DIM**-0.5).to(query.dtype.element_ty), mask=stored)
        else:
            head_keys = key + (start * KEY_HEADS + head - KEY_HEADS) * KEY_DIM
            tl.store(head_keys + places_in_head, total.to(key.dtype.element_ty), mask=stored)


def conv_prefill(
    mixed: torch.Tensor,
    conv: torch.Tensor,
    state_slots: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    sizes: DeltaNetSizes,
    plan: ChunkPlan,
    *,
    num_warps: int = 8,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """SiLU of the causal convolution, brought to length 1 for queries and keys; the ring takes the rows' last inputs.

    Args:
        mixed: [num_tokens, at least conv_dim] of the compute dtype, queries, keys and values first; the last stride is 1.
        conv: [num_slots, conv_kernel, conv_dim] float32, changed in place.
        state_slots: [num_rows] int32; -1 for rows without tokens.
        positions: [num_tokens] int32, of a row's tokens one after another.
        weight: [conv_kernel, conv_dim] float32, the oldest token's first.
        sizes: heads and widths.
        plan: of the rows; tokens after the last row's are none's, and what is returned for them is not written.

    Returns:
        Queries of length key_dim ** -0.5 and keys of length 1, [num_tokens, num_key_heads, key_dim], and values
        [num_tokens, num_value_heads, value_dim], of mixed's dtype.
    """
    query = mixed.new_empty(mixed.shape[0], sizes.num_key_heads, sizes.key_dim)
    key = torch.empty_like(query)
    value = mixed.new_empty(mixed.shape[0], sizes.num_value_heads, sizes.value_dim)
    _conv_kernel[(2 * sizes.num_key_heads + sizes.num_value_heads, plan.num_chunks)](
        mixed,
        conv,
        weight,
        state_slots,
        positions,
        plan.row_starts,
        plan.row_chunks,
        plan.chunk_rows,
        query,
        key,
        value,
        mixed.stride(0),
        KEY_HEADS=sizes.num_key_heads,
        VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        TAPS=sizes.conv_kernel,
        CHUNK=CHUNK,
        BLOCK_DIM=triton.next_power_of_2(max(sizes.key_dim, sizes.value_dim)),
        num_warps=num_warps,
    )
    return query, key, value


def ring_conv_reference(x: torch.Tensor, ring: torch.Tensor, position: int, weight: torch.Tensor) -> torch.Tensor:
    """One row's tokens in torch.

    Args:
        x: [num_tokens, conv_dim] float32.
        ring: [conv_kernel, conv_dim] float32, changed in place.
        position: of x's first token.
        weight: [conv_kernel, conv_dim] float32.

    Returns:
        [num_tokens, conv_dim] float32, SiLU applied.
    """
    taps = weight.shape[0]
    earlier = torch.arange(position - taps + 1, position, device=x.device)
    tails = torch.where(earlier[:, None] >= 0, ring[earlier % taps], 0.0)
    mixed = causal_conv(x.unsqueeze(0), tails.unsqueeze(0), weight)[0]
    for place in range(max(0, x.shape[0] - taps), x.shape[0]):
        ring[(position + place) % taps] = x[place]
    return mixed
