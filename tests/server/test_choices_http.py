"""n, several prompts, stop and log probabilities over HTTP."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import time
from collections import defaultdict
from typing import Any

import httpx
import pytest

from pocketllm.backends.base import EngineRequest, StepCallback, StepOutput
from pocketllm.backends.fake import FakeBackend
from pocketllm.protocol.responses import dump, dump_in_pieces
from tests.fake_serving import call, chat_body, fake, in_process

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def events(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_choices_are_numbered_and_counted_as_openai_does() -> None:
    body = chat_body(n=3, temperature=1, seed=5)
    answer = call("POST", CHAT, json=body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert len({choice["message"]["content"] for choice in answer["choices"]}) == 3
    one = call("POST", CHAT, json={**body, "n": 1}).json()
    assert one["choices"][0] == answer["choices"][0]
    assert answer["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * one["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_stream_interleaves_its_choices(path: str) -> None:
    body = {"n": 4, "temperature": 1, "seed": 5, "max_tokens": 6}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    whole = call("POST", path, json=body).json()
    found = events(call("POST", path, fake(tokens_per_second=200), json={**body, "stream": True, "stream_options": {"include_usage": True}}))
    texts: dict[int, str] = defaultdict(str)
    finished: list[int] = []
    roles = 0
    for event in found[:-1]:
        assert event["usage"] is None
        (choice,) = event["choices"]
        assert choice["index"] not in finished
        roles += "role" in choice.get("delta", {})
        texts[choice["index"]] += (choice["delta"].get("content") or "") if path == CHAT else choice["text"]
        if choice["finish_reason"] is not None:
            finished.append(choice["index"])
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    assert sorted(finished) == [0, 1, 2, 3]
    assert roles == (4 if path == CHAT else 0)
    assert [texts[index] for index in range(4)] == [choice["message"]["content"] if path == CHAT else choice["text"] for choice in whole["choices"]]
    order = [event["choices"][0]["index"] for event in found[:-1]]
    assert set(order[4:8]) == {0, 1, 2, 3} if path == CHAT else set(order[:4]) == {0, 1, 2, 3}


@pytest.mark.parametrize("prompt", [["Hello", "World"], [[72, 105], [72, 111]]])
def test_several_prompts_are_answered_in_their_order(prompt: list[Any]) -> None:
    answer = call("POST", COMPLETIONS, json={"prompt": prompt, "n": 2, "temperature": 1, "seed": 1, "max_tokens": 5}).json()
    alone = [call("POST", COMPLETIONS, json={"prompt": one, "n": 2, "temperature": 1, "seed": 1, "max_tokens": 5}).json() for one in prompt]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in answer["choices"]] == [choice["text"] for one in alone for choice in one["choices"]]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


def test_choices_that_time_does_not_reach_are_left_out() -> None:
    backend = fake(max_slots=2, tokens_per_second=40)
    response = call("POST", CHAT, backend, json=chat_body(n=4, max_tokens=20), request_timeout=0.8)
    assert response.status_code == 200
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 1]
    assert call("POST", CHAT, fake(max_slots=2, tokens_per_second=40), json=chat_body(n=4, max_tokens=400), request_timeout=0.3).status_code == 504


def test_a_stream_whose_time_runs_out_says_so() -> None:
    backend = fake(max_slots=2, tokens_per_second=40)
    found = events(call("POST", CHAT, backend, json=chat_body(n=4, max_tokens=20, stream=True), request_timeout=0.8))
    assert [event["choices"][0]["index"] for event in found[:-1] if event["choices"][0]["finish_reason"]] == [0, 1]
    assert found[-1]["error"]["type"] == "timeout_error"


class OneFails(FakeBackend):
    """The second choice of each request fails at once."""

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        if request.request_id.endswith("/1"):
            on_step(StepOutput(request.request_id, (), 0, "error", error=RuntimeError("a fault was asked for")))
        else:
            super().submit(request, on_step)


def test_choices_that_fail_are_left_out_of_an_answer_that_has_others() -> None:
    response = call("POST", CHAT, OneFails(alphabet=(97, 98)), json=chat_body(n=3))
    assert response.status_code == 200
    assert [choice["index"] for choice in response.json()["choices"]] == [0, 2]
    assert call("POST", CHAT, fake(fail_after=2), json=chat_body(n=3)).status_code == 500
    found = events(call("POST", CHAT, OneFails(alphabet=(97, 98)), json=chat_body(n=3, stream=True)))
    assert sorted(event["choices"][0]["index"] for event in found[:-1] if event["choices"][0]["finish_reason"]) == [0, 2]
    assert found[-1]["error"]["type"] == "server_error"


def test_a_long_ranking_stops_no_other_stream() -> None:
    """Spelling 20 alternatives of each of 6,000 tokens takes more than half a second; meanwhile the loop goes on."""

    async def run() -> None:
        backend = fake(context_length=8192, tokens_per_step=500)
        async with in_process(backend) as client:
            gc.disable()  # a collection stops every thread, for as long as what other tests have left in this process takes
            start = time.perf_counter()
            request = asyncio.ensure_future(client.post(CHAT, json=chat_body(max_tokens=6000, logprobs=True, top_logprobs=20)))
            longest, last = 0.0, start
            while not request.done():
                await asyncio.sleep(0.002)
                longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
            content = (await request).json()["choices"][0]["logprobs"]["content"]
            assert len(content) == 6000
            assert longest < 0.6 * (last - start)  # on the loop itself it would be nearly all of it

    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_body_in_pieces_is_the_same_body() -> None:
    body = {"a": [], "b": {}, "c": [1, None, {"d": [{"e": [[["é\ud800", 0.5, True]]]}]}], "f": {"g": {"h": {"i": {"j": {"k": [2]}}}}}}
    assert dump_in_pieces(body) == dump(body)
    assert json.loads(dump_in_pieces(body)) == body


def test_more_choices_than_the_queue_takes() -> None:
    response = call("POST", CHAT, json=chat_body(n=9), max_queued_requests=8)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"

    async def run() -> None:
        async with in_process(fake(tokens_per_second=50), max_queued_requests=8) as client:
            first = asyncio.create_task(client.post(CHAT, json=chat_body(n=5, max_tokens=40)))
            await asyncio.sleep(0.2)
            refused = await client.post(CHAT, json=chat_body(n=4))
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await client.post(CHAT, json=chat_body(n=3))).status_code == 200
            assert (await first).status_code == 200

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_stop_cuts_the_text_and_ends_the_request(path: str, stream: bool) -> None:
    body: dict[str, Any] = {"max_tokens": 30, "temperature": 0}
    body |= {"messages": [{"role": "user", "content": "Hi"}]} if path == CHAT else {"prompt": "Hi"}
    choice = call("POST", path, json=body).json()["choices"][0]
    text = choice["message"]["content"] if path == CHAT else choice["text"]
    body |= {"stop": ["", text[7:10]], "stream": stream}
    expected = text[: text.index(text[7:10])]
    response = call("POST", path, json=body)
    if stream:
        choices = [event["choices"][0] for event in events(response)]
        found = "".join(choice["delta"].get("content", "") if path == CHAT else choice["text"] for choice in choices)
        reason = choices[-1]["finish_reason"]
    else:
        choice = response.json()["choices"][0]
        found, reason = choice["message"]["content"] if path == CHAT else choice["text"], choice["finish_reason"]
    assert (found, reason) == (expected, "stop")


def test_chat_log_probabilities() -> None:
    answer = call("POST", CHAT, json=chat_body(max_tokens=5, logprobs=True, top_logprobs=3)).json()
    (choice,) = answer["choices"]
    assert "logprobs" not in choice["message"]
    content = choice["logprobs"]["content"]
    assert len(content) == 5
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        assert all(set(one) == {"token", "logprob", "bytes"} and math.isfinite(one["logprob"]) and one["logprob"] <= 0 for one in entry["top_logprobs"])
        ranked = [one["logprob"] for one in entry["top_logprobs"]]
        assert ranked == sorted(ranked, reverse=True)
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == choice["message"]["content"]
    bare = call("POST", CHAT, json=chat_body(max_tokens=5, logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in bare] == [[]] * 5
    assert [entry["logprob"] for entry in bare] == [entry["logprob"] for entry in content]
    assert call("POST", CHAT, json=chat_body()).json()["choices"][0]["logprobs"] is None


def test_completions_have_openais_arrays_beside_the_content() -> None:
    answer = call("POST", COMPLETIONS, json={"prompt": "Hi", "max_tokens": 5, "logprobs": 2}).json()
    (choice,) = answer["choices"]
    ranks = choice["logprobs"]
    assert set(ranks) == {"content", "tokens", "token_logprobs", "top_logprobs", "text_offset"}
    assert "".join(ranks["tokens"]) == choice["text"]
    assert ranks["text_offset"] == [0, 1, 2, 3, 4]
    assert ranks["token_logprobs"] == [entry["logprob"] for entry in ranks["content"]]
    for token, logprob, ranked in zip(ranks["tokens"], ranks["token_logprobs"], ranks["top_logprobs"], strict=True):
        assert 2 <= len(ranked) <= 3
        assert ranked[token] == logprob
    zero = call("POST", COMPLETIONS, json={"prompt": "Hi", "max_tokens": 5, "logprobs": 0}).json()["choices"][0]["logprobs"]
    assert zero["top_logprobs"] == [{token: logprob} for token, logprob in zip(zero["tokens"], zero["token_logprobs"], strict=True)]


def test_stop_cuts_the_log_probabilities_too() -> None:
    text = call("POST", COMPLETIONS, json={"prompt": "Hi", "max_tokens": 12, "temperature": 0}).json()["choices"][0]["text"]
    answer = call("POST", COMPLETIONS, json={"prompt": "Hi", "max_tokens": 12, "temperature": 0, "stop": text[4:7], "logprobs": 0}).json()
    (choice,) = answer["choices"]
    assert bytes(byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]).decode() == choice["text"] == text[: text.index(text[4:7])]
    assert answer["usage"]["completion_tokens"] > len(choice["logprobs"]["content"])


def test_a_silent_stream_carries_comments() -> None:
    backend = fake(tokens_per_second=2)
    response = call("POST", CHAT, backend, json=chat_body(max_tokens=2, stream=True), keep_alive_interval=0.1)
    parts = response.text.split("\n\n")
    assert parts.count(": keep-alive") >= 3
    assert len(events(response)) == 4
    assert ": keep-alive" not in call("POST", CHAT, json=chat_body(stream=True), keep_alive_interval=0).text
