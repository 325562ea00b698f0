"""The block pool alone: who holds a block, what a cached prefix is, and what goes first when space is needed."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pocketllm.torch_engine.block_pool import ROOT, BlockPool, hash_block

SIZE = 4


def fill(pool: BlockPool, token_ids: Sequence[int]) -> list[int]:
    """Allocate blocks for the full blocks of `token_ids` and register them, as a row that computes them does."""
    count = len(token_ids) // SIZE
    blocks = pool.allocate(count)
    assert blocks is not None
    parent = ROOT
    for index, block in enumerate(blocks):
        parent = hash_block(parent, token_ids[index * SIZE : (index + 1) * SIZE])
        pool.register(block, parent)
    return blocks


def test_allocate_hands_out_distinct_blocks_until_none_are_left() -> None:
    pool = BlockPool(5, SIZE)
    first, second = pool.allocate(3), pool.allocate(2)
    assert first is not None
    assert second is not None
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (pool.num_available, pool.num_used) == (0, 5)
    pool.check_integrity([first, second])


def test_allocate_takes_nothing_when_there_are_too_few() -> None:
    pool = BlockPool(3, SIZE)
    held = pool.allocate(2)
    assert held is not None
    assert pool.allocate(2) is None
    assert pool.num_available == 1
    pool.check_integrity([held])


def test_allocate_zero_blocks() -> None:
    pool = BlockPool(1, SIZE)
    assert pool.allocate(0) == []
    pool.check_integrity([])


def test_unregistered_blocks_go_back_to_the_free_list() -> None:
    pool = BlockPool(2, SIZE)
    held = pool.allocate(2)
    assert held is not None
    pool.free(held)
    assert pool.num_available == 2
    assert pool.match_prefix([1] * 9) == []
    pool.check_integrity([])


def test_a_freed_prefix_is_found_and_shared() -> None:
    pool = BlockPool(4, SIZE)
    ids = list(range(9))
    held = fill(pool, ids)
    pool.free(held)
    assert pool.num_available == 4
    assert pool.match_prefix(ids) == held
    pool.share(held)
    pool.share(held)
    assert pool.num_used == 2
    pool.check_integrity([held, held])
    pool.free(held)
    assert pool.num_used == 2, "one reference is left"
    pool.check_integrity([held])
    pool.free(held)
    pool.check_integrity([])


def test_match_takes_no_reference() -> None:
    pool = BlockPool(4, SIZE)
    held = fill(pool, range(4))
    pool.free(held)
    pool.match_prefix(list(range(5)))
    pool.check_integrity([])


@pytest.mark.parametrize(("length", "matched"), [(1, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3), (20, 3)])
def test_match_leaves_the_last_token(length: int, matched: int) -> None:
    pool = BlockPool(8, SIZE)
    ids = list(range(12)) + [99] * 8
    held = fill(pool, ids[:12])
    assert pool.match_prefix(ids[:length]) == held[:matched]


def test_match_stops_at_the_first_difference() -> None:
    pool = BlockPool(8, SIZE)
    held = fill(pool, range(12))
    other = [*range(4), 77, *range(5, 20)]
    assert pool.match_prefix(other) == held[:1], "the third block is equal again, but what is before it is not"


def test_equal_content_after_another_prefix_is_another_block() -> None:
    pool = BlockPool(8, SIZE)
    tail = [7, 7, 7, 7]
    one, two = fill(pool, [1, 1, 1, 1, *tail]), fill(pool, [2, 2, 2, 2, *tail])
    assert pool.match_prefix([1, 1, 1, 1, *tail, 0]) == one
    assert pool.match_prefix([2, 2, 2, 2, *tail, 0]) == two
    assert pool.match_prefix([*tail, 0]) == []
    assert hash_block(hash_block(ROOT, [1] * 4), tail) != hash_block(hash_block(ROOT, [2] * 4), tail)


@pytest.mark.parametrize(("one", "two"), [([0, 1], [1, 0]), ([1, 2], [1, 258]), ([1], [1, 0]), ([2**31], [0])])
def test_hash_tells_ids_and_their_order_apart(one: list[int], two: list[int]) -> None:
    assert hash_block(ROOT, one) != hash_block(ROOT, two)
    assert hash_block(ROOT, one) == hash_block(ROOT, tuple(one)), "only the ids count, not the sequence's type"


def test_equal_content_is_registered_once() -> None:
    pool = BlockPool(8, SIZE)
    ids = list(range(8))
    first, second = fill(pool, ids), fill(pool, ids)
    assert pool.match_prefix([*ids, 0]) == first
    pool.free(second)
    assert pool.match_prefix([*ids, 0]) == first, "the duplicate was dropped, the home stays"
    pool.check_integrity([first])
    pool.free(first)
    pool.check_integrity([])


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = BlockPool(4, SIZE)
    cached = fill(pool, range(8))
    pool.free(cached)
    taken = pool.allocate(2)
    assert taken is not None
    assert not set(taken) & set(cached)
    assert pool.match_prefix(list(range(9))) == cached


def test_the_tail_is_evicted_before_the_head() -> None:
    pool = BlockPool(3, SIZE)
    ids = list(range(13))
    held = fill(pool, ids[:12])
    pool.free(held)
    assert pool.allocate(1) == [held[2]]
    assert pool.match_prefix(ids) == held[:2]
    assert pool.allocate(1) == [held[1]]
    assert pool.match_prefix(ids) == held[:1]
    assert pool.allocate(1) == [held[0]]
    assert pool.match_prefix(ids) == []


def test_the_least_recently_used_prefix_is_evicted_first() -> None:
    pool = BlockPool(2, SIZE)
    old, new = fill(pool, [1] * 4), fill(pool, [2] * 4)
    pool.free(old)
    pool.free(new)
    pool.share(old)  # used again
    pool.free(old)
    assert pool.allocate(1) == new
    assert pool.match_prefix([1] * 5) == old


def test_a_shared_block_is_not_evicted() -> None:
    pool = BlockPool(2, SIZE)
    held = fill(pool, range(8))
    pool.free(held)
    pool.share(held[:1])
    assert pool.allocate(2) is None
    assert pool.allocate(1) == [held[1]]
    pool.check_integrity([held[:1], [held[1]]])


def test_an_evicted_block_takes_a_new_prefix() -> None:
    pool = BlockPool(1, SIZE)
    held = fill(pool, [1] * 4)
    pool.free(held)
    again = fill(pool, [2] * 4)
    assert again == held
    assert pool.match_prefix([1] * 5) == []
    assert pool.match_prefix([2] * 5) == again
    pool.check_integrity([again])


def test_without_prefix_caching_nothing_is_remembered() -> None:
    pool = BlockPool(2, SIZE, enable_prefix_caching=False)
    held = fill(pool, range(8))
    assert pool.match_prefix(list(range(9))) == []
    pool.free(held)
    assert pool.match_prefix(list(range(9))) == []
    assert pool.num_available == 2
    pool.check_integrity([])


@pytest.mark.parametrize(
    ("tables", "message"),
    [([[0]], "reference counts"), ([[0, 1], [0]], "reference counts"), ([], "reference counts")],
)
def test_check_integrity_notices_a_wrong_table(tables: list[list[int]], message: str) -> None:
    pool = BlockPool(3, SIZE)
    assert pool.allocate(2) == [0, 1]
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(tables)


class PoolMachine(RuleBasedStateMachine):
    """Random rows over a small pool, beside a model of it: what each block holds, told by its whole prefix."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7, SIZE)
        self.rows: list[tuple[tuple[int, ...], list[int]]] = []
        self.content: dict[int, tuple[int, ...]] = {}  # block -> the ids up to its end

    @rule(ids=st.lists(st.integers(0, 1), min_size=1, max_size=14))
    def start(self, ids: list[int]) -> None:
        matched = self.pool.match_prefix(ids)
        assert len(matched) * SIZE < len(ids)
        for index, block in enumerate(matched):
            assert self.content[block] == tuple(ids[: (index + 1) * SIZE]), "a match holds another prefix"
        available = self.pool.num_available
        self.pool.share(matched)
        left = self.pool.num_available
        assert available - left <= len(matched)
        needed = -(-len(ids) // SIZE) - len(matched)
        fresh = self.pool.allocate(needed)
        assert (fresh is None) == (needed > left)
        if fresh is None:
            self.pool.free(matched)
            return
        assert len(set(fresh)) == needed
        assert not set(fresh) & {block for _, table in self.rows for block in table}, "a block in use was handed out"
        table = matched + fresh
        parent = ROOT
        for index in range(len(ids) // SIZE):
            parent = hash_block(parent, ids[index * SIZE : (index + 1) * SIZE])
            self.pool.register(table[index], parent)
            self.content[table[index]] = tuple(ids[: (index + 1) * SIZE])
        self.rows.append((tuple(ids), table))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        _, table = self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
        self.pool.free(table)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check_integrity(table for _, table in self.rows)
        assert self.pool.num_used == len({block for _, table in self.rows for block in table})

    @invariant()
    def what_is_found_holds_the_prefix(self) -> None:
        for ids, _ in self.rows:
            for index, block in enumerate(self.pool.match_prefix([*ids, 0])):
                assert self.content[block] == ids[: (index + 1) * SIZE]


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
