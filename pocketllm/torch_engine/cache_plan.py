"""How many KV blocks, state slots and snapshots fit into the memory that the caches may take, as plain ints."""

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
        context_length: most tokens of a row.
        may_shorten: nobody asked for that context, so a shorter one does where the memory is short.
        snapshots: prefixes are reused, so states are kept for that.
        chunk_tokens: most prompt tokens of a row in a step; 0 is all.
    """

    token_bytes: int
    slot_bytes: int
    max_rows: int
    context_length: int
    may_shorten: bool
    snapshots: bool
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class CachePlan:
    """Sizes of the caches.

    Args:
        num_blocks: KV blocks of BLOCK_SIZE tokens.
        context_length: most tokens of a row, no more than the blocks hold.
        num_snapshots: states kept beside those of running rows.
        interval_blocks: blocks between two snapshots of a long prompt.
        state_bytes: of all slots.
    """

    num_blocks: int
    context_length: int
    num_snapshots: int
    interval_blocks: int
    state_bytes: int


def plan_caches(needs: CacheNeeds, memory: int, *, fills: bool, remedy: str) -> CachePlan:
    """Divide `memory` bytes: states of the running rows, a quarter of what is left for snapshots, KV blocks.

    Args:
        fills: take all of it for blocks; otherwise no more than all rows can use.
        remedy: what to do where it is too little besides lowering max_model_len, such as "raise kv_cache_memory".

    Raises:
        ConfigurationError: not even one row of the context, or of _LEAST_CONTEXT tokens where it may be shortened, fits; with the figures.
    """
    num_snapshots = 0
    if needs.slot_bytes and needs.snapshots:
        room = (memory - needs.max_rows * needs.slot_bytes) // 4 // needs.slot_bytes
        num_snapshots = max(0, min(_SNAPSHOTS_A_ROW * needs.max_rows, room))
    state_bytes = (needs.max_rows + num_snapshots) * needs.slot_bytes
    block_bytes = needs.token_bytes * BLOCK_SIZE
    num_blocks = max(0, memory - state_bytes) // block_bytes
    context_length, per_row = needs.context_length, -(-needs.context_length // BLOCK_SIZE)
    if num_blocks < per_row and needs.may_shorten and num_blocks * BLOCK_SIZE >= min(_LEAST_CONTEXT, context_length):
        context_length = num_blocks * BLOCK_SIZE
    elif num_blocks < per_row:
        beside = f" beside {state_bytes / 2**20:.0f} MiB of recurrent states" if state_bytes else ""
        needed, allowed = per_row * block_bytes / 2**20, num_blocks * block_bytes / 2**20
        raise ConfigurationError(
            f"A context of {context_length} tokens needs {needed:.0f} MiB of KV cache and {allowed:.0f} MiB may be used{beside}: "
            f"{remedy}, or lower max_model_len{' or max_batch_size' if state_bytes else ''}.",
            param="kv_cache_memory",
        )
    if not fills:
        num_blocks = min(num_blocks, -(-context_length // BLOCK_SIZE) * needs.max_rows)
    interval = max(needs.chunk_tokens, _LEAST_SNAPSHOT_INTERVAL) if needs.chunk_tokens else _UNCHUNKED_SNAPSHOT_INTERVAL
    return CachePlan(num_blocks, context_length, num_snapshots, -(-interval // BLOCK_SIZE), state_bytes)
