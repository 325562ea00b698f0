"""How many KV blocks, rows with a state and snapshots fit into the memory that the caches may take, as plain ints."""

from __future__ import annotations

from dataclasses import dataclass

from pocketllm.errors import ConfigurationError

BLOCK_SIZE = 16  # tokens
_SNAPSHOTS_A_ROW = 4
_LEAST_SNAPSHOT_INTERVAL = 512  # tokens
_UNCHUNKED_SNAPSHOT_INTERVAL = 8192  # tokens; each snapshot cuts a prompt that would be computed in one step
_LEAST_CONTEXT = 256  # tokens; a context is not shortened below this to make it fit


@dataclass(frozen=True, slots=True)
class CacheNeeds:
    """What a model's caches take.

    Args:
        token_bytes: keys and values of one token over all layers.
        slot_bytes: recurrent state of one row over all layers; 0 in a model without any.
        max_rows: most running rows.
        may_lower_rows: nobody asked for that many, so fewer do where their states would leave too little of the memory.
        context_length: most tokens of a row.
        may_shorten: nobody asked for that context, so a shorter one does where the memory is short.
        snapshots: prefixes are reused, so states are kept for that.
        chunk_tokens: most prompt tokens of a row in a step; 0 is all.
    """

    token_bytes: int
    slot_bytes: int
    max_rows: int
    may_lower_rows: bool
    context_length: int
    may_shorten: bool
    snapshots: bool
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of the caches.

    Args:
        num_blocks: KV blocks of BLOCK_SIZE tokens.
        max_rows: most running rows.
        context_length: most tokens of a row, no more than the blocks hold.
        num_snapshots: states kept beside those of running rows.
        interval_blocks: blocks between two snapshots of a long prompt.
        state_bytes: of all slots.
    """

    num_blocks: int
    max_rows: int
    context_length: int
    num_snapshots: int
    interval_blocks: int
    state_bytes: int


def plan_caches(needs: CacheNeeds, memory: int, *, fills: bool, remedy: str) -> CachePlan:
    """Divide `memory` bytes: states of the running rows, a quarter of what is left for snapshots, KV blocks.

    Rows that nobody asked for have at most half of it for their states. A context that was asked for comes before them, and before snapshots.

    Args:
        fills: take all of it for blocks; otherwise no more than all rows can use.
        remedy: what to do where it is too little besides lowering max_model_len, such as "raise kv_cache_memory".

    Raises:
        ConfigurationError: not even one row of the context, or of _LEAST_CONTEXT tokens where it may be shortened, fits; with the figures.
    """
    block_bytes = needs.token_bytes * BLOCK_SIZE
    context_length, per_row = needs.context_length, -(-needs.context_length // BLOCK_SIZE)
    promised = 0 if needs.may_shorten else per_row * block_bytes
    max_rows, num_snapshots = needs.max_rows, 0
    if needs.slot_bytes:
        if needs.may_lower_rows:
            max_rows = max(1, min(max_rows, (memory - max(memory // 2, promised)) // needs.slot_bytes))
        if needs.snapshots:
            left = memory - max_rows * needs.slot_bytes
            num_snapshots = max(0, min(_SNAPSHOTS_A_ROW * max_rows, min(left // 4, left - promised) // needs.slot_bytes))
    state_bytes = (max_rows + num_snapshots) * needs.slot_bytes
    num_blocks = max(0, memory - state_bytes) // block_bytes
    if num_blocks < per_row and needs.may_shorten and num_blocks * BLOCK_SIZE >= min(_LEAST_CONTEXT, context_length):
        context_length = num_blocks * BLOCK_SIZE
    elif num_blocks < per_row:
        beside = f" beside {state_bytes / 2**20:.0f} MiB of recurrent states" if state_bytes else ""
        needed, allowed = per_row * block_bytes / 2**20, num_blocks * block_bytes / 2**20
        raise ConfigurationError(
            f"A context of {context_length} tokens needs {needed:.0f} MiB of KV cache and {allowed:.0f} MiB may be used{beside}: "
            f"{remedy}, or lower max_model_len{' or max_batch_size' if state_bytes and max_rows > 1 else ''}.",
            param="kv_cache_memory",
        )
    if not fills:
        num_blocks = min(num_blocks, -(-context_length // BLOCK_SIZE) * max_rows)
    interval = max(needs.chunk_tokens, _LEAST_SNAPSHOT_INTERVAL) if needs.chunk_tokens else _UNCHUNKED_SNAPSHOT_INTERVAL
    return CachePlan(num_blocks, max_rows, context_length, num_snapshots, -(-interval // BLOCK_SIZE), state_bytes)
