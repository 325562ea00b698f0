"""A step's numbers on their way to the device, against the definitions of DeviceBatch."""

from __future__ import annotations

import pytest
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.scheduler import UNKNOWN, Row, ScheduledRow
from pocketllm.torch_engine.step_inputs import StepInputs

BLOCK, SLOTS = 4, 8
CPU = torch.device("cpu")


def row_of(slot: int, length: int, computed: int, blocks: list[int]) -> Row:
    row = Row(EngineRequest(f"row {slot}", tuple(100 * slot + place for place in range(length)), 9))
    row.slot, row.num_computed_tokens, row.block_table = slot, computed, blocks
    return row


def sent(inputs: StepInputs, rows: list[ScheduledRow], *, is_hybrid: bool = False) -> dict[str, list[int]]:
    inputs.send(rows, BLOCK, is_hybrid=is_hybrid)
    names = ("token_ids", "input_slots", "sample_index", "sample_slots", "positions", "slot_mapping", "row_slots", "state_slots", "lengths", "starts")
    return {name: inputs[name].tolist() for name in names}


def mixed_rows() -> list[ScheduledRow]:
    """One that decodes, one whose last prompt token but one comes alone, a prompt's middle, and a prompt's end."""
    return [
        ScheduledRow(row_of(5, 7, 6, [9, 2]), 1, True),
        ScheduledRow(row_of(0, 6, 4, [1, 7]), 1, False),
        ScheduledRow(row_of(3, 12, 3, [4, 0, 8]), 6, False),
        ScheduledRow(row_of(1, 2, 0, [6]), 2, True),
    ]


def test_rows_that_decode_and_rows_of_prompts() -> None:
    assert sent(StepInputs(2, (6, 2), 2, SLOTS, CPU), mixed_rows()) == {
        "token_ids": [506, 4, *range(303, 309), 100, 101],
        "input_slots": [5, 0],
        "sample_index": [0, 9],
        "sample_slots": [5, 1],
        "positions": [6, 4, *range(3, 9), 0, 1],
        "slot_mapping": [10, 28, 19, 0, 1, 2, 3, 32, 24, 25],
        "row_slots": [5, 0, 3, 1],
        "state_slots": [-1] * 4,
        "lengths": [7, 5, 9, 2],
        "starts": [0, 6, 8],
    }


def test_states_lie_in_the_rows_slots() -> None:
    assert sent(StepInputs(2, (6, 2), 2, SLOTS, CPU), mixed_rows(), is_hybrid=True)["state_slots"] == [5, 0, 3, 1]


def test_no_row_may_sample() -> None:
    found = sent(StepInputs(0, (6,), 0, SLOTS, CPU), mixed_rows()[2:3])
    assert (found["sample_index"], found["sample_slots"], found["input_slots"]) == ([], [], [])


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_rows_of_a_graph_that_stand_for_none(is_hybrid: bool) -> None:
    """Also when the buffer held a fuller step before."""
    inputs = StepInputs(3, (), None, SLOTS, CPU)
    full = [ScheduledRow(row_of(slot, 3, 2, [slot]), 1, True) for slot in (2, 6, 4)]
    assert sent(inputs, full, is_hybrid=is_hybrid)["row_slots"] == [2, 6, 4]
    found = sent(inputs, full[1:2], is_hybrid=is_hybrid)
    assert found == {
        "token_ids": [602, 0, 0],
        "input_slots": [6, SLOTS, SLOTS],
        "sample_index": [],
        "sample_slots": [],
        "positions": [2, 0, 0],
        "slot_mapping": [26, -1, -1],
        "row_slots": [6, -1, -1],
        "state_slots": [6 if is_hybrid else -1, -1, -1],
        "lengths": [3, 0, 0],
        "starts": [0],
    }


def test_an_id_that_is_not_known_travels_as_such() -> None:
    row = row_of(2, 3, 3, [5])
    row.token_ids.append(UNKNOWN)
    found = sent(StepInputs(1, (), 1, SLOTS, CPU), [ScheduledRow(row, 1, True)])
    assert (found["token_ids"], found["input_slots"], found["positions"]) == ([UNKNOWN], [2], [3])


def test_the_host_may_go_on_as_soon_as_a_step_was_sent() -> None:
    rows = mixed_rows()
    inputs = StepInputs(2, (6, 2), 2, SLOTS, CPU)
    before = sent(inputs, rows)
    for one in rows:
        one.row.token_ids[:] = [0] * len(one.row.token_ids)
        one.row.block_table.clear()
    assert inputs["token_ids"].tolist() == before["token_ids"]
    assert inputs["slot_mapping"].tolist() == before["slot_mapping"]


def test_fields_begin_where_the_widest_loads_may() -> None:
    inputs = StepInputs(3, (5,), 1, SLOTS, CPU)
    base = inputs["token_ids"].data_ptr()
    for name in ("positions", "slot_mapping", "row_slots", "state_slots", "lengths", "starts"):
        assert (inputs[name].data_ptr() - base) % 16 == 0


def test_the_batch_has_the_tokens_it_is_given() -> None:
    inputs = StepInputs(1, (2,), 0, SLOTS, CPU)
    tokens, tables = torch.arange(3), torch.zeros(SLOTS, 4, dtype=torch.int32)
    batch = inputs.batch(tokens, tables)
    assert batch.token_ids is tokens
    assert (batch.num_tokens, batch.num_decode, batch.query_lengths) == (3, 1, (2,))
