"""The gated delta rule over whole prompts: chunks of 64 tokens, three kernels.

Within a chunk, each token's correction u_i = beta_i (v_i - what the decayed state and the tokens before it give for k_i) solves a unit lower
triangular system; (1 + L)^-1 turns it into u = U - W S with S the state before the chunk, so that only S is left to go from chunk to chunk:

    solve   all chunks at once: U = (1 + L)^-1 beta v and W = (1 + L)^-1 beta exp(g) k, g being the decay's logarithm summed over the chunk
    states  a row's chunks one after another: u = U - W S, then S <- exp(g_last) S + k^T (exp(g_last - g) u)
    read    all chunks at once: o = exp(g) q S + (q k^T, decayed, later tokens cut off) u, then the gated norm of each head

Sums and states are float32; operands of the products are of the compute dtype (float32 ones in three products of TF32). (1 + L)^-1 is built
from blocks of 2 to blocks of 64: the inverse of [[A, 0], [C, B]] has -B^-1 C A^-1 below. No entry of any of them is above 1 in size, as keys
have length 1 and beta is below 1, so float16 (11 bits, as many as TF32 has) serves for it where the compute dtype is not float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.causal_conv import silu, softplus
from pocketllm.torch_engine.kernels.chunk_plan import CHUNK, ChunkPlan
from pocketllm.torch_engine.layers.gated_delta_net import DeltaNetSizes


@dataclass(frozen=True, slots=True)
class ChunkConfig:
    """Launch sizes of the three kernels.

    Args:
        solve_warps, states_warps, read_warps: warps of a program.
        states_values: value channels of a program of `states`, a power of two of at least 32.
        states_stages: chunks that `states` keeps in flight, at least 2: with 1 Triton 3.6 stores operands to shared memory right before Hopper's tensor
            cores read them, its fence behind the barrier instead of ahead of it, and products were seen to be wrong.
    """

    solve_warps: int = 4
    states_values: int = 32
    states_warps: int = 4
    states_stages: int = 3
    read_warps: int = 4

    def __post_init__(self) -> None:
        if self.states_stages < 2:
            raise ValueError(f"states_stages is at least 2, not {self.states_stages}.")


@triton.jit
def _key_head(head, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, TILED: tl.constexpr):
    return head % KEY_HEADS if TILED else head // (VALUE_HEADS // KEY_HEADS)


@triton.jit
def _chunk(chunk, row_starts, row_chunks, chunk_rows, CHUNK: tl.constexpr):
    """The chunk's first token and how many tokens it has; none where it is no row's."""
    row = tl.load(chunk_rows + chunk)
    known = tl.maximum(row, 0)
    start = tl.load(row_starts + known) + (chunk - tl.load(row_chunks + known)) * CHUNK
    length = tl.minimum(tl.load(row_starts + known + 1) - start, CHUNK)
    return start.to(tl.int64), tl.where(row < 0, 0, length)


@triton.jit
def _solve_kernel(
    key,
    value,
    mixed,
    decay_rate,
    dt_bias,
    row_starts,
    row_chunks,
    chunk_rows,
    from_state,
    from_values,
    decays,
    mixed_stride,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
    SOLVE_DTYPE: tl.constexpr,
):
    """One program: a chunk, one value head."""
    BETA: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + 2 * VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0)
    start, length = _chunk(tl.program_id(1), row_starts, row_chunks, chunk_rows, CHUNK)
    if length == 0:
        return
    places = tl.arange(0, CHUNK)
    live = places < length
    key_dims, value_dims = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    in_keys = live[:, None] & (key_dims < KEY_DIM)[None, :]
    in_values = live[:, None] & (value_dims < VALUE_DIM)[None, :]
    head_keys = (start * KEY_HEADS + _key_head(head, KEY_HEADS, VALUE_HEADS, TILED)) * KEY_DIM
    k = tl.load(key + head_keys + (places[:, None] * (KEY_HEADS * KEY_DIM) + key_dims[None, :]), mask=in_keys, other=0.0)

    first = start * VALUE_HEADS + head
    gates = mixed + start * mixed_stride + BETA + head
    b = tl.load(gates + places * mixed_stride, mask=live, other=0.0).to(tl.float32)
    a = tl.load(gates + VALUE_HEADS + places * mixed_stride, mask=live, other=0.0).to(tl.float32)
    beta = tl.where(live, 1.0 / (1.0 + tl.exp(-b)), 0.0)
    decay = tl.load(decay_rate + head) * softplus(a + tl.load(dt_bias + head))
    since_start = tl.cumsum(tl.where(live, decay, 0.0), axis=0)
    tl.store(decays + first + places * VALUE_HEADS, since_start, mask=live)

    rows, columns = places[:, None], places[None, :]
    earlier = rows > columns
    products = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    between = tl.exp(tl.where(earlier, since_start[:, None] - since_start[None, :], 0.0))
    system = tl.where(earlier, products * between * beta[:, None], 0.0)
    inverse = tl.where(rows == columns, 1.0, tl.where(rows // 2 == columns // 2, -system, 0.0))
    system = system.to(SOLVE_DTYPE)
    for step in tl.static_range(1, 6):  # from blocks of 2 ** step to blocks twice as large
        below = tl.where((rows >> step + 1 == columns >> step + 1) & (rows >> step != columns >> step), system, 0.0)
        blocks = inverse.to(SOLVE_DTYPE)
        part = tl.dot(blocks, below.to(SOLVE_DTYPE), input_precision=PRECISION)
        inverse -= tl.dot(part.to(SOLVE_DTYPE), blocks, input_precision=PRECISION)

    inverse = inverse.to(k.dtype)
    value_places = places[:, None] * (VALUE_HEADS * VALUE_DIM) + value_dims[None, :]
    v = tl.load(value + first * VALUE_DIM + value_places, mask=in_values, other=0.0)
    u = tl.dot(inverse, (v.to(tl.float32) * beta[:, None]).to(v.dtype), input_precision=PRECISION)
    tl.store(from_values + first * VALUE_DIM + value_places, u.to(v.dtype), mask=in_values)
    decayed = k.to(tl.float32) * (beta * tl.exp(since_start))[:, None]
    w = tl.dot(inverse, decayed.to(k.dtype), input_precision=PRECISION)
    w_places = places[:, None] * (VALUE_HEADS * KEY_DIM) + key_dims[None, :]
    tl.store(from_state + first * KEY_DIM + w_places, w.to(k.dtype), mask=in_keys)


@triton.jit(do_not_specialize_on_alignment=["state_slots"])
def _states_kernel(
    key,
    from_state,
    corrections,
    decays,
    recurrent,
    state_slots,
    row_starts,
    row_chunks,
    states,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: a row, one value head, BLOCK_VALUE of its value channels. `corrections` comes in as U and leaves as u."""
    head = tl.program_id(1)
    row = tl.program_id(2)
    key_dims = tl.arange(0, BLOCK_KEY)
    value_dims = tl.program_id(0) * BLOCK_VALUE + tl.arange(0, BLOCK_VALUE)
    in_key, in_value = key_dims < KEY_DIM, value_dims < VALUE_DIM
    in_state = in_key[:, None] & in_value[None, :]
    state_places = key_dims[:, None] * VALUE_DIM + value_dims[None, :]
    slot = tl.load(state_slots + row)
    slot_state = recurrent + (slot.to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    state = tl.load(slot_state + state_places, mask=in_state & (slot >= 0), other=0.0)

    places = tl.arange(0, CHUNK)
    start = tl.load(row_starts + row).to(tl.int64)
    length = tl.load(row_starts + row + 1) - tl.load(row_starts + row)
    chunk = tl.load(row_chunks + row).to(tl.int64)
    w_places = places[:, None] * (VALUE_HEADS * KEY_DIM) + key_dims[None, :]
    k_places = places[:, None] * (KEY_HEADS * KEY_DIM) + key_dims[None, :]
    u_places = places[:, None] * (VALUE_HEADS * VALUE_DIM) + value_dims[None, :]
    from_state += (start * VALUE_HEADS + head) * KEY_DIM
    key += (start * KEY_HEADS + _key_head(head, KEY_HEADS, VALUE_HEADS, TILED)) * KEY_DIM
    corrections += (start * VALUE_HEADS + head) * VALUE_DIM
    decays += start * VALUE_HEADS + head
    states += (chunk * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    for done in range(0, length, CHUNK):
        operand = state.to(key.dtype.element_ty)
        tl.store(states + state_places, operand, mask=in_state)
        live = places < length - done
        w = tl.load(from_state + w_places, mask=live[:, None] & in_key[None, :], other=0.0)
        k = tl.load(key + k_places, mask=live[:, None] & in_key[None, :], other=0.0)
        u = tl.load(corrections + u_places, mask=live[:, None] & in_value[None, :], other=0.0).to(tl.float32)
        since_start = tl.load(decays + places * VALUE_HEADS, mask=live, other=0.0)
        last = tl.load(decays + (tl.minimum(length - done, CHUNK) - 1) * VALUE_HEADS)

        u -= tl.dot(w, operand, input_precision=PRECISION)
        tl.store(corrections + u_places, u.to(key.dtype.element_ty), mask=live[:, None] & in_value[None, :])
        decayed = u * tl.where(live, tl.exp(last - since_start), 0.0)[:, None]
        state = tl.dot(tl.trans(k), decayed.to(k.dtype), acc=state * tl.exp(last), input_precision=PRECISION)
        from_state += CHUNK * VALUE_HEADS * KEY_DIM
        key += CHUNK * KEY_HEADS * KEY_DIM
        corrections += CHUNK * VALUE_HEADS * VALUE_DIM
        decays += CHUNK * VALUE_HEADS
        states += VALUE_HEADS * KEY_DIM * VALUE_DIM
    tl.store(slot_state + state_places, state, mask=in_state & (slot >= 0))


@triton.jit
def _read_kernel(
    query,
    key,
    corrections,
    decays,
    states,
    mixed,
    norm_weight,
    row_starts,
    row_chunks,
    chunk_rows,
    out,
    mixed_stride,
    out_stride,
    eps,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TILED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_KEY: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program: a chunk, one value head."""
    GATE: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    start, length = _chunk(chunk, row_starts, row_chunks, chunk_rows, CHUNK)
    if length == 0:
        return
    places = tl.arange(0, CHUNK)
    live = places < length
    key_dims, value_dims = tl.arange(0, BLOCK_KEY), tl.arange(0, BLOCK_VALUE)
    in_keys = live[:, None] & (key_dims < KEY_DIM)[None, :]
    in_values = live[:, None] & (value_dims < VALUE_DIM)[None, :]
    head_keys = (start * KEY_HEADS + _key_head(head, KEY_HEADS, VALUE_HEADS, TILED)) * KEY_DIM
    key_places = places[:, None] * (KEY_HEADS * KEY_DIM) + key_dims[None, :]
    q = tl.load(query + head_keys + key_places, mask=in_keys, other=0.0)
    k = tl.load(key + head_keys + key_places, mask=in_keys, other=0.0)
    first = start * VALUE_HEADS + head
    since_start = tl.load(decays + first + places * VALUE_HEADS, mask=live, other=0.0)
    head_state = states + (chunk.to(tl.int64) * VALUE_HEADS + head) * (KEY_DIM * VALUE_DIM)
    in_state = (key_dims < KEY_DIM)[:, None] & (value_dims < VALUE_DIM)[None, :]
    state = tl.load(head_state + (key_dims[:, None] * VALUE_DIM + value_dims[None, :]), mask=in_state, other=0.0)
    value_places = places[:, None] * (VALUE_HEADS * VALUE_DIM) + value_dims[None, :]
    u = tl.load(corrections + first * VALUE_DIM + value_places, mask=in_values, other=0.0)

    read = tl.dot(q, state, input_precision=PRECISION) * tl.exp(since_start)[:, None]
    seen = (places[:, None] >= places[None, :]) & live[:, None] & live[None, :]
    between = tl.exp(tl.where(seen, since_start[:, None] - since_start[None, :], 0.0))
    within = tl.where(seen, tl.dot(q, tl.trans(k), input_precision=PRECISION) * between, 0.0)
    read = tl.dot(within.to(u.dtype), u, acc=read, input_precision=PRECISION)

    read *= tl.rsqrt(tl.sum(read * read, axis=1) / VALUE_DIM + eps)[:, None]
    read *= tl.load(norm_weight + value_dims, mask=value_dims < VALUE_DIM, other=0.0)[None, :]
    head_gates = mixed + start * mixed_stride + GATE + head * VALUE_DIM
    gate = tl.load(head_gates + (places[:, None] * mixed_stride + value_dims[None, :]), mask=in_values, other=0.0).to(tl.float32)
    head_out = out + start * out_stride + head * VALUE_DIM
    tl.store(head_out + (places[:, None] * out_stride + value_dims[None, :]), (read * silu(gate)).to(out.dtype.element_ty), mask=in_values)


def chunked_rule(
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
    config: ChunkConfig,
) -> None:
    """The delta rule over the rows' tokens and the gated norm of what it reads.

    Args:
        query, key, value: what conv_prefill returns.
        mixed: [num_tokens, W], [.. | gate z | beta | decay] after the convolution's channels; the last stride is 1.
        recurrent: [num_slots, num_value_heads, key_dim, value_dim] float32, changed in place.
        state_slots: [num_rows] int32; -1 for rows without tokens.
        decay_rate, dt_bias: [num_value_heads] float32.
        norm_weight: [value_dim] float32.
        eps: of the norm.
        sizes: heads and widths.
        plan: of the rows; tokens after the last row's are none's, and `out` is not written for them.
        out: [num_tokens, value_size] of the compute dtype, written; the last stride is 1.
        config: launch sizes.
    """
    heads, dims = sizes.num_value_heads, (sizes.key_dim, sizes.value_dim)
    from_state = key.new_empty(key.shape[0], heads, sizes.key_dim)
    corrections = torch.empty_like(value)
    decays = torch.empty(key.shape[0], heads, dtype=torch.float32, device=key.device)
    states = key.new_empty(plan.num_chunks, heads, *dims)
    rows = (plan.row_starts, plan.row_chunks)
    # Triton 3.6 multiplies wrongly on Hopper where four warps have a right operand of 16 columns and a left one in registers.
    block_key, block_value = (max(32, triton.next_power_of_2(dim)) for dim in dims)
    exact = key.dtype == torch.float32
    common = {
        "KEY_HEADS": sizes.num_key_heads,
        "VALUE_HEADS": heads,
        "KEY_DIM": sizes.key_dim,
        "VALUE_DIM": sizes.value_dim,
        "TILED": sizes.tiled,
        "CHUNK": CHUNK,
        "BLOCK_KEY": block_key,
        "PRECISION": "tf32x3" if exact else "tf32",
    }
    _solve_kernel[(heads, plan.num_chunks)](
        key,
        value,
        mixed,
        decay_rate,
        dt_bias,
        *rows,
        plan.chunk_rows,
        from_state,
        corrections,
        decays,
        mixed.stride(0),
        **common,
        BLOCK_VALUE=block_value,
        SOLVE_DTYPE=tl.float32 if exact else tl.float16,
        num_warps=config.solve_warps,
    )
    values = min(config.states_values, block_value)
    _states_kernel[(triton.cdiv(sizes.value_dim, values), heads, plan.num_rows)](
        key,
        from_state,
        corrections,
        decays,
        recurrent,
        state_slots,
        *rows,
        states,
        **common,
        BLOCK_VALUE=values,
        num_warps=config.states_warps,
        num_stages=config.states_stages,
    )
    _read_kernel[(heads, plan.num_chunks)](
        query,
        key,
        corrections,
        decays,
        states,
        mixed,
        norm_weight,
        *rows,
        plan.chunk_rows,
        out,
        mixed.stride(0),
        out.stride(0),
        eps,
        **common,
        BLOCK_VALUE=block_value,
        num_warps=config.read_warps,
    )
