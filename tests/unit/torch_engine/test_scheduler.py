"""The scheduler alone: which rows run, how far, in which blocks. Ints only."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fake_model import FakeModel, alone

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.scheduler import Row, RowUpdate, Scheduler


def request(name: str, prompt: int | list[int], max_tokens: int = 4, eos: frozenset[int] = frozenset()) -> EngineRequest:
    """A greedy request; an int prompt is that many tokens that no other name's prompt shares."""
    ids = [ord(name[0])] + [7] * (prompt - 1) if isinstance(prompt, int) else prompt
    return EngineRequest(name, tuple(ids), max_tokens, eos_token_ids=eos)


class Driver:
    """A scheduler with the fake model, checked after each part of a step."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, *, slots: int = 8, chunk: int = 0, caching: bool = True) -> None:
        self.scheduler = Scheduler(BlockPool(num_blocks, block_size, enable_prefix_caching=caching), slots, chunk)
        self.model = FakeModel(num_blocks, block_size)
        self.answers: dict[str, list[int]] = {}

    def add(self, *requests: EngineRequest) -> list[Row]:
        return [self.scheduler.add(one) for one in requests]

    def step(self) -> list[tuple[str, int]]:
        """One step; [(request, tokens)]."""
        self.updates: list[RowUpdate] = []
        scheduled = self.scheduler.schedule()
        self.scheduler.check_integrity()
        names = [(one.row.request.request_id, one.num_tokens) for one in scheduled]
        sampled = self.model.draw(scheduled)
        self.scheduler.advance(scheduled)
        self.scheduler.check_integrity()
        self.updates = self.scheduler.resolve(scheduled, sampled)
        self.scheduler.check_integrity()
        for update in self.updates:
            self.answers.setdefault(update.row.request.request_id, []).extend(update.token_ids)
        return names

    def run(self) -> list[list[tuple[str, int]]]:
        """Steps until nothing is left to do."""
        steps = []
        while self.scheduler.running or self.scheduler.waiting:
            steps.append(self.step())
            assert steps[-1], "the scheduler has rows and schedules none"
        return steps


def test_importing_it_loads_no_torch() -> None:
    code = "import sys, pocketllm.torch_engine.scheduler, pocketllm.torch_engine.block_pool; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_to_do_is_an_empty_step() -> None:
    assert Driver().scheduler.schedule() == []


def test_one_request_from_prompt_to_length() -> None:
    driver = Driver()
    driver.add(request("a", 6, max_tokens=3))
    assert driver.run() == [[("a", 6)], [("a", 1)], [("a", 1)]]
    assert driver.answers["a"] == alone(request("a", 6, max_tokens=3))
    assert driver.scheduler.pool.num_used == 0


def test_max_tokens_one_takes_one_step() -> None:
    driver = Driver()
    (row,) = driver.add(request("a", 5, max_tokens=1))
    assert driver.run() == [[("a", 5)]]
    assert driver.updates == [RowUpdate(row, (row.token_ids[-1],), 1, "length")]


def test_a_prompt_of_one_token() -> None:
    driver = Driver()
    driver.add(request("a", 1, max_tokens=2))
    assert driver.run() == [[("a", 1)], [("a", 1)]]


def test_eos_ends_a_row_and_is_left_out_but_counted() -> None:
    answer = alone(request("a", 6, max_tokens=8))
    eos = next(token_id for place, token_id in enumerate(answer) if place > 0 and token_id not in answer[:place])
    place = answer.index(eos)
    driver = Driver()
    (row,) = driver.add(request("a", 6, max_tokens=8, eos=frozenset({eos})))
    assert len(driver.run()) == place + 1
    assert driver.answers["a"] == answer[:place]
    assert driver.updates == [RowUpdate(row, (), place + 1, "stop")]
    assert driver.scheduler.pool.num_used == 0


def test_eos_on_the_last_allowed_token_is_a_stop() -> None:
    answer = alone(request("a", 6, max_tokens=1))
    driver = Driver()
    driver.add(request("a", 6, max_tokens=1, eos=frozenset(answer)))
    driver.run()
    assert [update.finish_reason for update in driver.updates] == ["stop"]


def test_an_eos_id_in_the_prompt_does_not_end_the_row() -> None:
    driver = Driver()
    driver.add(request("a", [50, 51, 50], max_tokens=2, eos=frozenset({50})))
    assert len(driver.run()) == 2


def test_requests_are_admitted_in_order_of_arrival() -> None:
    driver = Driver(slots=2)
    driver.add(request("a", 3, 2), request("b", 4, 3), request("c", 5, 2))
    assert driver.run() == [[("a", 3), ("b", 4)], [("a", 1), ("b", 1)], [("b", 1), ("c", 5)], [("c", 1)]]


def test_a_large_request_at_the_head_is_not_overtaken() -> None:
    driver = Driver(num_blocks=4, block_size=4)
    driver.add(request("a", 8, 2), request("b", 12, 1), request("c", 1, 1))
    assert driver.run() == [[("a", 8)], [("a", 1)], [("b", 12), ("c", 1)]]


def test_more_rows_than_slots_never_run() -> None:
    driver = Driver(slots=3)
    driver.add(*(request(f"{place}", 2, 3) for place in range(10)))
    assert max(len(step) for step in driver.run()) == 3
    assert len(driver.answers) == 10


def test_long_prompts_are_chunked_to_the_budget() -> None:
    driver = Driver(chunk=6)
    driver.add(request("a", 15, 2))
    assert driver.run() == [[("a", 6)], [("a", 6)], [("a", 3)], [("a", 1)]]
    assert driver.answers["a"] == alone(request("a", 15, 2))


def test_the_budget_is_shared_by_all_prompts_of_a_step() -> None:
    driver = Driver(chunk=8)
    driver.add(request("a", 5, 2), request("b", 5, 2), request("c", 5, 1))
    assert driver.run() == [[("a", 5), ("b", 3)], [("a", 1), ("b", 2), ("c", 5)], [("b", 1)]]


def test_a_spent_budget_leaves_a_running_prompt_for_the_next_step() -> None:
    driver = Driver(chunk=4)
    driver.add(request("a", 4, 1), request("b", 12, 1), request("c", 3, 1))
    assert driver.run() == [[("a", 4)], [("b", 4)], [("b", 4)], [("b", 4)], [("c", 3)]]


def test_a_budget_of_one_token() -> None:
    driver = Driver(chunk=1)
    driver.add(request("a", 4, 2), request("b", 3, 2))
    driver.run()
    assert driver.answers == {"a": alone(request("a", 4, 2)), "b": alone(request("b", 3, 2))}


def test_decode_is_not_stalled_by_a_prompt() -> None:
    driver = Driver(chunk=4)
    driver.add(request("a", 4, 6))
    driver.step()
    driver.add(request("b", 16, 1))
    steps = driver.run()
    assert [dict(step).get("a") for step in steps] == [1] * 5, "one token in each step"
    assert [dict(step).get("b") for step in steps] == [4, 4, 4, 4, None]


def test_decode_rows_cost_no_budget() -> None:
    driver = Driver(chunk=2)
    driver.add(*(request(name, 1, 9) for name in "abcd"))
    driver.step()
    driver.step()
    driver.add(request("e", 5, 1))
    assert driver.step() == [("a", 1), ("b", 1), ("c", 1), ("d", 1), ("e", 2)]


def test_the_youngest_is_preempted_and_comes_back() -> None:
    # 4 blocks of 2: two rows of 3 tokens fill them; the fifth token of "a" takes a block of "b".
    driver = Driver(num_blocks=4, block_size=2, caching=False)
    old, young = driver.add(request("a", 3, 4), request("b", 3, 3))
    assert driver.step() == [("a", 3), ("b", 3)]
    assert driver.step() == [("a", 1), ("b", 1)]
    assert driver.step() == [("a", 1)]
    assert driver.scheduler.num_preemptions == 1
    assert list(driver.scheduler.waiting) == [young]
    assert young.block_table == []
    assert (young.num_computed_tokens, young.num_generated) == (0, 2)
    assert driver.run() == [[("a", 1)], [("b", 5)]], "what it had generated is recomputed with its prompt"
    assert driver.answers == {"a": alone(old.request), "b": alone(young.request)}


def test_a_preempted_row_goes_before_those_that_never_ran() -> None:
    driver = Driver(num_blocks=4, block_size=2, caching=False)
    driver.add(request("a", 3, 4), request("b", 3, 3), request("c", 1, 1))
    driver.step()
    driver.step()
    driver.step()
    assert [row.request.request_id for row in driver.scheduler.waiting] == ["b", "c"]


def test_several_preempted_rows_come_back_in_their_order() -> None:
    driver = Driver(num_blocks=3, block_size=2, caching=False)
    rows = driver.add(*(request(name, 2, 4) for name in "abc"))
    assert driver.step() == [("a", 2), ("b", 2), ("c", 2)]
    assert driver.step() == [("a", 1)], "a takes the block of c, and b finds none"
    assert driver.scheduler.num_preemptions == 2
    assert list(driver.scheduler.waiting) == rows[1:]
    driver.run()
    assert driver.answers == {row.request.request_id: alone(row.request) for row in rows}


def test_a_preempted_row_does_not_come_back_in_the_same_step() -> None:
    # Both computed the same prompt, so the younger could share the older one's blocks at once: it waits for the next step all the same.
    driver = Driver(num_blocks=4, block_size=2)
    driver.add(request("a1", [5] * 4, 3), request("a2", [5] * 4, 2))
    driver.step()
    assert driver.step() == [("a1", 1)]
    assert driver.step() == [("a1", 1), ("a2", 1)]
    assert driver.scheduler.num_preemptions == 1


def test_the_oldest_row_always_advances() -> None:
    driver = Driver(num_blocks=5, block_size=2)
    driver.add(request("a", 3, 7), request("b", 3, 7), request("c", 3, 7))
    steps = driver.run()
    first = [dict(step).get("a") for step in steps][:7]
    assert first == [3, 1, 1, 1, 1, 1, 1]


def test_a_preempted_row_takes_its_own_prefix_up_again() -> None:
    driver = Driver(num_blocks=5, block_size=2)
    old, young = driver.add(request("a", 4, 3), request("b", 4, 2))
    driver.step()  # 2 + 2 blocks; each next token needs a block, and one is left
    assert driver.step() == [("a", 1)]
    assert driver.scheduler.num_preemptions == 1
    assert driver.step() == [("a", 1)]
    before = driver.model.num_computed
    driver.run()
    assert driver.model.num_computed - before < 5, "b's first blocks were still there"
    assert driver.answers == {"a": alone(old.request), "b": alone(young.request)}
    assert young.cached_tokens == 0, "what a row finds again of its own is not counted as cached"


def test_a_prefix_is_reused_while_its_row_runs() -> None:
    driver = Driver(block_size=4)
    shared = list(range(20, 30))
    (first,) = driver.add(request("a", [*shared, 1], 9))
    driver.step()
    (second,) = driver.add(request("b", [*shared, 2], 2))
    assert driver.step() == [("a", 1), ("b", 3)]
    assert (first.cached_tokens, second.cached_tokens) == (0, 8)
    assert second.block_table[:2] == first.block_table[:2]
    driver.run()
    assert driver.answers["b"] == alone(second.request)


def test_a_prefix_is_reused_after_its_row_left() -> None:
    driver = Driver(block_size=4)
    driver.add(request("a", 9, 1))
    driver.run()
    (again,) = driver.add(request("a", 9, 1))
    assert driver.run() == [[("a", 1)]]
    assert again.cached_tokens == 8


def test_a_whole_cached_prompt_still_computes_its_last_block() -> None:
    driver = Driver(block_size=4)
    driver.add(request("a", 8, 1))
    driver.run()
    (again,) = driver.add(request("a", 8, 1))
    assert driver.run() == [[("a", 4)]]
    assert again.cached_tokens == 4


def test_generated_tokens_are_a_prefix_too() -> None:
    driver = Driver(block_size=4)
    (row,) = driver.add(request("a", 4, 6))
    driver.run()
    (turn,) = driver.add(request("b", [*row.token_ids, 3], 1))
    driver.run()
    assert turn.cached_tokens == 8, "of 10 tokens 9 were computed, which fill two blocks"
    assert driver.answers["b"] == alone(turn.request)


def test_two_equal_prompts_in_one_step_are_both_computed() -> None:
    driver = Driver(block_size=4)
    one, two = driver.add(request("a1", [5] * 9, 2), request("a2", [5] * 9, 2))
    assert driver.step() == [("a1", 9), ("a2", 9)]
    assert not set(one.block_table) & set(two.block_table)
    driver.run()
    assert driver.answers["a1"] == driver.answers["a2"] == alone(one.request)


def test_a_chunk_makes_its_full_blocks_a_prefix_before_the_prompt_is_done() -> None:
    driver = Driver(block_size=4, chunk=6)
    driver.add(request("a", [5] * 12, 1))
    driver.step()
    _, (second,) = driver.step(), driver.add(request("b", [5] * 13, 1))
    driver.step()
    assert second.cached_tokens == 12


def test_without_prefix_caching_nothing_is_reused() -> None:
    driver = Driver(block_size=4, caching=False)
    driver.add(request("a", 9, 1))
    driver.run()
    (again,) = driver.add(request("a", 9, 1))
    assert driver.run() == [[("a", 9)]]
    assert again.cached_tokens == 0


def test_a_start_that_finds_no_room_gives_its_shared_blocks_back() -> None:
    driver = Driver(num_blocks=6, block_size=2)
    driver.add(request("a", [5] * 6, 5))
    driver.step()
    (blocked,) = driver.add(request("b", [5] * 6 + [6] * 6, 1))
    driver.step()  # check_integrity compares the references
    assert blocked.cached_tokens is None
    driver.run()
    assert driver.answers["b"] == alone(blocked.request)


def test_remove_a_waiting_row() -> None:
    driver = Driver(slots=1)
    first, second, third = driver.add(request("a", 2, 2), request("b", 2, 2), request("c", 2, 1))
    driver.step()
    driver.scheduler.remove(second)
    driver.scheduler.check_integrity()
    assert list(driver.scheduler.rows()) == [first, third]
    assert driver.run() == [[("a", 1)], [("c", 2)]]


def test_remove_a_running_row_frees_its_blocks_at_once() -> None:
    driver = Driver(num_blocks=2, block_size=4)
    running, _ = driver.add(request("a", 5, 3), request("b", 8, 1))
    assert driver.step() == [("a", 5)]
    driver.scheduler.remove(running)
    driver.scheduler.check_integrity()
    assert driver.step() == [("b", 8)]


def test_remove_a_row_in_the_middle_of_its_prompt() -> None:
    driver = Driver(chunk=4)
    (row,) = driver.add(request("a", 12, 3))
    driver.step()
    driver.scheduler.remove(row)
    driver.scheduler.check_integrity()
    assert driver.scheduler.pool.num_used == 0
    (again,) = driver.add(request("a", 12, 3))
    driver.run()
    assert again.cached_tokens == 4, "what it computed is a valid prefix"
    assert driver.answers["a"] == alone(again.request)


def test_remove_a_preempted_row() -> None:
    driver = Driver(num_blocks=4, block_size=2)
    _, young = driver.add(request("a", 3, 4), request("b", 3, 3))
    driver.step()
    driver.step()
    driver.step()
    driver.scheduler.remove(young)
    driver.scheduler.check_integrity()
    driver.run()
    assert "a" in driver.answers
    assert not driver.scheduler.waiting


def test_remove_of_a_row_that_left_is_an_error() -> None:
    driver = Driver()
    (row,) = driver.add(request("a", 3, 1))
    driver.run()
    with pytest.raises(ValueError, match="not in"):
        driver.scheduler.remove(row)
