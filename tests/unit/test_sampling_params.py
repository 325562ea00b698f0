"""SamplingParams: what passes, and what is refused by name."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import pytest

from pocketllm import ConfigurationError, SamplingParams
from pocketllm.errors import PocketLLMError
from pocketllm.protocol.fields import check_fields
from pocketllm.protocol.sampling import check_sampling, sampling_fields, sampling_from


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 2},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 50},
        {"seed": 0},
        {"seed": 2**63 - 1},
    ],
)
def test_valid(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed"):
        assert getattr(params, name) == fields.get(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", False),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 2**31),
        ("n", 0),
        ("n", 129),
        ("n", True),
        ("logprobs", 21),
        ("logprobs", False),
        ("stop", 5),
        ("stop", [5]),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", "1"),
        ("frequency_penalty", 2.1),
        ("presence_penalty", math.nan),
        ("repetition_penalty", 0),
        ("repetition_penalty", True),
        ("logit_bias", {"5": 101}),
        ("logit_bias", [5]),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("stop_token_ids", 5),
        ("stop_token_ids", [-1]),
        ("ignore_eos", 1),
        ("min_tokens", -1),
        ("allowed_token_ids", []),
        ("bad_words", "a"),
        ("bad_words", [5]),
        ("priority", 2**31),
    ],
)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f'"{name}.*" = .* is not supported by this server: ') as caught:
        SamplingParams(**{name: value})
    assert (caught.value.param or "").partition(".")[0] == name
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigurationError) as over_http:
        check_fields({name: value}, "completions")
    assert str(caught.value) == str(over_http.value)


def test_whole_numbers_may_be_written_as_floats() -> None:
    assert SamplingParams(max_tokens=2.0, top_k=5.0, seed=1.0, n=3.0, logprobs=0.0) == SamplingParams(max_tokens=2, top_k=5, seed=1, n=3, logprobs=0)  # type: ignore[arg-type]
    assert isinstance(SamplingParams(n=3.0).n, int)  # type: ignore[arg-type]


def test_fixed_once_made() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1  # type: ignore[misc]


def test_limits_are_in_the_message() -> None:
    with pytest.raises(ConfigurationError, match=r"from 0 .*to 2"):
        SamplingParams(temperature=99)
    with pytest.raises(ConfigurationError, match="at most 2147483647"):
        SamplingParams(top_k=2**40)


@pytest.mark.parametrize("fields", [{"frequency_penalty": 0}, {"min_p": 0.0}, {"logit_bias": {}}, {"ignore_eos": None}, {"n": None}])
def test_harmless_keywords_pass(fields: dict[str, Any]) -> None:
    assert SamplingParams(max_tokens=3, **fields) == SamplingParams(max_tokens=3)


@pytest.mark.parametrize("name", ["temprature", "tools", "max_completion_tokens", "stream", "top_logprobs", "messages", "user"])
def test_what_is_no_field_is_named(name: str) -> None:
    with pytest.raises(ConfigurationError, match=f'^"{name}" = 5 is not supported') as caught:
        SamplingParams(**{name: 5})
    assert caught.value.param == name


def test_positions_copies_and_replacements() -> None:
    params = SamplingParams(5, 0.5)
    assert (params.max_tokens, params.temperature) == (5, 0.5)
    assert dataclasses.replace(params, n=2).n == 2
    assert copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == params


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(max_tokens=3, temperature=0.5, top_p=0.5, top_k=4, seed=5, n=3),
        SamplingParams(logprobs=0),
        SamplingParams(logprobs=7, top_k=0),
        SamplingParams(frequency_penalty=1, presence_penalty=-2, repetition_penalty=1.5, logit_bias={5: 1, 7: -100}, min_p=0.1),
        SamplingParams(max_tokens=9, stop_token_ids=[3, 1], ignore_eos=True, min_tokens=4, allowed_token_ids=[2], bad_words=["a b"], priority=-3),
    ],
)
def test_there_and_back(params: SamplingParams, endpoint: Any) -> None:
    body = sampling_fields(params, endpoint)
    check_fields(body, endpoint)
    assert sampling_from(body, endpoint) == params


def test_terms_are_kept_in_one_form() -> None:
    params = SamplingParams(logit_bias={"5": 1, 6: 0.5}, stop_token_ids=[2.0], allowed_token_ids=(3,), bad_words=["a"], min_tokens=1.0, max_tokens=2)  # type: ignore[arg-type,dict-item,list-item]
    assert (params.logit_bias, params.stop_token_ids, params.allowed_token_ids, params.bad_words) == ({5: 1.0, 6: 0.5}, (2,), (3,), ("a",))
    assert isinstance(params.min_tokens, int)
    assert SamplingParams(logit_bias={}, stop_token_ids=None, bad_words=None, priority=None, frequency_penalty=None) == SamplingParams()  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="is no token id"):
        SamplingParams(logit_bias={-1: 1})


def test_bodies_to_params() -> None:
    assert sampling_from({"logprobs": True}, "chat").logprobs == 0
    assert sampling_from({"logprobs": True, "top_logprobs": 3.0}, "chat").logprobs == 3
    assert sampling_from({"logprobs": False, "top_logprobs": 0}, "chat").logprobs is None
    assert sampling_from({"logprobs": 0}, "completions").logprobs == 0
    assert sampling_from({"logprobs": None}, "completions").logprobs is None
    assert sampling_from({"stop": ["a", ""], "n": 2.0, "max_tokens": 9, "max_completion_tokens": 4.0}, "chat") == SamplingParams(4, n=2, stop=["a", ""])


def test_what_the_plane_lacks_is_refused() -> None:
    check_sampling(SamplingParams(logprobs=1, temperature=0, n=2), "chat", frozenset({"logprobs"}))
    terms = [(SamplingParams(**{name: value}), name) for name, value in (("frequency_penalty", 1), ("min_p", 0.1), ("priority", 1), ("bad_words", ["a"]))]  # type: ignore[arg-type]
    for params, name in ((SamplingParams(logprobs=1), "logprobs"), (SamplingParams(temperature=1), "temperature"), (SamplingParams(n=2), "n"), *terms):
        for endpoint in ("chat", "completions"):
            with pytest.raises(PocketLLMError) as caught:
                check_sampling(params, endpoint, frozenset())  # type: ignore[arg-type]
            assert caught.value.param == name
