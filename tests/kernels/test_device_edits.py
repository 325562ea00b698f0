"""Terms of rows on the device: the oracle's draws, whether the host has the id drawn last or the device alone, and log probabilities of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from term_rows import ALL, EVERY, VOCAB, logits_of, request, requests_of, row_of

from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.torch_engine.device_edits import DeviceEdits
from pocketllm.torch_engine.device_sampler import NOT_FINITE, NOTHING_ALLOWED, DeviceSampler, DrawnTokens
from pocketllm.torch_engine.kernels.logit_edits import cut_unlikely, edit_logits
from pocketllm.torch_engine.kernels.sampler import LastIds
from pocketllm.torch_engine.logit_edits import RowEdits, edits_of
from pocketllm.torch_engine.logprobs import rank
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.scheduler import UNKNOWN, Row
from tests.logit_reference import changed_logits, draw


@pytest.fixture
def device(triton_device: str) -> torch.device:
    return torch.device(triton_device)


def prepare(sampler: DeviceSampler, rows: Sequence[Row]) -> None:
    masks, _errors = Masks(VOCAB).take_all(rows)
    edits = {place: found for place, row in enumerate(rows) if (found := edits_of(row)) is not None}
    sampler.prepare([row.request for row in rows], [row.num_generated for row in rows], masks, edits, range(len(rows)))


def drawn(sampler: DeviceSampler, rows: Sequence[Row], logits: torch.Tensor, last_ids: torch.Tensor) -> DrawnTokens:
    """Row i has slot i."""
    device = last_ids.device
    prepare(sampler, rows)
    return sampler.draw(logits.to(device, copy=True), LastIds(last_ids, torch.arange(len(rows), device=device)))


def test_rows_of_all_kinds_draw_what_the_oracle_draws_step_after_step(device: torch.device) -> None:
    """As an engine that runs ahead has it: the host learns an id one step later than the device."""
    kinds = [request_ for place, terms in enumerate([*EVERY, None]) for request_ in requests_of(terms, 7 * place)]
    kinds = kinds if device.type == "cuda" else kinds[1::3] + kinds[-6:]
    rows = [row_of(one, []) for one in kinds]
    answers: list[list[int]] = [[] for _ in rows]
    sampler, last_ids = DeviceSampler(len(rows), VOCAB, device), torch.zeros(len(rows), dtype=torch.int64, device=device)
    for step in range(20 if device.type == "cuda" else 5):
        logits = logits_of(len(rows), 40 + step)
        logits[:, 5:10] += 3  # so that bad words, and ids that come again, are drawn
        expected = [draw(line.numpy(), row.request, answer) for line, row, answer in zip(logits, rows, answers, strict=True)]
        ids, status = drawn(sampler, rows, logits, last_ids).wait()
        assert status == [0] * len(rows)
        assert ids == expected, step
        assert ids == last_ids.tolist()
        for row, answer, token_id in zip(rows, answers, ids, strict=True):
            if answer:
                row.token_ids[-1] = answer[-1]
            row.token_ids.append(UNKNOWN)
            answer.append(token_id)


@pytest.mark.parametrize("tile", [64, 256])
def test_edits_that_await_an_id(device: torch.device, tile: int) -> None:
    """Every last id: in the table or not, with pairs or without."""
    answer = [5, 9, 9, 8, 9, 10, 5, 6, 5]
    count = len(answer)
    for terms in (ALL, LogitTerms(1.5, 1.0, 0.5), LogitTerms(bad_words=((5, 6), (6, 5), (8, 9, 10), (9, 9, 8)))):
        terms = dataclasses.replace(terms, allowed_token_ids=None, min_p=0.0)
        one = request(terms)
        logits = logits_of(count, 3)
        rows = {place: RowEdits(one).step([*one.prompt_token_ids, *answer[:place], UNKNOWN], place + 1) for place in range(count)}
        found = logits.to(device, copy=True)
        edits = DeviceEdits(rows, [one] * count, range(count), device)
        edit_logits(found, edits.numbers, count, torch.tensor(answer, device=device), tile=tile)
        for place in range(count):
            expected = changed_logits(logits[place].numpy(), one, answer[: place + 1])
            np.testing.assert_allclose(found[place].cpu().numpy(), expected, rtol=2e-6, atol=2e-6)


def test_min_p_is_of_the_likeliest_allowed_id_whatever_the_chunks(device: torch.device) -> None:
    rows = [row_of(request(LogitTerms(min_p=min_p, allowed_token_ids=allowed), temperature=heat), []) for min_p, allowed, heat in
            ((0.3, None, 1.0), (0.01, tuple(range(100, 140)), 0.5), (1.0, None, 2.0), (0.999, (3, 4), 1.0))]  # fmt: skip
    logits = logits_of(4, 8)
    sampler = DeviceSampler(4, VOCAB, device)
    prepare(sampler, rows)
    edits = DeviceEdits(
        {place: found for place, row in enumerate(rows) if (found := edits_of(row)) is not None}, [row.request for row in rows], range(4), device
    )
    for chunk in (32, 64, 256):
        found = logits.to(device, copy=True)
        cut_unlikely(found, edits.cut_numbers, 4, sampler.tensors(), chunk=chunk)
        for place, row in enumerate(rows):
            assert row.request.terms is not None
            changed = changed_logits(logits[place].numpy(), row.request, [])
            keeps = np.exp((changed - changed.max()) / row.request.temperature) >= row.request.terms.min_p
            allowed = np.isfinite(changed)
            assert (np.isfinite(found[place].cpu().numpy()) & allowed).tolist() == (keeps & allowed).tolist()


def test_log_probabilities_are_of_the_logits_before_the_edits(device: torch.device) -> None:
    sampler = DeviceSampler(4, VOCAB, device)
    last_ids = torch.zeros(4, dtype=torch.int64, device=device)
    for asked in ([3, None, 0, 5], [2, 1, 0, 5], [None, None, 0, 5]):  # some rows of each kind, all rows, none that is edited
        rows = [row_of(dataclasses.replace(request(terms), logprobs=count), [5, 9]) for terms, count in zip((ALL, ALL, None, None), asked, strict=True)]
        logits = logits_of(4, 6)
        result = drawn(sampler, rows, logits, last_ids)
        ids, _status = result.wait()
        for place, count in enumerate(asked):
            if count is not None:
                found, expected = result.logprobs(place, count), rank(logits[place], ids[place], count)
                assert found.logprob == pytest.approx(expected.logprob, abs=2e-6)
                assert [token_id for token_id, _ in found.top] == [token_id for token_id, _ in expected.top]


def test_rows_that_draw_nothing_say_why(device: torch.device) -> None:
    rows = [row_of(request(ALL), [5]), row_of(request(LogitTerms(min_tokens=5, allowed_token_ids=(0, 7))), []), row_of(request(ALL), [])]
    logits = logits_of(3, 2)
    logits[0, 12] = float("nan")
    _ids, status = drawn(DeviceSampler(3, VOCAB, device), rows, logits, torch.zeros(3, dtype=torch.int64, device=device)).wait()
    assert status == [NOT_FINITE, NOTHING_ALLOWED, 0]
