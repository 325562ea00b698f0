"""How memory is divided between KV blocks, states of rows and snapshots."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pocketllm.errors import ConfigurationError
from pocketllm.torch_engine.cache_plan import BLOCK_SIZE, CacheNeeds, CachePlan, plan_caches

TOKEN, SLOT, CONTEXT, ROWS = 100, 10_000, 1024, 8
CONTEXT_BYTES = CONTEXT * TOKEN
NEEDS = CacheNeeds(TOKEN, 0, ROWS, may_lower_rows=True, context_length=CONTEXT, may_shorten=True, snapshots=True, chunk_tokens=512)
HYBRID = replace(NEEDS, slot_bytes=SLOT)


def plan(memory: int, needs: CacheNeeds = NEEDS, *, fills: bool = False, **changes: Any) -> CachePlan:
    """The plan, which takes no more than `memory`, holds its context, and has at least one row."""
    needs = replace(needs, **changes)
    made = plan_caches(needs, memory, fills=fills, remedy="buy memory")
    assert made.num_blocks * BLOCK_SIZE * needs.token_bytes + made.state_bytes <= memory
    assert made.state_bytes == (made.max_rows + made.num_snapshots) * needs.slot_bytes
    assert made.context_length <= made.num_blocks * BLOCK_SIZE
    assert 1 <= made.max_rows <= needs.max_rows
    return made


def test_all_rows_get_a_full_context_and_no_more_where_there_is_room() -> None:
    assert plan(100 * CONTEXT_BYTES) == CachePlan(ROWS * CONTEXT // BLOCK_SIZE, ROWS, CONTEXT, 0, 32, 0)


def test_memory_that_was_asked_for_is_filled() -> None:
    assert plan(100 * CONTEXT_BYTES, fills=True).num_blocks == 100 * CONTEXT // BLOCK_SIZE


def test_fewer_blocks_than_all_rows_could_use_do() -> None:
    made = plan(2 * CONTEXT_BYTES)
    assert (made.num_blocks, made.max_rows, made.context_length) == (2 * CONTEXT // BLOCK_SIZE, ROWS, CONTEXT)


@pytest.mark.parametrize("fills", [False, True])
def test_a_context_that_nobody_asked_for_is_as_long_as_the_blocks(fills: bool) -> None:
    made = plan(CONTEXT_BYTES // 2, fills=fills)
    assert (made.context_length, made.num_blocks) == (CONTEXT // 2, CONTEXT // 2 // BLOCK_SIZE)


def test_a_context_is_not_shortened_below_256_tokens() -> None:
    assert plan(256 * TOKEN).context_length == 256
    with pytest.raises(ConfigurationError):
        plan(256 * TOKEN - 1)


def test_a_context_that_is_no_whole_number_of_blocks_has_room() -> None:
    assert plan(2 * BLOCK_SIZE * TOKEN, context_length=20).context_length == 20
    with pytest.raises(ConfigurationError):
        plan(2 * BLOCK_SIZE * TOKEN - 1, context_length=20)


def test_too_little_memory_is_refused_with_the_figures_and_the_remedy() -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(3 * 2**20, token_bytes=4096, may_shorten=False)
    assert str(caught.value) == "A context of 1024 tokens needs 4 MiB of KV cache and 3 MiB may be used: buy memory, or lower max_model_len."
    assert caught.value.param == "kv_cache_memory"


def test_too_little_memory_beside_states_names_the_rows() -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(3 * 2**20, token_bytes=4096, may_shorten=False, may_lower_rows=False, slot_bytes=2**18)
    assert str(caught.value) == (
        "A context of 1024 tokens needs 4 MiB of KV cache and 1 MiB may be used beside 2 MiB of recurrent states: "
        "buy memory, or lower max_model_len or max_batch_size."
    )


def test_snapshots_take_a_quarter_of_what_the_rows_leave() -> None:
    made = plan(ROWS * SLOT + 4 * 5 * SLOT, HYBRID, fills=True)
    assert (made.max_rows, made.num_snapshots, made.state_bytes) == (ROWS, 5, 13 * SLOT)
    assert made.num_blocks == 15 * SLOT // (BLOCK_SIZE * TOKEN)


def test_snapshots_are_at_most_four_a_row_and_none_without_reuse() -> None:
    assert plan(1000 * SLOT, HYBRID).num_snapshots == 4 * ROWS
    assert plan(1000 * SLOT, HYBRID, snapshots=False).num_snapshots == 0


def test_states_of_rows_that_nobody_asked_for_take_half_of_the_memory() -> None:
    assert plan(2 * ROWS * SLOT, HYBRID).max_rows == ROWS
    made = plan(2 * ROWS * SLOT, HYBRID, max_rows=64, snapshots=False)
    assert (made.max_rows, made.context_length) == (ROWS, 800)
    assert plan(5 * SLOT, HYBRID, max_rows=64).max_rows == 2
    assert plan(70 * SLOT, HYBRID, max_rows=64, may_lower_rows=False).max_rows == 64


def test_one_row_is_the_least() -> None:
    assert plan(11 * 256 * TOKEN, HYBRID, slot_bytes=10 * 256 * TOKEN).max_rows == 1


def test_a_context_that_was_asked_for_comes_before_rows_and_snapshots() -> None:
    made = plan(CONTEXT_BYTES + 3 * SLOT, HYBRID, may_shorten=False)
    assert (made.context_length, made.max_rows, made.num_snapshots) == (CONTEXT, 3, 0)
    made = plan(CONTEXT_BYTES + 3 * SLOT, HYBRID, may_shorten=False, max_rows=2, may_lower_rows=False)
    assert (made.context_length, made.max_rows, made.num_snapshots) == (CONTEXT, 2, 1)


@pytest.mark.parametrize(("chunk", "tokens"), [(0, 8192), (1, 512), (512, 512), (600, 608), (8192, 8192)])
def test_snapshots_of_a_long_prompt_are_a_chunk_apart(chunk: int, tokens: int) -> None:
    assert plan(100 * SLOT, HYBRID, chunk_tokens=chunk).interval_blocks * BLOCK_SIZE == tokens
