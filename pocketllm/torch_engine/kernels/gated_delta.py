"""Gated DeltaNet beside its two projections: one kernel for tokens that decode, four (or two) for prompts.

layers/gated_delta_net.py has the formulas; here the convolution's past is a ring (causal_conv.py).
"""

from __future__ import annotations

import threading
from functools import cache

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.causal_conv import conv_prefill, ring_conv_reference, silu, softplus
from pocketllm.torch_engine.kernels.chunk_plan import ChunkPlan
from pocketllm.torch_engine.kernels.delta_chunks import ChunkConfig, chunked_rule
from pocketllm.torch_engine.kernels.delta_scan import scanned_rule
from pocketllm.torch_engine.kernels.launch import begin_next, capability, launch_options, wait_for_inputs
from pocketllm.torch_engine.layers.gated_delta_net import DeltaNetSizes, chunked_delta_rule, gated_rms_norm

_L2_EPS = tl.constexpr(1e-6)
_MAX_HEADS = 2**16  # rows times heads of a step whose heads are shared between programs


@triton.jit
def _past_taps(ring, weight, channels, mask, position, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """What earlier tokens give to a token's convolution of `channels`, and the weights of all taps.

    All taps are one block: loads of a vector each are so small that the compiler repeats them in every warp, in the layout of the matrix's rows.
    """
    taps = tl.arange(0, BLOCK_TAPS)
    places = position - (TAPS - 1) + taps
    past = ((taps < TAPS - 1) & (places >= 0))[:, None] & mask[None, :]
    x = tl.load(ring + ((places + TAPS) % TAPS * CHANNELS)[:, None] + channels[None, :], mask=past, other=0.0)
    weights = tl.load(weight + taps[:, None] * CHANNELS + channels[None, :], mask=(taps < TAPS)[:, None] & mask[None, :], other=0.0)
    return tl.sum(x * weights, axis=0), weights


@triton.jit
def _own_tap(token, channels, mask, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr):
    """The token itself, in the line of the last tap; the other lines are zeros."""
    own = (tl.arange(0, BLOCK_TAPS) == TAPS - 1)[:, None] & mask[None, :]
    return tl.load(token + channels[None, :], mask=own, other=0.0).to(tl.float32)


@triton.jit
def _convolve(
    x, past, weights, ring, channels, mask, position, writes, CHANNELS: tl.constexpr, TAPS: tl.constexpr, BLOCK_TAPS: tl.constexpr
):  # fmt: skip
    """The token's convolution in float32, SiLU applied; where `writes`, the ring takes the token."""
    own = (tl.arange(0, BLOCK_TAPS) == TAPS - 1)[:, None] & mask[None, :]
    tl.store(tl.broadcast_to(ring + position % TAPS * CHANNELS + channels[None, :], x.shape), x, mask=own & writes)
    return silu(past + tl.sum(x * weights, axis=0))


@triton.jit
def _finish_head(read, gate, value_dims, in_value, result, eps, VALUE_DIM: tl.constexpr):
    """Write the norm of what one head has read, times `gate`."""
    read *= tl.rsqrt(tl.sum(read * read, axis=0) / VALUE_DIM + eps) * gate
    tl.store(result + value_dims, read.to(result.dtype.element_ty), mask=in_value)


@triton.jit
def _decode_kernel(
    mixed,
    conv,
    recurrent,
    state_slots,
    positions,
    conv_weight,
    decay_rate,
    dt_bias,
    norm_weight,
    out,
    partial,
    tickets,
    mixed_stride,
    out_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TAPS: tl.constexpr,
    TILED: tl.constexpr,
    BLOCK_TAPS: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    SPLIT: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: a row, one value head, BLOCK_VALUE of its value channels, whose part of the matrix is read once and written once.

    With EARLY (launch.py) all but the token is read, and the earlier tokens' part of the convolution computed, while the kernel ahead still runs.

    The norm goes over all channels of a head: of the SPLIT programs that share one, the last to arrive computes it, and resets the ticket.
    """
    KEYS: tl.constexpr = KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEYS + VALUE_HEADS * VALUE_DIM
    share = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    key_dims, value_dims = tl.arange(0, BLOCK_KEY), share * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    places = key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    all_dims = tl.arange(0, BLOCK_VALUE * SPLIT)
    in_key, in_value, in_head = key_dims < KEY_DIM, value_dims < VALUE_DIM, all_dims < VALUE_DIM
    if TILED:
        key_head = head % KEY_HEADS
        first = head < KEY_HEADS  # one of the value heads that share a key head writes its channels
    else:
        key_head = head // (VALUE_HEADS // KEY_HEADS)
        first = head % (VALUE_HEADS // KEY_HEADS) == 0
    first &= share == 0
    q_channels = key_head * KEY_DIM + key_dims
    k_channels = KEYS + q_channels
    v_channels = 2 * KEYS + head * VALUE_DIM + value_dims
    begin_next(PDL)
    if not EARLY:
        wait_for_inputs(PDL)

    stored_slot = tl.load(state_slots + row).to(tl.int64)
    position = tl.load(positions + row)
    slot = tl.maximum(stored_slot, 0)
    matrix = recurrent + (slot * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    ring = conv + slot * (TAPS * CHANNELS)
    if BLOCK_KEY == KEY_DIM and BLOCK_VALUE * SPLIT == VALUE_DIM:
        state = tl.load(matrix + places)
    else:
        state = tl.load(matrix + places, mask=in_key[:, None] & in_value[None, :], other=0.0)
    q_past, q_weights = _past_taps(ring, conv_weight, q_channels, in_key, position, CHANNELS, TAPS, BLOCK_TAPS)
    k_past, k_weights = _past_taps(ring, conv_weight, k_channels, in_key, position, CHANNELS, TAPS, BLOCK_TAPS)
    v_past, v_weights = _past_taps(ring, conv_weight, v_channels, in_value, position, CHANNELS, TAPS, BLOCK_TAPS)
    rate = tl.load(decay_rate + head)
    bias = tl.load(dt_bias + head)
    norm_scale = tl.load(norm_weight + all_dims, mask=in_head, other=0.0)
    if EARLY:
        wait_for_inputs(PDL)

    result = out + row * out_stride + head * VALUE_DIM
    if stored_slot < 0:
        tl.store(result + value_dims, tl.zeros([BLOCK_VALUE], dtype=out.dtype.element_ty), mask=in_value)
    else:
        token = mixed + row * mixed_stride
        gates = token + CHANNELS
        q_token = _own_tap(token, q_channels, in_key, TAPS, BLOCK_TAPS)
        k_token = _own_tap(token, k_channels, in_key, TAPS, BLOCK_TAPS)
        v_token = _own_tap(token, v_channels, in_value, TAPS, BLOCK_TAPS)
        b = tl.load(gates + VALUE_HEADS * VALUE_DIM + head).to(tl.float32)
        a = tl.load(gates + VALUE_HEADS * VALUE_DIM + VALUE_HEADS + head).to(tl.float32)
        z = tl.load(gates + head * VALUE_DIM + all_dims, mask=in_head, other=0.0).to(tl.float32)
        k = _convolve(k_token, k_past, k_weights, ring, k_channels, in_key, position, first, CHANNELS, TAPS, BLOCK_TAPS)
        q = _convolve(q_token, q_past, q_weights, ring, q_channels, in_key, position, first, CHANNELS, TAPS, BLOCK_TAPS)
        v = _convolve(v_token, v_past, v_weights, ring, v_channels, in_value, position, True, CHANNELS, TAPS, BLOCK_TAPS)
        beta = 1.0 / (1.0 + tl.exp(-b))
        decay = tl.exp(rate * softplus(a + bias))
        gate = norm_scale * silu(z)

        q *= tl.rsqrt(tl.sum(q * q, axis=0) + _L2_EPS) * KEY_DIM**-0.5
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + _L2_EPS)
        # With S the matrix as loaded, S' = decay S + k c^T: what q reads of S' is decay S^T q + (q k) c, so S is gone through once.
        remembered = tl.sum(state * k[:, None], axis=0)
        read = tl.sum(state * q[:, None], axis=0)
        correction = (v - decay * remembered) * beta
        read = decay * read + tl.sum(q * k, axis=0) * correction
        place = row * VALUE_HEADS + head
        reads = partial + place * VALUE_DIM
        if SPLIT > 1:
            tl.store(reads + value_dims, read, mask=in_value)
        state = state * decay + k[:, None] * correction[None, :]
        if BLOCK_KEY == KEY_DIM and BLOCK_VALUE * SPLIT == VALUE_DIM:
            tl.store(matrix + places, state)
        else:
            tl.store(matrix + places, state, mask=in_key[:, None] & in_value[None, :])
        if SPLIT == 1:
            _finish_head(read, gate, all_dims, in_head, result, eps, VALUE_DIM)
        else:
            tl.debug_barrier()
            if tl.atomic_add(tickets + place, 1, sem="acq_rel") == SPLIT - 1:
                whole = tl.load(reads + all_dims, mask=in_head, other=0.0, cache_modifier=".cg")
                tl.store(tickets + place, 0)
                _finish_head(whole, gate, all_dims, in_head, result, eps, VALUE_DIM)


@cache
def _tickets(device: torch.device, thread: int) -> torch.Tensor:
    """Zeros, which every launch leaves as zeros; those of one thread, an engine's, run one after another, so they share them. Made outside of any
    CUDA graph."""
    return torch.zeros(_MAX_HEADS, dtype=torch.int32, device=device)


def delta_decode(
    mixed: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    state_slots: torch.Tensor,
    positions: torch.Tensor,
    conv_weight: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    sizes: DeltaNetSizes,
    *,
    out: torch.Tensor | None = None,
    early: bool = False,
    split: int | None = None,
    num_warps: int = 2,
) -> torch.Tensor:
    """One token of each row: convolution, delta rule and gated norm.

    Args:
        mixed: [num_rows, conv_dim + value_size + 2 * num_value_heads] of the compute dtype, [queries, keys, values | gate z | beta | decay];
            the last stride is 1.
        conv: [num_slots, conv_kernel, conv_dim] float32, the ring, changed in place; what it holds for positions below 0 is not read.
        recurrent: [num_slots, num_value_heads, key_dim, value_dim] float32, contiguous, changed in place.
        state_slots: [num_rows] int32; -1 stands for no row: nothing is changed and 0 comes out.
        positions: [num_rows] int32.
        conv_weight: [conv_kernel, conv_dim] float32, the oldest token's first.
        decay_rate: [num_value_heads] float32, below 0.
        dt_bias: [num_value_heads] float32.
        norm_weight: [value_dim] float32.
        eps: of the norm.
        sizes: heads and widths.
        out: where the result goes, the last stride 1; None makes it.
        early: whether conv, recurrent, state_slots and positions may be read while the kernel ahead still runs; see launch.py.
        split: programs that share a head, a power of two; None is one for each 32 value channels.
        num_warps: of a program.

    Returns:
        [num_rows, value_size] of mixed's dtype.
    """
    num_rows, heads = mixed.shape[0], sizes.num_value_heads
    if out is None:
        out = mixed.new_empty(num_rows, sizes.value_size)
    block_value = triton.next_power_of_2(sizes.value_dim)
    split = split or max(1, block_value // 32)
    if num_rows * heads > _MAX_HEADS:
        split = 1
    partial = tickets = out
    if split > 1:
        partial = torch.empty(num_rows, sizes.value_size, dtype=torch.float32, device=mixed.device)
        tickets = _tickets(mixed.device, threading.get_ident())
    _decode_kernel[(split, heads, num_rows)](
        mixed,
        conv,
        recurrent,
        state_slots,
        positions,
        conv_weight,
        decay_rate,
        dt_bias,
        norm_weight,
        out,
        partial,
        tickets,
        mixed.stride(0),
        out.stride(0),
        eps,
        KEY_HEADS=sizes.num_key_heads,
        VALUE_HEADS=sizes.num_value_heads,
        KEY_DIM=sizes.key_dim,
        VALUE_DIM=sizes.value_dim,
        TAPS=sizes.conv_kernel,
        TILED=sizes.tiled,
        BLOCK_TAPS=triton.next_power_of_2(sizes.conv_kernel),
        BLOCK_KEY=triton.next_power_of_2(sizes.key_dim),
        BLOCK_VALUE=block_value // split,
        SPLIT=split,
        EARLY=early,
        num_warps=num_warps,
        **launch_options(mixed.device),
    )
    return out


def scans(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether prompts are taken token by token on `device`: products of `dtype` there do not run on tensor cores at its full precision."""
    return dtype == torch.float32 or capability(device) < (8, 0)


def delta_prefill(
    mixed: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    state_slots: torch.Tensor,
    positions: torch.Tensor,
    plan: ChunkPlan,
    conv_weight: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    sizes: DeltaNetSizes,
    *,
    out: torch.Tensor | None = None,
    config: ChunkConfig | None = None,
    conv_warps: int = 8,
) -> torch.Tensor:
    """Several tokens of each row; a row may go on where an earlier step has left it.

    Args:
        mixed: [num_tokens, ..] as in delta_decode, the rows one after another.
        state_slots: [num_rows] int32; -1 for rows without tokens.
        positions: [num_tokens] int32.
        plan: of the rows; tokens after the last row's are none's, and the result is not written for them.
        config: launch sizes of the chunked form; None chooses, and takes tokens one by one where the dtype or the GPU is not one for chunks.
        conv_warps: warps of a program of the convolution.
        The others are delta_decode's.

    Returns:
        [num_tokens, value_size] of mixed's dtype.
    """
    if out is None:
        out = mixed.new_empty(mixed.shape[0], sizes.value_size)
    query, key, value = conv_prefill(mixed, conv, state_slots, positions, conv_weight, sizes, plan, num_warps=conv_warps)
    rest = (mixed, recurrent, state_slots, decay_rate, dt_bias, norm_weight, eps, sizes, plan, out)
    if config is None and scans(mixed.device, mixed.dtype):
        scanned_rule(query, key, value, *rest)
    else:
        chunked_rule(query, key, value, *rest, config or ChunkConfig())
    return out


def gated_delta_reference(
    mixed: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    state_slots: torch.Tensor,
    positions: torch.Tensor,
    query_lengths: tuple[int, ...],
    conv_weight: torch.Tensor,
    decay_rate: torch.Tensor,
    dt_bias: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    sizes: DeltaNetSizes,
) -> torch.Tensor:
    """delta_prefill, or with lengths of 1 delta_decode, in torch's float32: [num_tokens, value_size] float32."""
    heads = torch.arange(sizes.num_value_heads)
    key_heads = heads % sizes.num_key_heads if sizes.tiled else heads // (sizes.num_value_heads // sizes.num_key_heads)
    keys = sizes.num_key_heads * sizes.key_dim
    out, start = [], 0
    for slot, length in zip(state_slots.tolist(), query_lengths, strict=True):
        rows = mixed[start : start + length].float()
        if slot < 0:
            out.append(rows.new_zeros(length, sizes.value_size))
        else:
            qkv, z, b, a = rows.split([sizes.conv_dim, sizes.value_size, sizes.num_value_heads, sizes.num_value_heads], dim=-1)
            convolved = ring_conv_reference(qkv, conv[slot], int(positions[start]), conv_weight)
            query, key, value = convolved.split([keys, keys, sizes.value_size], dim=-1)
            query, key = (x.unflatten(-1, (sizes.num_key_heads, sizes.key_dim)) for x in (query, key))
            query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS.value) for x in (query, key))
            value, z = (x.unflatten(-1, (sizes.num_value_heads, sizes.value_dim)) for x in (value, z))
            decay = decay_rate * F.softplus(a + dt_bias)
            read = chunked_delta_rule(query * sizes.key_dim**-0.5, key, value, decay, b.sigmoid(), recurrent[slot], key_heads)
            out.append(gated_rms_norm(read, z, norm_weight, eps).flatten(1))
        start += length
    return torch.cat(out)
