"""Log probabilities against log_softmax in float64, alone and through the engine."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from test_model_runner import Plane
from tiny_backend import tiny_backend
from tiny_llama import tiny_tensors, write_tiny_llama

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.logprobs import LOWEST, rank
from pocketllm.torch_engine.scheduler import Row
from tests.id_constraint import IdConstraint
from tests.row_listener import run


def oracle(logits: torch.Tensor) -> list[tuple[int, float]]:
    """(id, log probability) of all ids, most likely first, of equal ones the lower id first."""
    logprobs = logits.double().log_softmax(dim=-1).tolist()
    return sorted(enumerate(logprobs), key=lambda pair: (-pair[1], pair[0]))


@pytest.mark.parametrize("vocab_size", [1, 2, 7, 1000, 49152])
@pytest.mark.parametrize("scale", [0.01, 3.0, 100.0])
def test_rank_is_log_softmax(vocab_size: int, scale: float) -> None:
    logits = torch.randn(vocab_size) * scale
    expected = oracle(logits)
    token_id = vocab_size // 2
    for num_top in (0, 1, 5, 20):
        found = rank(logits, token_id, num_top)
        assert found.logprob == pytest.approx(dict(expected)[token_id], abs=1e-5)
        assert [other for other, _ in found.top] == [other for other, _ in expected[:num_top]]
        assert [value for _, value in found.top] == pytest.approx([value for _, value in expected[:num_top]], abs=1e-5)
        assert all(value <= 0 for _, value in found.top)


@pytest.mark.parametrize("levels", [1, 2, 3, 30])
@pytest.mark.parametrize("vocab_size", [5, 20, 21, 1000, 49152])
def test_of_equal_logits_the_lower_id_comes_first(levels: int, vocab_size: int) -> None:
    logits = torch.randint(0, levels, (vocab_size,)).float()
    expected = [other for other, _ in oracle(logits)]
    for num_top in (1, 2, 5, 20):
        assert [other for other, _ in rank(logits, 0, num_top).top] == expected[:num_top]


def test_a_tie_across_the_border_takes_the_lower_id() -> None:
    logits = torch.full((3000,), -5.0)
    logits[[2999, 40, 7]] = torch.tensor([3.0, 1.0, 1.0])
    assert [other for other, _ in rank(logits, 0, 2).top] == [2999, 7]
    assert [other for other, _ in rank(logits, 0, 5).top] == [2999, 7, 40, 0, 1]


def test_numbers_are_finite_and_at_most_zero() -> None:
    logits = torch.full((30,), -math.inf)
    logits[3] = 2.0
    found = rank(logits, 5, 20)
    assert found.logprob == LOWEST
    assert found.top[:3] == ((3, 0.0), (0, LOWEST), (1, LOWEST))
    assert rank(torch.tensor([3e38, -3e38, 0.0]), 1, 3).top == ((0, 0.0), (2, LOWEST), (1, LOWEST))


def engine_logits(directory: Path, prompt: list[int]) -> torch.Tensor:
    """[vocab_size] float32 behind `prompt`."""
    plane = Plane(directory, 16)
    caught: list[torch.Tensor] = []
    inner = plane.runner._draw

    def catch(logits: torch.Tensor, rows: list[Row], masks: object) -> object:
        caught.append(logits.clone())
        return inner(logits, rows, masks)  # type: ignore[arg-type]

    plane.runner._draw = catch  # type: ignore[method-assign, assignment]
    plane.add("x", prompt, 1)
    plane.run()
    return caught[0][0]


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 5.0, "seed": 3}, {"temperature": 1.5, "top_k": 2, "seed": 4}, {"temperature": 2.0, "top_p": 0.4}, {"constraint": range(20, 30)}],
    ids=["greedy", "hot", "top_k", "top_p", "constraint"],
)
def test_the_engine_ranks_the_raw_distribution(options: dict[str, object], tmp_path: Path) -> None:
    prompt = [3, 1, 4, 1, 5]
    write_tiny_llama(tmp_path, tiny_tensors())
    if "constraint" in options:
        options = {"constraint": IdConstraint(options["constraint"])}  # type: ignore[arg-type]
    with tiny_backend(tmp_path) as backend:
        (answer,) = run(backend, EngineRequest("a", tuple(prompt), 8, logprobs=20, **options))  # type: ignore[arg-type]
    assert len(answer.logprobs) == len(answer.token_ids) == 8
    for place, (token_id, entry) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        expected = oracle(engine_logits(tmp_path, prompt + answer.token_ids[:place]))
        assert entry.logprob == pytest.approx(dict(expected)[token_id], abs=1e-5)
        assert [value for _, value in entry.top] == pytest.approx([value for _, value in expected[:20]], abs=1e-5)
        assert [other for other, _ in entry.top] == [other for other, _ in expected[:20]]
        if not options:
            assert entry.top[0] == (token_id, entry.logprob), "greedy draws the most likely id"


def test_only_asking_rows_get_them_and_only_as_many_as_asked(tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        asked = [None, 0, 1, 7, 20, None]
        answers = run(backend, *(EngineRequest(str(place), (1 + place, 2), 6, logprobs=count) for place, count in enumerate(asked)))
    for count, answer in zip(asked, answers, strict=True):
        assert len(answer.logprobs) == (0 if count is None else 6)
        assert all(len(entry.top) == count for entry in answer.logprobs)


def test_they_do_not_change_what_is_drawn_nor_depend_on_company(tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        one = EngineRequest("a", (9, 8, 7), 12, 1.3, seed=5, logprobs=5)
        (alone,) = run(backend, one)
        (plain,) = run(backend, EngineRequest("a", (9, 8, 7), 12, 1.3, seed=5))
        together = run(backend, one, *(EngineRequest(str(place), (place, 3), 12, 0.5 * place, seed=place, logprobs=place) for place in range(5)))[0]
    assert alone.token_ids == plain.token_ids == together.token_ids
    for entry, other in zip(alone.logprobs, together.logprobs, strict=True):
        assert entry.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in other.top]


def test_an_eos_step_has_none(tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        (plain,) = run(backend, EngineRequest("a", (9, 8, 7), 4))
        (answer,) = run(backend, EngineRequest("a", (9, 8, 7), 4, eos_token_ids=frozenset(plain.token_ids[:1]), logprobs=3))
    assert (answer.end().finish_reason, answer.token_ids, answer.logprobs) == ("stop", [], [])


def test_rows_that_do_not_ask_are_not_ranked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranked: list[int] = []

    def counting(logits: torch.Tensor, token_id: int, num_top: int) -> object:
        ranked.append(num_top)
        return rank(logits, token_id, num_top)

    monkeypatch.setattr("pocketllm.torch_engine.model_runner.rank", counting)
    with tiny_backend(tmp_path) as backend:
        run(backend, *(EngineRequest(str(place), (place, 2), 3, logprobs=4 if place == 1 else None) for place in range(4)))
    assert ranked == [4, 4, 4]
