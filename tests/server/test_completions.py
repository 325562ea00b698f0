"""POST /v1/completions over the fake backend."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fake_serving import call, fake
from tests.server.test_chat import events

PATH = "/v1/completions"


def test_answer_has_openais_shape() -> None:
    response = call("POST", PATH, json={"prompt": "Hello", "max_tokens": 3, "temperature": 0})
    body = response.json()
    assert response.status_code == 200
    assert response.headers["x-request-id"] == body["id"]
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["model"] == "fake-1"
    (choice,) = body["choices"]
    assert choice == {"index": 0, "text": choice["text"], "logprobs": None, "finish_reason": "length"}
    assert len(choice["text"]) == 3
    assert body["usage"]["prompt_tokens"] == 5


def test_default_budget_is_16() -> None:
    assert call("POST", PATH, json={"prompt": "Hello"}).json()["usage"]["completion_tokens"] == 16
    assert call("POST", PATH, json={"prompt": "Hello", "max_tokens": None}, default_max_tokens=3).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("prompt", [list(b"Hello"), [72.0, 101, 108, 108, 111], ["Hello"], [list(b"Hello")]])
def test_every_spelling_of_one_prompt_gives_the_same_text(prompt: Any) -> None:
    wanted = call("POST", PATH, json={"prompt": "Hello", "temperature": 0}).json()["choices"][0]["text"]
    assert call("POST", PATH, json={"prompt": prompt, "temperature": 0}).json()["choices"][0]["text"] == wanted


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        "",
        [],
        5,
        True,
        {"text": "Hi"},
        [1, "a"],
        [1, None],
        [1.5],
        [True],
        [-1],
        [256],
        [10**30],
        [10**4299],
        ["a", 5],
        "\udc00",
        [None],
    ],
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    response = call("POST", PATH, content=json.dumps({"prompt": prompt}).encode())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt"


def test_stream_ends_with_finish_usage_and_done() -> None:
    body = {"prompt": "Hello", "max_tokens": 3, "stream": True, "temperature": 0, "stream_options": {"include_usage": True}}
    payloads = events(call("POST", PATH, json=body).text)
    assert payloads.pop() == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads]
    assert chunks.pop()["usage"]["completion_tokens"] == 3
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == call("POST", PATH, json={**body, "stream": False}).json()["choices"][0]["text"]


def test_budget_beyond_the_context_is_named_as_such() -> None:
    response = call("POST", PATH, fake(context_length=16), json={"prompt": "Hello", "max_tokens": 12})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert call("POST", PATH, fake(context_length=16), json={"prompt": "Hello", "max_tokens": 11}).status_code == 200
