"""`best_of`: the candidates with the highest mean log probability are the choices, and all of them are counted."""

from __future__ import annotations

from typing import Any

import pytest

from pocketllm import SamplingParams
from pocketllm.backends.base import StepOutput, TokenLogprobs
from pocketllm.backends.fake import FakeBackend
from pocketllm.errors import ConfigurationError
from pocketllm.llm import build_request, build_requests
from tests.fake_serving import call, make_service

ANSWERS = {b"aa": (-1.0, -3.0), b"b": (-1.5,), b"ccc": (-0.5, -0.5, -9.0), b"": (), b"d": (-0.25,)}  # means -2, -1.5, -3.33, none, -0.25


class Scored(FakeBackend):
    """Gives the answers in turn, with those log probabilities."""

    def __init__(self, **options: Any) -> None:
        super().__init__(answers=[list(answer) for answer in ANSWERS], tokens_per_step=8, max_slots=1, **options)

    def submit(self, request: Any, on_step: Any) -> None:
        def listen(step: StepOutput) -> None:
            values = ANSWERS[bytes(step.token_ids)] if step.finish_reason in ("stop", "length") else ()
            step.logprobs = tuple(TokenLogprobs(value) for value in values) if request.logprobs is not None else ()
            on_step(step)

        super().submit(request, listen)


def complete(**fields: Any) -> dict[str, Any]:
    response = call("POST", "/v1/completions", Scored(), json={"prompt": "Hi", "max_tokens": 8, "temperature": 1, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def test_the_best_are_the_choices_best_first() -> None:
    body = complete(best_of=5, n=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "d"), (1, "b")]
    assert all(choice["logprobs"] is None for choice in body["choices"]), "nobody asked for them"
    assert body["usage"]["completion_tokens"] == sum(len(answer) + 1 for answer in ANSWERS), "every candidate is counted, with the step that ended it"
    assert body["usage"]["prompt_tokens"] == 2
    assert [choice["text"] for choice in complete(best_of=5, n=5)["choices"]] == ["aa", "b", "ccc", "", "d"], "as many candidates as choices: none is dropped"


def test_an_answer_without_tokens_comes_last() -> None:
    assert [choice["text"] for choice in complete(best_of=4, n=3)["choices"]] == ["b", "aa", "ccc"]


def test_each_prompt_has_its_own_best() -> None:
    body = complete(prompt=["one", "two"], best_of=2)
    assert [(choice["index"], choice["text"]) for choice in body["choices"]] == [(0, "b"), (1, "ccc")]


def test_log_probabilities_are_those_of_the_best() -> None:
    (choice,) = complete(best_of=3, logprobs=0)["choices"]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("b", [-1.5])


def test_the_number_of_answers_is_bounded() -> None:
    for fields in ({"prompt": ["a"] * 65, "best_of": 2}, {"best_of": 129}):
        response = call("POST", "/v1/completions", Scored(), json={"prompt": "Hi", "temperature": 1, **fields})
        assert response.status_code == 400


def test_the_library() -> None:
    service = make_service(Scored())
    try:
        (request,) = build_requests("Hi", SamplingParams(max_tokens=8, best_of=3, temperature=1), None, service.features)
        with service.stream(request) as stream:
            output = stream.result()
        assert [(choice.index, choice.text) for choice in output.choices] == [(0, "b")]
        with pytest.raises(ConfigurationError) as caught:
            build_request("Hi", SamplingParams(best_of=3), None, service.features)
        assert caught.value.param == "best_of"
        with pytest.raises(ConfigurationError) as caught:
            SamplingParams(n=3, best_of=2)
        assert caught.value.param == "best_of"
    finally:
        service.close()
