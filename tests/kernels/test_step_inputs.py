"""A step's numbers on their way to the device, against the definitions of DeviceBatch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.scheduler import UNKNOWN, Row, ScheduledRow
from pocketllm.torch_engine.step_inputs import StepInputs
from pocketllm.torch_engine.step_shape import StepShape

BLOCK, SLOTS = 4, 8
CPU = torch.device("cpu")


def row_of(slot: int, length: int, computed: int, blocks: list[int]) -> Row:
    row = Row(EngineRequest(f"row {slot}", tuple(100 * slot + place for place in range(length)), 9))
    row.slot, row.num_computed_tokens, row.block_table = slot, computed, blocks
    return row


def inputs_of(rows: list[ScheduledRow]) -> StepInputs:
    return StepInputs(StepShape.of(rows), SLOTS, CPU)


def sent(inputs: StepInputs, rows: list[ScheduledRow], *, is_hybrid: bool = False) -> dict[str, list[int]]:
    inputs.send(rows, BLOCK, is_hybrid=is_hybrid)
    names = ("token_ids", "input_slots", "sample_index", "sample_slots", "positions", "slot_mapping", "row_slots", "state_slots", "lengths", "starts")
    names += ("row_chunks", "chunk_rows")
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
    assert sent(inputs_of(mixed_rows()), mixed_rows()) == {
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
        "row_chunks": [0, 1, 2],
        "chunk_rows": [0, 1],
    }


def test_states_lie_in_the_rows_slots() -> None:
    assert sent(inputs_of(mixed_rows()), mixed_rows(), is_hybrid=True)["state_slots"] == [5, 0, 3, 1]


def test_no_row_may_sample() -> None:
    found = sent(inputs_of(mixed_rows()[2:3]), mixed_rows()[2:3])
    assert (found["sample_index"], found["sample_slots"], found["input_slots"]) == ([], [], [])


@pytest.mark.parametrize("is_hybrid", [False, True])
def test_rows_of_a_graph_that_stand_for_none(is_hybrid: bool) -> None:
    """Also when the buffer held a fuller step before."""
    inputs = StepInputs(StepShape.decoding(3), SLOTS, CPU)
    full = [ScheduledRow(row_of(slot, 3, 2, [slot]), 1, True) for slot in (2, 6, 4)]
    assert sent(inputs, full, is_hybrid=is_hybrid)["row_slots"] == [2, 6, 4]
    found = sent(inputs, full[1:2], is_hybrid=is_hybrid)
    assert found == {
        "token_ids": [602, 0, 0],
        "input_slots": [6, SLOTS, SLOTS],
        "sample_index": [0, 0, 0],
        "sample_slots": [6, SLOTS, SLOTS],
        "positions": [2, 0, 0],
        "slot_mapping": [26, -1, -1],
        "row_slots": [6, -1, -1],
        "state_slots": [6 if is_hybrid else -1, -1, -1],
        "lengths": [3, 0, 0],
        "starts": [0],
        "row_chunks": [0],
        "chunk_rows": [],
    }


def test_a_padded_step() -> None:
    """Rows, tokens, chunks and samples that stand for none, also where the buffer held a fuller step before."""
    shape = replace(StepShape.filling(4, 12, SLOTS), num_prompts=3, num_chunks=3, num_samples=5)
    inputs = StepInputs(shape, SLOTS, CPU)
    fuller = [*mixed_rows()[:2], ScheduledRow(row_of(6, 5, 4, [3, 5]), 1, True), *mixed_rows()[2:], ScheduledRow(row_of(7, 4, 0, [10]), 4, True)]
    assert shape.holds(StepShape.of(fuller))
    assert sent(inputs, fuller)["chunk_rows"] == [0, 1, 2]
    assert sent(inputs, mixed_rows(), is_hybrid=True) == {
        "token_ids": [506, 4, 0, 0, *range(303, 309), 100, 101, 0, 0, 0, 0],
        "input_slots": [5, 0, SLOTS, SLOTS],
        "sample_index": [0, 11, 0, 0, 0],
        "sample_slots": [5, 1, SLOTS, SLOTS, SLOTS],
        "positions": [6, 4, 0, 0, *range(3, 9), 0, 1, 0, 0, 0, 0],
        "slot_mapping": [10, 28, -1, -1, 19, 0, 1, 2, 3, 32, 24, 25, -1, -1, -1, -1],
        "row_slots": [5, 0, -1, -1, 3, 1, -1],
        "state_slots": [5, 0, -1, -1, 3, 1, -1],
        "lengths": [7, 5, 0, 0, 9, 2, 0],
        "starts": [0, 6, 8, 8],
        "row_chunks": [0, 1, 2, 2],
        "chunk_rows": [0, 1, -1],
    }


def test_an_id_that_is_not_known_travels_as_such() -> None:
    row = row_of(2, 3, 3, [5])
    row.token_ids.append(UNKNOWN)
    step = [ScheduledRow(row, 1, True)]
    found = sent(inputs_of(step), step)
    assert (found["token_ids"], found["input_slots"], found["positions"]) == ([UNKNOWN], [2], [3])


def test_the_host_may_go_on_as_soon_as_a_step_was_sent() -> None:
    rows = mixed_rows()
    inputs = inputs_of(mixed_rows())
    before = sent(inputs, rows)
    for one in rows:
        one.row.token_ids[:] = [0] * len(one.row.token_ids)
        one.row.block_table.clear()
    assert inputs["token_ids"].tolist() == before["token_ids"]
    assert inputs["slot_mapping"].tolist() == before["slot_mapping"]


def test_fields_begin_where_the_widest_loads_may() -> None:
    inputs = StepInputs(StepShape(3, 1, 5, 5, 1, 1), SLOTS, CPU)
    base = inputs["token_ids"].data_ptr()
    for name in ("positions", "slot_mapping", "row_slots", "state_slots", "lengths", "starts", "row_chunks", "chunk_rows"):
        assert (inputs[name].data_ptr() - base) % 16 == 0


def test_the_batch_has_the_tokens_it_is_given() -> None:
    inputs = StepInputs(StepShape(1, 1, 2, 2, 1, 0), SLOTS, CPU)
    tokens, tables = torch.arange(3), torch.zeros(SLOTS, 4, dtype=torch.int32)
    batch = inputs.batch(tokens, tables)
    assert batch.token_ids is tokens
    assert (batch.num_tokens, batch.num_decode, batch.longest_prompt, batch.is_padded) == (3, 1, 2, False)
    assert batch.prompts is not None
    assert (batch.prompts.num_rows, batch.prompts.num_chunks) == (1, 1)
    assert StepInputs(StepShape.decoding(2), SLOTS, CPU).batch(tokens, tables).prompts is None
