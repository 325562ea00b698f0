"""Rows with terms on whole engines: each token is the oracle's on the model's logits, in one batch, in chunks, from a cached prefix and after preemption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pocketllm.backends.base import EngineRequest
from tests.logit_reference import check_answer, rows_of_terms
from tests.models.plane import logits_of, opened
from tests.models.tiny import VOCAB_SIZE
from tests.models.variants import VARIANTS
from tests.row_listener import run

ENDS = frozenset({0, 9, 30})


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    next(variant for variant in VARIANTS if variant.name == "llama").save(path)
    return path


def check(path: Path, rows: Sequence[EngineRequest], answers: Sequence[tuple[list[int], bool]]) -> None:
    texts = [[*row.prompt_token_ids, *answer] for row, (answer, _) in zip(rows, answers, strict=True)]
    for row, (answer, has_stopped), logits in zip(rows, answers, logits_of(path, texts, 0), strict=True):
        check_answer(row, answer, has_stopped, logits.numpy())


def test_every_token_is_the_oracles_whatever_the_engine_does(checkpoint: Path) -> None:
    rows = rows_of_terms(VOCAB_SIZE, ENDS)
    found = []
    kinds: list[dict[str, Any]] = [{}, {"prefill_chunk_tokens": 5, "max_batch_size": 3}, {"max_batch_size": 1}]
    for options in kinds:
        with opened(checkpoint, max_model_len=64, **options) as backend:
            for _ in range(2):  # cold, and from the prefix cache
                listeners = run(backend, *rows)
                found.append([(one.token_ids, one.outputs[-1].finish_reason == "stop") for one in listeners])
    check(checkpoint, rows, found[0])
    assert all(answers == found[0] for answers in found)
    assert {has_stopped for _, has_stopped in found[0]} == {True, False}


def test_preempted_rows_go_on_as_they_were(checkpoint: Path) -> None:
    rows = rows_of_terms(VOCAB_SIZE, frozenset(), 30)
    with opened(checkpoint, max_model_len=64) as backend:
        assert backend._engine is not None
        pool = backend._engine._scheduler.pool
        held = pool.allocate(pool.num_blocks - 12)
        assert held is not None
        listeners = run(backend, *rows)
        assert backend.stats().preemptions > 0
        pool.free(held)
    check(checkpoint, rows, [(one.token_ids, False) for one in listeners])
