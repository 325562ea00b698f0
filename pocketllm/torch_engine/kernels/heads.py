"""Query, key and value heads after their projection: normalised, rotated, and the last two stored in the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import begin_next, launch_options, wait_for_inputs
from pocketllm.torch_engine.layers.rope import rotate

_MANY_TOKENS = 256  # from here on the card is full with several tokens a program


def prepare_heads(
    heads: torch.Tensor,
    first_query: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_layer: torch.Tensor,
    *,
    early: bool = False,
) -> torch.Tensor:
    """Write each token's keys and values to its slot and give its queries.

    Args:
        heads: [num_tokens, width], rows any stride apart; from column `first_query` on stand the query, the key and the value heads.
        query_norm, key_norm: weights [head_dim] float32 of the RMS norm of every query and key head, or None for heads without one.
        eps: added to the mean square.
        cos, sin: [max_positions, rotary_dim / 2] float32; the pairs (x[i], x[i + rotary_dim / 2]) are rotated, the values after them are not.
        positions: [num_tokens] integers.
        slot_mapping: [num_tokens] integers; a token with -1 is not stored.
        cache_layer: [num_blocks, block_size, 2, num_kv_heads, head_dim].
        early: whether positions and slot_mapping may be read while the kernel ahead still runs; see launch.py.

    Returns:
        [num_tokens, num_heads, head_dim] in the cache's dtype.
    """
    num_tokens, half = heads.shape[0], cos.shape[1]
    queries = torch.empty((num_tokens, num_heads, head_dim), dtype=cache_layer.dtype, device=heads.device)
    if num_tokens == 0:
        return queries
    assert heads.stride(1) == 1 and cache_layer.stride(4) == 1 and cos.is_contiguous() and sin.is_contiguous()
    assert heads.shape[1] >= first_query + (num_heads + 2 * num_kv_heads) * head_dim
    block_tokens = 4 if num_tokens >= _MANY_TOKENS else 1
    padded = triton.next_power_of_2(head_dim)
    _prepare_heads[(triton.cdiv(num_tokens, block_tokens), num_heads + 2 * num_kv_heads)](
        heads,
        queries,
        cache_layer,
        query_norm,
        key_norm,
        cos,
        sin,
        positions,
        slot_mapping,
        eps,
        num_tokens,
        first_query,
        heads.stride(0),
        *cache_layer.stride()[:4],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        PADDED_DIM=padded,
        HALF=half,
        BLOCK_SIZE=cache_layer.shape[1],
        BLOCK_TOKENS=block_tokens,
        HAS_NORM=query_norm is not None,
        EARLY=early,
        num_warps=max(1, min(4, block_tokens * padded // 256)),
        **launch_options(heads.device),
    )
    return queries


@triton.jit(do_not_specialize=["num_tokens"])
def _prepare_heads(
    heads,
    queries,
    cache,
    query_norm,
    key_norm,
    cos,
    sin,
    positions,
    slot_mapping,
    eps,
    num_tokens,
    first_query,
    row_stride,
    block_stride,
    token_stride,
    value_stride,
    head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head, of any of the three kinds, of BLOCK_TOKENS tokens."""
    head = tl.program_id(1)
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    dims = tl.arange(0, PADDED_DIM)
    exists = tokens < num_tokens
    whole = exists[:, None] & (dims < HEAD_DIM)[None, :]
    begin_next(PDL)
    if not EARLY:
        wait_for_inputs(PDL)
    is_query = head < NUM_HEADS
    is_value = head >= NUM_HEADS + NUM_KV_HEADS
    other = tl.where(dims < HALF, dims + HALF, dims - HALF)  # the other value of each pair
    turns = dims < 2 * HALF
    position = tl.maximum(tl.load(positions + tokens, mask=exists, other=0), 0).to(tl.int64)
    slots = tl.load(slot_mapping + tokens, mask=exists, other=-1).to(tl.int64)
    angles = position[:, None] * HALF + tl.where(dims < HALF, dims, dims - HALF)[None, :]
    turned = exists[:, None] & turns[None, :] & (is_value == 0)
    turned_cos = tl.load(cos + angles, mask=turned, other=1.0)
    turned_sin = tl.load(sin + angles, mask=turned, other=0.0)
    if HAS_NORM:
        weight = _norm_weight(query_norm, key_norm, dims, dims < HEAD_DIM, is_query)
        other_weight = _norm_weight(query_norm, key_norm, other, turns, is_query)
    if EARLY:
        wait_for_inputs(PDL)
    rows = heads + tokens.to(tl.int64)[:, None] * row_stride + first_query + head * HEAD_DIM
    x = tl.load(rows + dims[None, :], mask=whole, other=0.0).to(tl.float32)
    if not is_value:
        x_other = tl.load(rows + other[None, :], mask=turned, other=0.0).to(tl.float32)  # of the cache line that was just read
        if HAS_NORM:
            factor = 1.0 / tl.sqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)
            x = x * factor[:, None] * weight[None, :]
            x_other = x_other * factor[:, None] * other_weight[None, :]
        x = x * turned_cos + x_other * tl.where((dims < HALF)[None, :], -turned_sin, turned_sin)
    if is_query:
        result = queries + (tokens.to(tl.int64)[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :]
        tl.store(result, x.to(queries.dtype.element_ty), mask=whole)
    else:
        kv_head = head - NUM_HEADS - tl.where(is_value, NUM_KV_HEADS, 0)
        places = slots // BLOCK_SIZE * block_stride + slots % BLOCK_SIZE * token_stride + kv_head * head_stride + tl.where(is_value, value_stride, 0)
        tl.store(cache + places[:, None] + dims[None, :], x.to(cache.dtype.element_ty), mask=whole & (slots >= 0)[:, None])


@triton.jit
def _norm_weight(query_norm, key_norm, dims, wanted, is_query):
    return tl.load(query_norm + dims, mask=wanted & is_query, other=0.0) + tl.load(key_norm + dims, mask=wanted & (is_query == 0), other=0.0)


def prepare_heads_reference(
    heads: torch.Tensor,
    first_query: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    query_norm: torch.Tensor | None,
    key_norm: torch.Tensor | None,
    eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    cache_layer: torch.Tensor,
) -> torch.Tensor:
    """The same in float32 with torch's operators."""
    count = num_heads + 2 * num_kv_heads
    by_head = heads[:, first_query : first_query + count * head_dim].unflatten(1, (count, head_dim)).float()
    query, key, value = by_head.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if query_norm is not None and key_norm is not None:
        query, key = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight for x, weight in ((query, query_norm), (key, key_norm)))
    turns = cos[positions.long()].unsqueeze(1), sin[positions.long()].unsqueeze(1)
    stored = slot_mapping >= 0
    slots = slot_mapping[stored].long()
    block_size = cache_layer.shape[1]
    cache_layer[slots // block_size, slots % block_size] = torch.stack([rotate(key, *turns), value], dim=1)[stored].to(cache_layer.dtype)
    return rotate(query, *turns).to(cache_layer.dtype)
