"""Which shapes of steps are captured, and which steps each takes."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.step_shape import StepShape, captured_shapes, chunk_beside_answers


def step_of(*lengths: int, samples: bool = True) -> StepShape:
    return StepShape.of([ScheduledRow(Row(EngineRequest("row", (0,), 1)), length, samples) for length in lengths])


def taken(shapes: list[StepShape], step: StepShape) -> StepShape | None:
    """As GpuRunner chooses."""
    return next((shape for shape in shapes if shape.holds(step)), None)


def test_the_shape_of_rows() -> None:
    shape = step_of(1, 70, 1, 64, 2)
    assert shape == StepShape(num_decode=2, num_prompts=3, num_prompt_tokens=136, longest_prompt=70, num_chunks=4, num_samples=5)
    assert (shape.num_rows, shape.num_tokens, shape.all_sample) == (5, 138, False)
    assert step_of(1, 1).all_sample
    assert not step_of(1, 1, samples=False).all_sample


@pytest.mark.parametrize("field", [field.name for field in fields(StepShape) if field.name != "is_padded"])
def test_a_step_that_is_larger_in_one_way_does_not_fit(field: str) -> None:
    shape = StepShape(4, 2, 100, 90, 3, 5, is_padded=True)
    assert shape.holds(replace(shape, is_padded=False))
    assert not shape.holds(replace(shape, **{field: getattr(shape, field) + 1}))


def test_where_no_token_is_picked_all_rows_sample() -> None:
    assert StepShape.decoding(4).holds(step_of(1, 1, 1))
    assert not StepShape.decoding(4).holds(step_of(1, 1, 1, samples=False))
    assert StepShape.filling(4, 64, 8).holds(step_of(1, 1, 1, samples=False))


@pytest.mark.parametrize("max_rows", [1, 2, 7, 8, 32, 64, 100, 256, 600])
def test_steps_that_a_scheduler_makes_are_captured(max_rows: int) -> None:
    beside = chunk_beside_answers(max_rows)
    shapes = captured_shapes(max_rows, 8192, beside)
    assert len(shapes) <= 48 + max_rows // 5
    assert shapes == sorted(shapes, key=lambda shape: shape.num_tokens)
    for rows in {rows for rows in (1, 3, 8, 9, 16, 17, 33, 63, 64, 65, 200, max_rows - 1, max_rows) if 0 < rows <= max_rows}:
        decoding = taken(shapes, step_of(*[1] * rows))
        assert decoding is not None
        assert decoding.all_sample
        assert decoding.num_decode - rows < max(8, rows)
        if rows < max_rows:
            for tokens in (2, 65, beside - 16, beside):
                mixed = taken(shapes, step_of(*[1] * rows, tokens))
                assert mixed is not None
                assert mixed.num_prompt_tokens - tokens < 128
    for tokens in (2, 64, 65, 500, 1024):
        assert taken(shapes, step_of(tokens)) is not None
    assert taken(shapes, step_of(1025)) is None


def test_prompts_that_end_just_behind_a_chunk_fit_too() -> None:
    shapes = captured_shapes(64, 8192, 320)
    assert taken(shapes, step_of(*[65] * 6, 57)) is not None
    assert taken(shapes, step_of(*[1] * 59, 129, 65, 65, 61)) is not None
    assert taken(shapes, step_of(*[2] * 9)) is None


def test_what_was_asked_for_is_the_largest() -> None:
    shapes = captured_shapes(64, 200, 200)
    assert max(shape.num_prompt_tokens for shape in shapes) == 200
    assert taken(shapes, step_of(*[1] * 63, 200)) is not None
    assert {shape.num_prompt_tokens for shape in captured_shapes(64, 24, 24)} == {0, 24}
    unlimited = captured_shapes(64, 0, 0)
    assert max(shape.num_prompt_tokens for shape in unlimited) == 1024
    assert max(shape.num_prompt_tokens for shape in unlimited if shape.num_decode) == 320


def test_answers_and_prompts_fill_whole_tiles() -> None:
    assert [chunk_beside_answers(rows) for rows in (1, 64, 65, 128, 1000)] == [320, 320, 256, 256, 256]
    totals = {shape.num_tokens for shape in captured_shapes(64, 8192, 320) if shape.num_decode == 64 and shape.num_prompts}
    assert totals == {128, 256, 384}
