"""From SamplingParams to what a row of the engine is given: terms, ends, budgets, priority."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.checkpoint import GenerationDefaults
from pocketllm.errors import ConfigurationError
from pocketllm.generation import GenerationService
from pocketllm.protocol.request import GenerationRequest
from pocketllm.row_terms import row_terms
from pocketllm.sampling_params import SamplingParams
from tests.fake_serving import byte_tokenizer, fake

EOS = 200


@pytest.fixture
def service() -> Iterator[GenerationService]:
    service = GenerationService(fake(), byte_tokenizer(), None, GenerationDefaults(eos_token_ids=(EOS,)), model_name="m")
    yield service
    service.close()


def rows(service: GenerationService, response_format: dict[str, Any] | None = None, **sampling: Any) -> tuple[EngineRequest, ...]:
    request = GenerationRequest("Hello", SamplingParams(**{"max_tokens": 8, **sampling}), "a")
    return service.prepare([dataclasses.replace(request, response_format=response_format)]).rows


def test_a_request_without_terms_has_none(service: GenerationService) -> None:
    (row,) = rows(service, frequency_penalty=0, repetition_penalty=1.0, logit_bias={5: 0}, bad_words=[], min_p=0, min_tokens=0)
    assert row.terms is None
    assert (row.eos_token_ids, row.stop_token_ids, row.ignores_eos, row.priority) == ({EOS}, frozenset(), False, 0)


def test_every_term_reaches_the_row_and_choices_share_them(service: GenerationService) -> None:
    first, second = rows(
        service,
        n=2,
        frequency_penalty=0.5,
        presence_penalty=-1,
        repetition_penalty=1.25,
        logit_bias={"7": 2, 3: -100},
        min_p=0.25,
        min_tokens=8,
        allowed_token_ids=[9, 1, 9],
        bad_words=["b"],
        priority=-4,
    )
    assert first.terms == LogitTerms(1.25, 0.5, -1.0, ((3, -100.0), (7, 2.0)), 0.25, 8, (1, 9), ((98,),))
    assert first.terms is second.terms
    assert first.priority == second.priority == -4


def test_the_least_penalty_leaves_numbers(service: GenerationService) -> None:
    (row,) = rows(service, repetition_penalty=1e-300)
    assert row.terms == LogitTerms(repetition_penalty=1e-6)


def test_bad_words_are_kept_out_alone_and_after_a_space() -> None:
    terms = row_terms(SamplingParams(bad_words=["ab", " ab", "b", "cd"]), byte_tokenizer(), 256)
    assert terms is not None
    assert terms.bad_words == ((98,), (99, 100)), "what ends with a bad word, such as one after a space, is kept out with it"


def test_long_bad_words_are_compared_in_little_work() -> None:
    """Each is compared at the lengths that there are, not at all of its own: that was the square of the longest, half a minute of one."""
    long = "x" * 30_000
    terms = row_terms(SamplingParams(bad_words=[long, "yx", "y" + "x" * 2000]), byte_tokenizer(), 256)
    assert terms is not None
    assert sorted(map(len, terms.bad_words)) == [2, 2001, 30_000]


def test_a_bad_word_that_is_no_text_is_named() -> None:
    with pytest.raises(ConfigurationError, match="surrogate") as refused:
        row_terms(SamplingParams(bad_words=["b", "\ud800"]), byte_tokenizer(), 256)
    assert refused.value.param == "bad_words[1]"


def test_what_ends_a_row(service: GenerationService) -> None:
    (both,) = rows(service, stop_token_ids=[5, 6.0])
    assert (both.eos_token_ids, both.stop_token_ids) == ({5, 6, EOS}, {5, 6})
    (own,) = rows(service, stop_token_ids=[5], ignore_eos=True)
    assert (own.eos_token_ids, own.ignores_eos) == ({5}, True)
    (none,) = rows(service, ignore_eos=True)
    assert none.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("sampling", "param", "says"),
    [
        ({"logit_bias": {"256": 1}}, "logit_bias", "ids are whole numbers from 0 to 255"),
        ({"allowed_token_ids": [1, 256]}, "allowed_token_ids", "ids are whole numbers from 0 to 255"),
        ({"stop_token_ids": [999]}, "stop_token_ids", "ids are whole numbers from 0 to 255"),
        ({"min_tokens": 9}, "min_tokens", "more than the 8 tokens"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos", "held to a form"),
    ],
)
def test_what_the_model_or_the_budget_has_no_room_for_is_refused_by_name(service: GenerationService, sampling: dict[str, Any], param: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        rows(service, **sampling)
    assert caught.value.param == param
    assert "\n" not in str(caught.value)
