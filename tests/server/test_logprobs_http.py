"""Log probabilities over HTTP beyond a finished answer's: of an echoed prompt, in vLLM's form, and on streams."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pocketllm import SamplingParams
from pocketllm.backends.base import EngineRequest
from pocketllm.backends.fake import FakeBackend
from tests.fake_serving import call, chat_body, fake, make_service, qwen_like
from tests.server.test_chat import events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "é, the prompt"


def complete(backend: FakeBackend | None = None, **fields: Any) -> dict[str, Any]:
    response = call("POST", COMPLETIONS, backend, json={"prompt": PROMPT, "max_tokens": 3, "temperature": 0, **fields})
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


def check_spelled(choice: dict[str, Any]) -> None:
    """The arrays of a choice cover its text token by token."""
    ranks = choice["logprobs"]
    assert len(ranks["tokens"]) == len(ranks["token_logprobs"]) == len(ranks["top_logprobs"]) == len(ranks["text_offset"])
    assert ranks["text_offset"] == sorted(ranks["text_offset"])
    for token, offset in zip(ranks["tokens"], ranks["text_offset"], strict=True):
        assert "�" in token or choice["text"][offset:].startswith(token)


@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode())], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_log_probabilities(prompt: Any, max_tokens: int) -> None:
    body = complete(prompt=prompt, echo=True, logprobs=2, max_tokens=max_tokens)
    (choice,), num_prompt = body["choices"], len(PROMPT.encode())
    assert choice["text"].startswith(PROMPT)
    assert len(choice["text"]) == len(PROMPT) + max_tokens
    assert choice["finish_reason"] == "length"
    check_spelled(choice)
    ranks = choice["logprobs"]
    assert len(ranks["tokens"]) == num_prompt + max_tokens
    assert (ranks["token_logprobs"][0], ranks["top_logprobs"][0]) == (None, None)
    assert all(isinstance(value, float) for value in ranks["token_logprobs"][1:])
    assert all(2 <= len(top) <= 3 for top in ranks["top_logprobs"][1:])
    assert len(ranks["content"]) == max_tokens, "content is of what was generated"
    assert body["usage"] == {**body["usage"], "prompt_tokens": num_prompt, "completion_tokens": max_tokens}


def test_echo_without_log_probabilities() -> None:
    assert complete(echo=True)["choices"][0]["text"] == PROMPT + complete()["choices"][0]["text"]
    (choice,) = complete(echo=True, max_tokens=0)["choices"]
    assert (choice["text"], choice["logprobs"], choice["finish_reason"]) == (PROMPT, None, "length")


def test_echo_of_several_prompts_and_choices() -> None:
    body = complete(prompt=["one", "two"], n=2, temperature=1, seed=1, echo=True, logprobs=0)
    assert [choice["text"][:3] for choice in body["choices"]] == ["one", "one", "two", "two"]
    assert all(len(choice["logprobs"]["tokens"]) == 6 for choice in body["choices"])
    assert body["usage"]["prompt_tokens"] == 6


def test_stop_sequences_are_not_looked_for_in_an_echo() -> None:
    backend = fake(answers=[list(b"abcd")])
    (choice,) = complete(backend, prompt="ab", echo=True, stop="c", max_tokens=9, logprobs=0)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abab", "stop")
    check_spelled(choice)


def test_the_one_token_behind_an_echo_is_always_there() -> None:
    """Clients that score a text drop the last token: were an end of sequence left out, they would drop one of the text."""
    eos = qwen_like().capabilities.vocab_size - 1
    (choice,) = complete(qwen_like([eos, 97]), echo=True, logprobs=1, max_tokens=1)["choices"]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["tokens"][-1] == "<|im_end|>"
    assert choice["logprobs"]["text_offset"][-1] == len(PROMPT)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs_in_vllms_form(path: str) -> None:
    body = {"prompt": "Hello", "max_tokens": 2} if path == COMPLETIONS else chat_body()
    answer = call("POST", path, json={**body, "prompt_logprobs": 2}).json()
    ranks = answer["choices"][0]["prompt_logprobs"] if path == COMPLETIONS else answer["prompt_logprobs"]
    assert len(ranks) == answer["usage"]["prompt_tokens"]
    assert ranks[0] is None
    for entry in ranks[1:]:
        assert len(entry) in (2, 3)
        assert [one["rank"] for one in entry.values()] == [1, 2]
        for one in entry.values():
            assert set(one) == {"logprob", "rank", "decoded_token"}
            assert one["logprob"] <= 0
    plain = call("POST", path, json=body).json()
    assert "prompt_logprobs" not in plain
    assert "prompt_logprobs" not in plain["choices"][0]


def test_a_prompt_that_fills_the_context_can_be_ranked() -> None:
    backend = fake(context_length=16)
    assert len(complete(backend, prompt="x" * 16, echo=True, logprobs=0, max_tokens=0)["choices"][0]["logprobs"]["tokens"]) == 16
    response = call("POST", COMPLETIONS, fake(context_length=16), json={"prompt": "x" * 17, "echo": True, "max_tokens": 0})
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_engines_are_asked_for_no_more_than_is_wanted() -> None:
    seen: list[EngineRequest] = []

    def answer(request: EngineRequest) -> list[int]:
        seen.append(request)
        return [97] * 9

    for fields in ({}, {"echo": True}, {"logprobs": 3}, {"echo": True, "logprobs": 3}, {"prompt_logprobs": 5, "logprobs": 1}, {"echo": True, "max_tokens": 0}):
        complete(fake(answers=answer), **fields)
    assert [request.prompt_logprobs for request in seen] == [None, None, None, 3, 5, 0]


def deltas(path: str, backend: FakeBackend | None = None, **fields: Any) -> list[dict[str, Any]]:
    """Choices of all chunks of a stream."""
    base = {"prompt": PROMPT, "max_tokens": 6} if path == COMPLETIONS else chat_body(max_tokens=60)
    response = call("POST", path, backend, json={**base, "temperature": 0, **fields, "stream": True})
    assert response.status_code == 200, response.text
    payloads = events(response.text)
    assert payloads.pop() == "[DONE]"
    return [choice for payload in payloads for choice in json.loads(payload)["choices"]]


@pytest.mark.parametrize("fields", [{}, {"echo": True}, {"stop": "cd"}, {"stop": "xyz"}, {"n": 2}], ids=str)
def test_streamed_completions_carry_what_whole_ones_have(fields: dict[str, Any]) -> None:
    def backend() -> FakeBackend:
        return fake(answers=[list(b"abcdef")], tokens_per_second=100)

    whole = complete(backend(), logprobs=2, max_tokens=6, **fields)["choices"]
    chunks = deltas(COMPLETIONS, backend(), logprobs=2, **fields)
    for choice in whole:
        own = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in own) == choice["text"]
        ranks = [chunk["logprobs"] for chunk in own if chunk["logprobs"] is not None]
        assert len(ranks) > 1
        for name, values in choice["logprobs"].items():
            assert [value for part in ranks for value in part[name]] == values, name


def test_an_echo_alone_shows_no_ranks_on_a_stream_either() -> None:
    assert complete(fake(), echo=True, max_tokens=0)["choices"][0]["logprobs"] is None
    chunks = deltas(COMPLETIONS, fake(), echo=True, max_tokens=0)
    assert "".join(chunk["text"] for chunk in chunks) == PROMPT
    assert [chunk["logprobs"] for chunk in chunks if chunk["logprobs"] is not None] == []


@pytest.mark.parametrize(
    ("answer", "fields"),
    [
        ("<think>why\n</think>\n\nso é it is", {}),
        ("so it ends here", {"stop": "end"}),
        ("<tool_call>\n<function=f>\n</function>\n</tool_call>", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    ],
    ids=["reasoning", "stop", "call"],
)
def test_streamed_chats_carry_what_whole_ones_have(answer: str, fields: dict[str, Any]) -> None:
    asked = {"logprobs": True, "top_logprobs": 1, **fields}
    whole = call("POST", CHAT, qwen_like(answer), json=chat_body(max_tokens=60, temperature=0, **asked)).json()["choices"][0]
    chunks = deltas(CHAT, qwen_like(answer), **asked)
    content = [entry for chunk in chunks if chunk["logprobs"] is not None for entry in chunk["logprobs"]["content"]]
    assert content == whole["logprobs"]["content"]
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == (whole["message"]["content"] or "")
    assert chunks[-1]["finish_reason"] == whole["finish_reason"]


def test_the_library_has_them_too() -> None:
    service = make_service(fake(answers=[list(b"abc")]))
    try:
        from pocketllm.llm import build_request

        request = build_request("Hi", SamplingParams(max_tokens=3, logprobs=1, prompt_logprobs=1), None, service.features)
        with service.stream(request) as stream:
            found = list(stream)
            output = stream.result()
        assert output.prompt_logprobs is not None
        assert found[0].prompt_logprobs == output.prompt_logprobs
        assert [token.token for token in output.prompt_logprobs] == ["H", "i"]
        assert output.prompt_logprobs[0].logprob is None
        assert tuple(entry for event in found for entry in event.logprobs) == output.logprobs
        scored = build_request("Hi", SamplingParams(max_tokens=0, prompt_logprobs=0), None, service.features)
        with service.stream(scored) as stream:
            output = stream.result()
        assert (output.text, output.token_ids, output.finish_reason, output.usage.completion_tokens) == ("", (), "length", 0)
    finally:
        service.close()
