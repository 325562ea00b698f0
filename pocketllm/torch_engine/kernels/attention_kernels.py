"""Triton kernels of attention over the paged KV cache; attention.py launches them.

They read the cache in tiles of tokens through the block table and keep a running maximum and sum of exponentials (Milakov and Gimelshein,
2018; Dao et al., 2022), in base 2. `splits` is a plain number, so that one compiled kernel serves all of them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import begin_next, wait_for_inputs


@triton.jit
def _see(
    queries, maxima, sums, values_seen, keys, values, tokens, first_seen, last_seen, scale_log2,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The running softmax (see _attend) with the tile of `tokens` added, whose keys and values are [BLOCK_TOKENS, PADDED_DIM]."""
    scores = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
    if MASKED:
        seen = tokens[None, :] <= last_seen[:, None]
        if WINDOWED:
            seen = seen & (tokens[None, :] >= first_seen[:, None])
        scores = tl.where(seen, scores, float("-inf"))
    new_maxima = tl.maximum(maxima, tl.max(scores, axis=1) * scale_log2)
    shift = new_maxima
    if MASKED:
        shift = tl.where(new_maxima == float("-inf"), 0.0, new_maxima)  # a query that has seen nothing yet
    weights = tl.exp2(scores * scale_log2 - shift[:, None])
    shrink = tl.exp2(maxima - shift)
    sums = sums * shrink + tl.sum(weights, axis=1)
    values_seen = tl.dot(weights.to(values.dtype), values, values_seen * shrink[:, None], input_precision=PRECISION)
    return new_maxima, sums, values_seen


