"""Slots of recurrent states: what is kept, what makes room, and the copies that follow from it. Ints only."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_model import FakeModel, alone

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.scheduler import Row, Scheduler
from pocketllm.torch_engine.state_pool import Snapshot, StateCopy, StatePool, Worth

A, B, C, D = (bytes([place]) for place in range(4))


def saved(pool: StatePool, slot: int, digest: bytes, newest: Snapshot | None = None, *, worth: Worth = Worth.LASTING) -> Snapshot:
    snapshot = pool.save(slot, digest, newest, worth)
    assert snapshot is not None
    return snapshot


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, pocketllm.torch_engine.state_pool; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_new_row_starts_from_nothing() -> None:
    pool = StatePool(2, 2, 4)
    pool.start(0, None)
    pool.start(1, None)
    assert pool.take_copies() == [StateCopy(None, 0), StateCopy(None, 1)]
    assert pool.take_copies() == []
    pool.check_integrity([None, None])


def test_a_row_goes_on_from_a_snapshot() -> None:
    pool = StatePool(2, 2, 4)
    slot = 0
    pool.start(slot, None)
    snapshot = saved(pool, slot, A)
    assert (pool.has(A), pool.has(B)) == (True, False)
    other = 1
    pool.start(other, A)
    assert pool.take_copies() == [StateCopy(None, 0), StateCopy(0, 2), StateCopy(2, 1)]
    pool.check_integrity([snapshot, None])
    pool.end(snapshot)
    pool.end(None)
    pool.check_integrity([])
    assert pool.has(A)


def test_a_passing_snapshot_gives_way_to_the_rows_next() -> None:
    pool = StatePool(1, 2, 4)
    slot = 0
    pool.start(slot, None)
    first = saved(pool, slot, A, worth=Worth.PASSING)
    second = saved(pool, slot, B, first, worth=Worth.PASSING)
    assert (pool.has(A), pool.has(B)) == (False, True)
    third = saved(pool, slot, C, second, worth=Worth.LASTING)
    fourth = saved(pool, slot, D, third, worth=Worth.PASSING)
    assert [pool.has(digest) for digest in (A, B, C, D)] == [False, False, True, True]
    pool.check_integrity([fourth])


def test_the_last_one_of_a_row_that_ends_is_kept() -> None:
    pool = StatePool(1, 2, 4)
    slot = 0
    pool.start(slot, None)
    pool.end(saved(pool, slot, A, worth=Worth.PASSING))
    slot = 0
    pool.start(slot, None)
    pool.end(saved(pool, slot, B, saved(pool, slot, C, worth=Worth.PASSING), worth=Worth.PASSING))
    assert [pool.has(digest) for digest in (A, B, C)] == [True, True, False]
    pool.check_integrity([])


def test_one_that_another_row_started_from_is_kept() -> None:
    pool = StatePool(2, 3, 4)
    slot = 0
    pool.start(slot, None)
    first = saved(pool, slot, A, worth=Worth.PASSING)
    pool.start(1, A)
    saved(pool, slot, B, first, worth=Worth.PASSING)
    assert pool.has(A)


def test_rows_with_equal_prefixes_share_one_until_the_last_goes_on() -> None:
    pool = StatePool(2, 3, 4)
    one, two = 0, 1
    pool.start(one, None)
    pool.start(two, None)
    mine, other = saved(pool, one, A, worth=Worth.PASSING), saved(pool, two, A, worth=Worth.PASSING)
    assert mine is other
    assert pool.take_copies() == [StateCopy(None, 0), StateCopy(None, 1), StateCopy(0, 2)]
    mine = saved(pool, one, B, mine, worth=Worth.PASSING)
    assert pool.has(A)
    other = saved(pool, two, C, other, worth=Worth.PASSING)
    assert not pool.has(A)
    pool.check_integrity([mine, other])


def test_the_least_recently_used_one_makes_room() -> None:
    pool = StatePool(2, 2, 4)
    slot = 0
    pool.start(slot, None)
    for digest in (A, B):
        saved(pool, slot, digest)
    pool.start(1, A)
    saved(pool, slot, C)
    assert [pool.has(digest) for digest in (A, B, C)] == [True, False, True]
    assert pool.take_copies()[-2:] == [StateCopy(2, 1), StateCopy(0, 3)]


def test_marks_of_an_interval_make_room_first_unless_a_row_is_there_or_one_started_there() -> None:
    pool = StatePool(3, 3, 4)
    slot = 0
    pool.start(slot, None)
    saved(pool, slot, A)
    mark = saved(pool, slot, B, worth=Worth.INTERVAL)
    pool.end(None)
    slot = 0
    pool.start(slot, None)
    held = saved(pool, slot, C, worth=Worth.INTERVAL)
    other = 1
    pool.start(other, None)
    saved(pool, other, D, mark, worth=Worth.INTERVAL)  # the row that left B has gone on
    assert [pool.has(digest) for digest in (A, B, C, D)] == [True, False, True, True]
    pool.start(2, D)
    pool.save(other, B, held, Worth.PASSING)  # now nobody is at C
    assert [pool.has(digest) for digest in (A, B, C, D)] == [True, True, False, True]


def test_a_row_outlives_its_snapshot() -> None:
    pool = StatePool(2, 1, 4)
    one, two = 0, 1
    pool.start(one, None)
    pool.start(two, None)
    lost = saved(pool, one, A, worth=Worth.PASSING)
    held = saved(pool, two, B, worth=Worth.PASSING)
    assert (lost.slot, held.slot) == (-1, 2)
    again = saved(pool, two, A, held, worth=Worth.PASSING)
    pool.check_integrity([lost, again])
    newest = saved(pool, one, C, lost, worth=Worth.PASSING)  # takes the slot of `again`, not because of `lost`
    pool.check_integrity([newest, again])
    pool.end(newest)
    pool.end(again)
    pool.check_integrity([])
    assert pool.num_snapshots == 1


def test_without_room_for_any_nothing_is_copied() -> None:
    pool = StatePool(1, 0, 4)
    slot = 0
    pool.start(slot, None)
    pool.take_copies()
    assert pool.save(slot, A, None, Worth.LASTING) is None
    assert pool.take_copies() == []
    pool.check_integrity([None])


def test_a_lost_slot_is_noticed() -> None:
    pool = StatePool(2, 2, 4)
    slot = 0
    pool.start(slot, None)
    snapshot = saved(pool, slot, A)
    pool.check_integrity([snapshot])
    for newest in ([], [None], [snapshot, snapshot]):
        with pytest.raises(AssertionError, match="counts other rows"):
            pool.check_integrity(newest)
    snapshot.slot = 3
    with pytest.raises(AssertionError, match="a snapshot's slot is lost"):
        pool.check_integrity([snapshot])


class Hybrid:
    """A scheduler of a hybrid model, block_size 4, run with the fake model."""

    def __init__(self, *, chunk: int = 0, num_blocks: int = 32, snapshots: int = 8, interval_blocks: int = 2, caching: bool = True) -> None:
        self.states = StatePool(3, snapshots, interval_blocks)
        self.scheduler = Scheduler(BlockPool(num_blocks, 4, enable_prefix_caching=caching), 3, chunk, self.states)
        self.model = FakeModel(num_blocks, 4, state_slots=self.states.num_slots)

    def step(self) -> list[int]:
        step = self.scheduler.schedule()
        sampled = self.model.draw(step, self.scheduler.take_copies())
        self.scheduler.advance(step)
        self.scheduler.resolve(step, sampled)
        self.scheduler.check_integrity()
        return [one.num_tokens for one in step]

    def ask(self, prompt: list[int], max_tokens: int) -> tuple[Row, list[int]]:
        """The row, and how many tokens it computed in each step."""
        row = self.scheduler.add(EngineRequest("a", tuple(prompt), max_tokens))
        steps = []
        while self.scheduler.running or self.scheduler.waiting:
            steps += self.step()
        assert row.token_ids[len(prompt) :] == alone(row.request)
        return row, steps


@pytest.mark.parametrize(
    ("length", "chunk", "steps"),
    [(3, 0, [3]), (4, 0, [4]), (5, 0, [4, 1]), (8, 0, [4, 4]), (9, 0, [8, 1]), (21, 0, [8, 8, 4, 1]), (21, 6, [6, 2, 6, 2, 4, 1]), (21, 16, [8, 8, 4, 1])],
)
def test_a_prompt_is_cut_where_a_snapshot_is_kept(length: int, chunk: int, steps: list[int]) -> None:
    assert Hybrid(chunk=chunk).ask([7] * length, 1)[1] == steps


def test_without_prefix_caching_nothing_is_cut_or_kept() -> None:
    hybrid = Hybrid(caching=False)
    assert hybrid.ask([7] * 21, 9)[1] == [21] + [1] * 8
    assert hybrid.states.num_snapshots == 0


def test_a_snapshot_goes_with_the_block_at_its_end() -> None:
    hybrid = Hybrid(num_blocks=6)
    hybrid.ask(list(range(9)), 1)
    assert hybrid.states.num_snapshots == 1
    hybrid.ask(list(range(100, 121)), 1)
    assert hybrid.ask(list(range(9)), 1)[0].cached_tokens == 0


def test_cached_blocks_without_a_snapshot_are_computed_again() -> None:
    hybrid = Hybrid(snapshots=0)
    for _ in range(2):
        row, steps = hybrid.ask(list(range(9)), 1)
        assert (row.cached_tokens, steps) == (0, [8, 1])


def test_preemption_gives_the_slot_back_and_keeps_the_snapshot() -> None:
    hybrid = Hybrid()
    row = hybrid.scheduler.add(EngineRequest("a", tuple(range(9)), 9))
    for _ in range(6):
        hybrid.step()
    assert (row.slot, row.num_computed_tokens) == (0, 13)
    hybrid.scheduler.preempt(row)
    hybrid.scheduler.check_integrity()
    assert (row.slot, row.snapshot) == (-1, None)
    assert hybrid.step() == [2]  # from 12 to the two tokens that it has beyond
    assert row.cached_tokens == 0
