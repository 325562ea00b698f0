"""Rows with terms on the native engine: each token is the oracle's on transformers' logits, batched, in chunks, from a cached prefix, after preemption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.cpp import CppBackend
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from tests.logit_reference import check_answer, rows_of_terms
from tests.models.plane import expected_logits
from tests.models.tiny_qwen3_5 import SIZES, write_tiny
from tests.row_listener import Listener, run

pytest.importorskip("pocketllm_cpp", reason="the native module is not built: build it with scripts/build_native.sh")

VOCAB_SIZE = int(SIZES["vocab_size"])
ENDS = frozenset({0, 9, 30})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("qwen3_5")
    return path, write_tiny(path, linear_value_head_dim=16)


def answers(path: Path, rows: Sequence[EngineRequest], *, again: bool = False, **options: Any) -> tuple[list[Listener], int]:
    """What the rows say, from the prefix cache with `again`, and how many were preempted."""
    chosen = {"dtype": "float32", "max_model_len": 64, "backend_options": {"num_threads": 1}, **options}
    backend = CppBackend(EngineArgs(model=str(path), backend="cpp", **chosen), open_checkpoint(path))
    backend.load(lambda progress: None)
    try:
        listeners = run(backend, *rows)
        return run(backend, *rows) if again else listeners, backend.stats().preemptions
    finally:
        backend.close()


def check(oracle: PreTrainedModel, rows: Sequence[EngineRequest], listeners: Sequence[Listener]) -> None:
    for row, one in zip(rows, listeners, strict=True):
        assert one.outputs[-1].finish_reason in ("stop", "length"), one.outputs[-1].error
        has_stopped = one.outputs[-1].finish_reason == "stop"
        with torch.inference_mode():
            logits = expected_logits(oracle, [*row.prompt_token_ids, *one.token_ids])
        check_answer(row, one.token_ids, has_stopped, logits.numpy())


def test_every_token_is_the_oracles_whatever_the_engine_does(model: tuple[Path, PreTrainedModel]) -> None:
    path, oracle = model
    rows = rows_of_terms(VOCAB_SIZE, ENDS)
    cold, _ = answers(path, rows, max_batch_size=16)
    check(oracle, rows, cold)
    for options in ({"max_batch_size": 16, "again": True}, {"max_batch_size": 3, "prefill_chunk_tokens": 5}, {"max_batch_size": 1}):
        found, _ = answers(path, rows, **options)
        assert [one.token_ids for one in found] == [one.token_ids for one in cold], options


def test_preempted_rows_go_on_as_they_were(model: tuple[Path, PreTrainedModel]) -> None:
    path, oracle = model
    rows = rows_of_terms(VOCAB_SIZE, frozenset(), 30)
    listeners, preemptions = answers(path, rows, max_batch_size=16, kv_cache_memory="420KiB", enable_prefix_caching=False)
    assert preemptions > 0
    check(oracle, rows, listeners)


def test_terms_that_leave_nothing_end_their_row_alone(model: tuple[Path, PreTrainedModel]) -> None:
    path, _ = model
    rows = [
        EngineRequest("nothing", (1, 2), 8, eos_token_ids=ENDS, terms=LogitTerms(min_tokens=3, allowed_token_ids=(0, 9))),
        EngineRequest("something", (1, 2), 8, eos_token_ids=ENDS, terms=LogitTerms(allowed_token_ids=(4, 5))),
    ]
    (nothing, something), _ = answers(path, rows, max_batch_size=4)
    error = nothing.outputs[-1].error
    assert isinstance(error, ConfigurationError)
    assert error.param == "allowed_token_ids"
    assert set(something.token_ids) <= {4, 5}
    assert len(something.token_ids) == 8


def test_bans_of_every_id_are_the_requests_fault_without_a_mask_too(model: tuple[Path, PreTrainedModel]) -> None:
    path, _ = model
    every_id = range(VOCAB_SIZE)
    rows = [
        EngineRequest("ends", (1, 2), 8, eos_token_ids=frozenset(every_id), terms=LogitTerms(min_tokens=3)),
        EngineRequest("words", (1, 2), 8, terms=LogitTerms(bad_words=tuple((token_id,) for token_id in every_id))),
        EngineRequest("one left", (1, 2), 8, terms=LogitTerms(bad_words=tuple((token_id,) for token_id in every_id if token_id != 7))),
    ]
    (ends, words, left), _ = answers(path, rows, max_batch_size=4)
    for one, param in ((ends, "min_tokens"), (words, "bad_words")):
        error = one.outputs[-1].error
        assert isinstance(error, ConfigurationError)
        assert error.param == param
    assert left.token_ids == [7] * 8


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"presence_penalty": float("inf")}, "presence_penalty"),
        ({"logit_bias": [(151, 1.0)]}, "logit_bias"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"bad_words": [[151]]}, "bad_words"),
    ],
)
def test_terms_out_of_range_are_refused_by_name(model: tuple[Path, PreTrainedModel], fields: dict[str, Any], name: str) -> None:
    import pocketllm_cpp as native

    engine = native.QwenEngine(str(model[0]), native.QwenEngineOptions(dtype="float32", num_threads=1, max_batch_size=1, max_model_len=32))
    scheduler = native.QwenBatchScheduler(engine, 1)
    with pytest.raises(native.Error, match=f'"{name}" = ') as caught:
        scheduler.submit_request([1], native.QwenBatchSamplingParams(max_new_tokens=4, terms=native.LogitTerms(**fields)))
    assert caught.value.field == name
    scheduler.stop()
