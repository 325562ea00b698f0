"""Terms of a row against the float64 oracle: alone, together, beside rows without any, and step after step of one row."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from term_rows import ALL, ALONE, ENDS, EVERY, PROMPT, VOCAB, logits_of, request, requests_of, row_of

from pocketllm.backends.base import Capabilities, EngineRequest
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.backends.terms import check_request
from pocketllm.errors import ConfigurationError
from pocketllm.torch_engine.logit_edits import RowEdits, edits_of
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.sampler import edited, sample
from pocketllm.torch_engine.scheduler import UNKNOWN, Row
from tests.logit_reference import changed_logits, draw, kept_ids


def drawn(logits: torch.Tensor, rows: list[Row]) -> list[int | None]:
    masks, errors = Masks(VOCAB).take_all(rows)
    assert not errors
    edits = {place: found for place, row in enumerate(rows) if (found := edits_of(row)) is not None}
    return sample(logits, [row.request for row in rows], [row.num_generated for row in rows], masks, edits)


@pytest.mark.parametrize("terms", EVERY, ids=[*ALONE, "all"])
@pytest.mark.parametrize("answer", [[], [5], [5, 7, 5, 9, 9], [8, 9], [1, 2, 3, 9, 9, 9]])
def test_a_row_draws_what_the_oracle_draws(terms: LogitTerms, answer: list[int]) -> None:
    requests = [one for seed in range(0, 30, 3) for one in requests_of(terms, seed)]
    logits = logits_of(len(requests), len(answer))
    before = logits.clone()
    found = drawn(logits, [row_of(one, answer) for one in requests])
    assert found == [draw(line.numpy(), one, answer) for line, one in zip(logits, requests, strict=True)]
    assert torch.equal(logits, before)


def test_rows_of_all_kinds_share_a_batch() -> None:
    generator = np.random.default_rng(2)
    rows = [
        row_of(one, generator.integers(0, 13, generator.integers(0, 9)).tolist())
        for place, terms in enumerate([*EVERY, None, None])
        for one in requests_of(terms, 10 * place)
    ]
    order = generator.permutation(len(rows)).tolist()
    rows = [rows[place] for place in order]
    logits = logits_of(len(rows), 3)
    together = drawn(logits, rows)
    assert together == [draw(line.numpy(), row.request, row.token_ids[len(PROMPT) :]) for line, row in zip(logits, rows, strict=True)]
    assert together == [drawn(line[None], [row])[0] for line, row in zip(logits, rows, strict=True)]


def test_an_answer_is_the_oracles_from_its_first_token_to_its_last() -> None:
    """The same row, step after step, and a row that is made anew at each step, as another process would."""
    for terms in EVERY:
        row = row_of(request(terms, 5, 1.0), [])
        for step in range(24):
            logits = logits_of(1, 100 + step)
            answer = row.token_ids[len(PROMPT) :]
            expected = draw(logits[0].numpy(), row.request, answer)
            assert drawn(logits, [row]) == drawn(logits, [row]) == drawn(logits, [row_of(row.request, answer)]) == [expected]
            row.token_ids.append(expected)
        if terms.min_tokens:
            assert not ENDS & set(row.token_ids[len(PROMPT) :][: terms.min_tokens])


@pytest.mark.parametrize("terms", EVERY, ids=[*ALONE, "all"])
def test_edits_that_await_an_id_are_those_of_the_step_before_and_that_id(terms: LogitTerms) -> None:
    """What a device adds that has the id: one more of it, and the pairs that begin with it."""
    answer = [5, 9, 9, 8, 9, 10, 5, 6, 5]
    logits = logits_of(1, 7)[0]
    waits, knows = RowEdits(request(terms)), RowEdits(request(terms))
    for length in range(1, len(answer) + 1):
        ids, last = [*PROMPT, *answer[:length]], answer[length - 1]
        edits = waits.step([*ids[:-1], UNKNOWN], length)
        assert edits.awaits_last
        assert len(set(edits.ids.tolist())) == len(edits.ids)
        seen = dict(zip(edits.ids.tolist(), edits.seen.tolist(), strict=True))
        added = dict(zip(edits.ids.tolist(), edits.added.tolist(), strict=True))
        seen[last], added[last] = seen.get(last, 0) + 2, added.get(last, 0.0)
        for first, second in edits.pairs.tolist():
            if first == last:
                seen[second], added[second] = seen.get(second, 0), -np.inf
        table = np.array([[*seen], [*seen.values()], np.array([added[token_id] for token_id in seen], np.float32).view(np.int32)], np.int32).T.copy()
        known = knows.step(ids, length)
        assert not known.awaits_last
        assert known.pairs.shape == (0, 2)
        expected = edited(logits, known)
        assert torch.equal(edited(logits, dataclasses.replace(edits, table=table)), expected)
        np.testing.assert_allclose(
            expected.numpy(),
            changed_logits(logits.numpy(), dataclasses.replace(request(terms), terms=dataclasses.replace(terms, allowed_token_ids=None)), answer[:length]),
            rtol=1e-6,
            atol=1e-6,
        )


def test_a_long_prompt_and_many_biases_make_the_table_grow() -> None:
    generator = np.random.default_rng(4)
    terms = LogitTerms(1.2, 0.3, 0.1, tuple((token_id, float(bias)) for token_id, bias in enumerate(generator.uniform(-3, 3, 150))))
    one = dataclasses.replace(request(terms, temperature=0.0), prompt_token_ids=tuple(generator.integers(0, VOCAB, 3000).tolist()))
    answer = generator.integers(0, VOCAB, 500).tolist()
    logits = logits_of(1, 9)
    found = edited(logits[0], edits) if (edits := edits_of(row_of(one, answer))) is not None else None
    assert found is not None
    np.testing.assert_allclose(found.numpy(), changed_logits(logits[0].numpy(), one, answer), rtol=1e-5, atol=1e-5)


def test_nothing_is_left_to_draw() -> None:
    row = row_of(request(LogitTerms(min_tokens=5, allowed_token_ids=(0, 7))), [])
    assert drawn(logits_of(1, 1), [row]) == [None]


def test_a_value_that_is_not_finite_is_not_hidden_by_terms() -> None:
    for value in (float("nan"), float("inf")):
        logits = logits_of(1, 1)
        logits[0, 12] = value
        assert drawn(logits, [row_of(request(ALL), [5])]) == [None]


def test_the_oracle_itself() -> None:
    """By hand, on four ids."""
    logits = np.array([2.0, -1.0, 0.5, 0.0], np.float32)
    one = EngineRequest("r", (1, 0), 9, 1.0, eos_token_ids=frozenset({3}), terms=LogitTerms(2.0, 0.5, 0.25, ((2, 1.0),), min_tokens=4, bad_words=((0, 2),)))
    assert changed_logits(logits, one, [0, 0, 3]).tolist() == [2 / 2 - 1.0 - 0.25, -2.0, 1.5, -np.inf]
    assert changed_logits(logits, one, [3, 3, 3, 0]).tolist() == [1 - 0.5 - 0.25, -2.0, -np.inf, 0.0 - 1.5 - 0.25]
    probs = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    for min_p, top_k, top_p, kept in ((0.5, 0, 1.0, 2), (0.61, 0, 1.0, 1), (0.0, 3, 1.0, 3), (0.0, 0, 0.6, 2), (0.5, 0, 0.6, 1), (0.2, 2, 0.9, 2)):
        cut = dataclasses.replace(one, terms=LogitTerms(min_p=min_p), top_k=top_k, top_p=top_p)
        assert kept_ids(probs, cut).tolist() == list(range(kept)), (min_p, top_k, top_p)


def test_an_end_that_the_model_does_not_have_is_no_id() -> None:
    one = dataclasses.replace(request(LogitTerms(min_tokens=3), temperature=0.0), eos_token_ids=frozenset({7, VOCAB + 3}))
    logits = logits_of(1, 4)
    assert drawn(logits, [row_of(one, [])]) == [draw(logits[0].numpy(), dataclasses.replace(one, eos_token_ids=frozenset({7})), [])]


@pytest.mark.parametrize("terms", [LogitTerms(logit_bias=((50, 1.0),)), LogitTerms(allowed_token_ids=(1, 50)), LogitTerms(bad_words=((1, -1),))])
def test_ids_outside_the_vocabulary_are_refused_at_the_door(terms: LogitTerms) -> None:
    capabilities = Capabilities("torch", "cpu", 1, 64, 50)
    with pytest.raises(ConfigurationError, match="no token of this model") as caught:
        check_request(EngineRequest("a", (1,), 1, terms=terms), capabilities)
    assert caught.value.param in ("logit_bias", "allowed_token_ids", "bad_words")