@triton.jit
def _attend(
    queries,
    maxima,
    sums,
    values_seen,
    cache,
    table,
    first_seen,
    last_seen,
    begin,
    end,
    last_token,
    scale_log2,
    block_stride,
    token_stride,
    value_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Let `queries` [M, PADDED_DIM] see the tokens [begin, end) of a row; `cache` points to the keys of a KV head.

    maxima, sums [M] and values_seen [M, PADDED_DIM] are the running softmax, in and out. With MASKED, query m sees tokens up to last_seen[m]
    alone, and reads past `last_token` are turned to it; with WINDOWED, from first_seen[m] on.
    """
    dims = tl.arange(0, PADDED_DIM)
    offsets = tl.arange(0, BLOCK_TOKENS)
    # A tile's blocks are read one tile ahead: Triton would not load keys and values ahead if it had to wait for a load to know where they are.
    block = tl.load(table + tl.minimum(begin + offsets, last_token) // BLOCK_SIZE, mask=(offsets >= 0) & (begin < end), other=0)
    for start in range(begin, end, BLOCK_TOKENS):
        tokens = start + offsets
        stored = tl.minimum(tokens, last_token) if MASKED else tokens
        places = cache + block.to(tl.int64) * block_stride + (stored % BLOCK_SIZE) * token_stride
        places = places[:, None] + dims[None, :]
        block = tl.load(table + tl.minimum(tokens + BLOCK_TOKENS, last_token) // BLOCK_SIZE)
        if HEAD_DIM == PADDED_DIM:
            keys = tl.load(places)
            values = tl.load(places + value_stride)
        else:
            keys = tl.load(places, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            values = tl.load(places + value_stride, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        maxima, sums, values_seen = _see(
            queries, maxima, sums, values_seen, keys, values, tokens, first_seen, last_seen, scale_log2, MASKED, WINDOWED, PRECISION
        )
    return maxima, sums, values_seen


@triton.jit
def _write(
    values_seen,
    maxima,
    sums,
    rows,
    heads,
    valid,
    split,
    gate,
    out,
    partial,
    logarithms,
    gate_stride,
    splits,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    HAS_GATE: tl.constexpr,
):
    """Store [M, PADDED_DIM] sums of values for `rows` and `heads` [M]: as results, or as those of one split."""
    dims = tl.arange(0, PADDED_DIM)
    shown = valid[:, None] & (dims < HEAD_DIM)[None, :]
    result = values_seen * (1.0 / tl.where(sums == 0.0, 1.0, sums))[:, None]
    rows = rows.to(tl.int64)
    if not SPLIT:
        columns = heads[:, None] * HEAD_DIM + dims[None, :]
        if HAS_GATE:
            opening = tl.load(gate + rows[:, None] * gate_stride + columns, mask=shown, other=0.0).to(tl.float32)
            result = result * (1.0 / (1.0 + tl.exp(-opening)))
        tl.store(out + rows[:, None] * (NUM_HEADS * HEAD_DIM) + columns, result.to(out.dtype.element_ty), mask=shown)
    else:
        places = (rows * NUM_HEADS + heads) * splits + split
        tl.store(logarithms + places, maxima + tl.log2(tl.where(sums == 0.0, 1.0, sums)), mask=valid)
        tl.store(partial + places[:, None] * HEAD_DIM + dims[None, :], result, mask=shown)


@triton.jit(do_not_specialize=["splits", "table_stride"])
def decode(
    queries,
    cache,
    block_tables,
    row_slots,
    lengths,
    gate,
    out,
    partial,
    logarithms,
    scale_log2,
    window,
    table_stride,
    gate_stride,
    block_stride,
    token_stride,
    value_stride,
    head_stride,
    splits,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PDL: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED_GROUP: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row, one KV head with all its query heads, one split of the context.

    With EARLY (launch.py) the first tile of keys and values, all but those of the row's last token, is read while the kernel ahead still runs.
    """
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    begin_next(PDL)
    if not EARLY:
        wait_for_inputs(PDL)
    length = tl.load(lengths + row)
    line = tl.maximum(tl.load(row_slots + row), 0).to(tl.int64)
    first = 0
    if WINDOWED:
        first = tl.maximum(length - window, 0)
    # Not rounded to whole tiles, so that all splits work; a tile's rest reads the last token again, which costs no bandwidth.
    share = tl.maximum(tl.cdiv(length - first, splits), BLOCK_SIZE)
    begin = first + split * share
    end = tl.minimum(begin + share, length)

    dims = tl.arange(0, PADDED_DIM)
    table = block_tables + line * table_stride
    keys_of_head = cache + kv_head * head_stride
    tokens = begin + tl.arange(0, BLOCK_TOKENS)
    inside = tokens < end
    block = tl.load(table + tokens // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    places = keys_of_head + (block * block_stride + (tokens % BLOCK_SIZE) * token_stride)[:, None] + dims[None, :]
    present = inside[:, None] & (dims < HEAD_DIM)[None, :]
    if EARLY:
        earlier = present & (tokens < length - 1)[:, None]
        keys = tl.load(places, mask=earlier, other=0.0)
        values = tl.load(places + value_stride, mask=earlier, other=0.0)
        wait_for_inputs(PDL)
        own = present & (tokens == length - 1)[:, None]
        keys = tl.where(own, tl.load(places, mask=own, other=0.0), keys)
        values = tl.where(own, tl.load(places + value_stride, mask=own, other=0.0), values)
    else:
        keys = tl.load(places, mask=present, other=0.0)
        values = tl.load(places + value_stride, mask=present, other=0.0)

    members = tl.arange(0, PADDED_GROUP)
    heads = kv_head * GROUP + members
    shown = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    asked = tl.load(queries + (row.to(tl.int64) * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0.0)
    maxima = tl.full([PADDED_GROUP], float("-inf"), tl.float32)
    sums = tl.zeros([PADDED_GROUP], tl.float32)
    values_seen = tl.zeros([PADDED_GROUP, PADDED_DIM], tl.float32)
    last_seen = tl.zeros([PADDED_GROUP], tl.int32) + (end - 1)
    maxima, sums, values_seen = _see(asked, maxima, sums, values_seen, keys, values, tokens, last_seen, last_seen, scale_log2, True, False, PRECISION)
    maxima, sums, values_seen = _attend(
        asked,
        maxima,
        sums,
        values_seen,
        keys_of_head,
        table,
        last_seen,
        last_seen,
        begin + BLOCK_TOKENS,
        end,
        end - 1,
        scale_log2,
        block_stride,
        token_stride,
        value_stride,
        BLOCK_SIZE,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_TOKENS,
        True,
        False,
        PRECISION,
    )
    rows = tl.zeros([PADDED_GROUP], tl.int32) + row
    _write(
        values_seen,
        maxima,
        sums,
        rows,
        heads,
        members < GROUP,
        split,
        gate,
        out,
        partial,
        logarithms,
        gate_stride,
        splits,
        SPLIT,
        NUM_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        HAS_GATE,
    )


# A step's prompts begin anywhere in `row_slots` and `lengths`.
@triton.jit(do_not_specialize=["splits", "table_stride"], do_not_specialize_on_alignment=["row_slots", "lengths"])
def prefill(
    queries,
    cache,
    block_tables,
    row_slots,
    lengths,
    gate,
    out,
    partial,
    logarithms,
    starts,
    scale_log2,
    window,
    table_stride,
    gate_stride,
    block_stride,
    token_stride,
    value_stride,
    head_stride,
    splits,
    SPLIT: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PDL: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """BLOCK_QUERIES queries of one row and head, one split of what they see."""
    head = tl.program_id(0) // splits
    split = tl.program_id(0) % splits
    row = tl.program_id(2)
    wait_for_inputs(PDL)
    start = tl.load(starts + row)
    num_queries = tl.load(starts + row + 1) - start
    # The last queries see most, so they begin first.
    first_query = (tl.num_programs(1) - 1 - tl.program_id(1)) * BLOCK_QUERIES
    if first_query >= num_queries:
        return
    length = tl.load(lengths + row)
    line = tl.maximum(tl.load(row_slots + row), 0).to(tl.int64)
    members = first_query + tl.arange(0, BLOCK_QUERIES)
    valid = members < num_queries
    last_seen = length - num_queries + members
    first_position = length - num_queries + first_query
    begin = 0
    first_seen = last_seen
    if WINDOWED:
        first_seen = last_seen - window + 1
        begin = tl.maximum(first_position - window + 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS
    end = tl.minimum(first_position + BLOCK_QUERIES, length)
    if SPLIT:
        share = tl.cdiv(tl.cdiv(end - begin, splits), BLOCK_TOKENS) * BLOCK_TOKENS
        begin += split * share
        end = tl.minimum(begin + share, end)
    # Tiles up to here are seen whole by every query.
    whole = tl.minimum(tl.maximum((first_position + 1) // BLOCK_TOKENS * BLOCK_TOKENS, begin), tl.maximum(end, begin) // BLOCK_TOKENS * BLOCK_TOKENS)

    dims = tl.arange(0, PADDED_DIM)
    rows = start + members
    shown = valid[:, None] & (dims < HEAD_DIM)[None, :]
    asked = tl.load(queries + (rows.to(tl.int64) * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :], mask=shown, other=0.0)
    maxima = tl.full([BLOCK_QUERIES], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_QUERIES], tl.float32)
    values_seen = tl.zeros([BLOCK_QUERIES, PADDED_DIM], tl.float32)
    keys = cache + (head // GROUP) * head_stride
    table = block_tables + line * table_stride
    if not WINDOWED:
        maxima, sums, values_seen = _attend(
            asked,
            maxima,
            sums,
            values_seen,
            keys,
            table,
            first_seen,
            last_seen,
            begin,
            whole,
            length - 1,
            scale_log2,
            block_stride,
            token_stride,
            value_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_TOKENS,
            False,
            False,
            PRECISION,
        )
        begin = whole
    maxima, sums, values_seen = _attend(
        asked,
        maxima,
        sums,
        values_seen,
        keys,
        table,
        first_seen,
        last_seen,
        begin,
        end,
        length - 1,
        scale_log2,
        block_stride,
        token_stride,
        value_stride,
        BLOCK_SIZE,
        HEAD_DIM,
        PADDED_DIM,
        BLOCK_TOKENS,
        True,
        WINDOWED,
        PRECISION,
    )
    heads = tl.zeros([BLOCK_QUERIES], tl.int32) + head
    _write(
        values_seen,
        maxima,
        sums,
        rows,
        heads,
        valid,
        split,
        gate,
        out,
        partial,
        logarithms,
        gate_stride,
        splits,
        SPLIT,
        NUM_HEADS,
        HEAD_DIM,
        PADDED_DIM,
        HAS_GATE,
    )


@triton.jit(do_not_specialize=["num_splits"])
def combine(
    partial,
    logarithms,
    gate,
    out,
    gate_stride,
    num_splits,
    BLOCK_DIMS: tl.constexpr,
    PADDED_SPLITS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HAS_GATE: tl.constexpr,
    PDL: tl.constexpr,
):
    """BLOCK_DIMS values of one query and head, from all splits; a split that saw nothing has -inf as its logarithm, and its values are not read."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    dims = tl.program_id(2) * BLOCK_DIMS + tl.arange(0, BLOCK_DIMS)
    shown = dims < HEAD_DIM
    splits = tl.arange(0, PADDED_SPLITS)
    wait_for_inputs(PDL)
    places = (row * NUM_HEADS + head) * num_splits + splits
    logs = tl.load(logarithms + places, mask=splits < num_splits, other=float("-inf"))
    saw = logs > float("-inf")
    values = tl.load(partial + places[:, None] * HEAD_DIM + dims[None, :], mask=saw[:, None] & shown[None, :], other=0.0)
    greatest = tl.max(logs, axis=0)
    weights = tl.exp2(logs - tl.where(greatest == float("-inf"), 0.0, greatest))
    total = tl.sum(weights, axis=0)
    result = tl.sum(values * weights[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    columns = head * HEAD_DIM + dims
    if HAS_GATE:
        opening = tl.load(gate + row * gate_stride + columns, mask=shown, other=0.0).to(tl.float32)
        result = result * (1.0 / (1.0 + tl.exp(-opening)))
    tl.store(out + row * (NUM_HEADS * HEAD_DIM) + columns, result.to(out.dtype.element_ty), mask=shown)
