"""What one row says does not depend on the rows beside it, on those before it, nor on how they ended."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_backend import tiny_backend
from tiny_llama import tiny_tensors

from pocketllm.backends.base import EngineRequest
from pocketllm.errors import PocketLLMError
from tests.id_constraint import IdConstraint
from tests.row_listener import WAIT, Listener, run

SEEDED = EngineRequest("seeded", (3, 1, 4), 16, 1.2, 0.95, 0, 77)


@pytest.mark.parametrize("repeat", range(2))
def test_a_seeded_row_says_the_same_in_any_company(repeat: int, tmp_path: Path) -> None:
    companies: dict[str, list[EngineRequest]] = {
        "nobody": [],
        "other draws": [EngineRequest(f"u{place}", (place, 2), 16, 1.0, seed=1000 * repeat + place) for place in range(5)],
        "its own seed": [EngineRequest(f"s{place}", (3, 1, 4), 16, 1.2, 0.95, 0, 77) for place in range(3)],
        "greedy rows": [EngineRequest(f"g{place}", (place, 2), 20) for place in range(3)],
        "constraints": [EngineRequest(f"c{place}", (place, 2), 16, 1.0, seed=77, constraint=IdConstraint(range(9, 30))) for place in range(3)],
        "log probabilities": [EngineRequest(f"l{place}", (place, 2), 16, 1.0, seed=77, logprobs=20) for place in range(3)],
    }
    with tiny_backend(tmp_path, max_batch_size=8) as backend:
        answers = {name: run(backend, SEEDED, *company)[0].token_ids for name, company in companies.items()}
        copies = [answer.token_ids for answer in run(backend, *companies["its own seed"])]
        late = Listener()
        first = Listener()
        backend.submit(EngineRequest("long", (8, 8), 50, 1.0, seed=9), first)
        assert first.started.wait(WAIT)
        backend.submit(SEEDED, late)
        late.end()
    assert all(ids == answers["nobody"] for ids in (*answers.values(), *copies, late.token_ids))
    assert len(set(answers["nobody"])) > 4, "it is sampled"


def test_other_seeds_say_other_things(tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        answers = run(backend, *(EngineRequest(str(seed), (3, 1, 4), 16, 1.2, seed=seed) for seed in range(6)))
    assert len({tuple(answer.token_ids) for answer in answers}) == 6


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_with_numbers_that_are_not_finite_fails_alone(value: float, tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.embed_tokens.weight"][49] = value
    healthy = [EngineRequest("plain", (1, 2), 9), EngineRequest("ranked", (2, 2), 9, 1.0, seed=3, logprobs=5)]
    with tiny_backend(tmp_path, tensors) as backend:
        expected = [run(backend, one)[0].token_ids for one in healthy]
        broken = [
            EngineRequest("bad", (4, 49), 9, 1.0),
            EngineRequest("bad and ranked", (5, 49), 9, logprobs=20),
            EngineRequest("bad and constrained", (6, 49), 9, logprobs=0, constraint=IdConstraint([3, 4])),
        ]
        answers = run(backend, broken[0], healthy[0], broken[1], healthy[1], broken[2])
        assert [answers[1].token_ids, answers[3].token_ids] == expected
        for place in (0, 2, 4):
            end = answers[place].end()
            assert (end.finish_reason, end.num_generated, answers[place].token_ids, answers[place].logprobs) == ("error", 0, [], [])
            assert isinstance(end.error, PocketLLMError)
            assert "not finite" in str(end.error)
        assert backend.health().state == "ready"
        assert backend.stats().kv_blocks_used == 0


def test_numbers_that_break_within_an_answer_end_it_there(tmp_path: Path) -> None:
    """The constraint leads a row to an id whose values break: what came before was said, and nothing comes after it."""
    tensors = tiny_tensors()
    tensors["model.embed_tokens.weight"][49] = float("nan")
    with tiny_backend(tmp_path, tensors) as backend:
        path = IdConstraint(lambda accepted: [[5], [6], [49], [7]][len(accepted)])
        bad, good = run(backend, EngineRequest("bad", (1, 2), 9, logprobs=1, constraint=path), EngineRequest("good", (1, 2), 9))
        (alone,) = run(backend, EngineRequest("good", (1, 2), 9))
    assert (bad.end().finish_reason, bad.end().num_generated, bad.token_ids) == ("error", 3, [5, 6, 49])
    assert good.token_ids == alone.token_ids


@pytest.mark.parametrize("after", [0, 1, 5])
def test_a_cancelled_turn_leaves_the_next_one_as_on_a_cold_engine(after: int, tmp_path: Path) -> None:
    """`after`: outputs of the first turn that are waited for. The prefix spans whole blocks of the cache."""
    prefix = tuple(token_id % 45 for token_id in range(3, 3 + 33))
    follow_up = EngineRequest("turn 2", (*prefix, 7, 8, 9), 12, logprobs=3)
    with tiny_backend(tmp_path) as cold:
        (expected,) = run(cold, follow_up)
    with tiny_backend(tmp_path) as backend:
        for turn in range(4):
            first = Listener()
            constraint = IdConstraint(range(45), seconds=0.002) if turn % 2 else None
            backend.submit(EngineRequest("turn 1", prefix, 30, constraint=constraint), first)
            while len(first.outputs) < after and not first.ended.is_set():
                first.started.wait(0.001)
            backend.cancel("turn 1")
            (answer,) = run(backend, follow_up)
            first.end()
            assert answer.token_ids == expected.token_ids
            assert [entry.logprob for entry in answer.logprobs] == pytest.approx([entry.logprob for entry in expected.logprobs], abs=1e-5)
        assert answer.end().cached_tokens == 32
        assert backend.stats().kv_blocks_used == 0
