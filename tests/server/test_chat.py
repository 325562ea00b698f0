"""POST /v1/chat/completions over the fake backend: shapes, streams, and what reaches the template."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from pocketllm.outputs import GenerationOutput
from pocketllm.protocol.chat import build_chat_request
from pocketllm.sampling_params import SamplingParams
from tests.fake_serving import call, chat_body, fake, in_process, make_service

CHAT = "/v1/chat/completions"


def events(text: str) -> list[str]:
    """The payloads of a stream, [DONE] included."""
    blocks = text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") for block in blocks)
    return [block.removeprefix("data: ") for block in blocks]


def expected(**sampling: Any) -> GenerationOutput:
    service = make_service(fake())
    try:
        request = build_chat_request([{"role": "user", "content": "Hi"}], SamplingParams(**sampling))
        with service.stream(request) as stream:
            return stream.result()
    finally:
        service.close()


def test_answer_has_openais_shape() -> None:
    response = call("POST", CHAT, json=chat_body(request_id="mine-1", temperature=0))
    assert response.status_code == 200
    assert response.headers["x-request-id"] == "mine-1"
    body = response.json()
    assert isinstance(body.pop("created"), int)
    prompt_tokens = len("<user>Hi\n<assistant>")
    assert body == {
        "id": "mine-1",
        "object": "chat.completion",
        "model": "fake-1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": expected(max_tokens=4, temperature=0).text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": 4,
            "total_tokens": prompt_tokens + 4,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_ids_are_made_when_none_is_sent() -> None:
    body = call("POST", CHAT, json=chat_body()).json()
    assert body["id"].startswith("chatcmpl-")


def test_stream_has_role_text_finish_and_done() -> None:
    response = call("POST", CHAT, json=chat_body(stream=True, temperature=0, request_id="r"))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-request-id"] == "r"
    payloads = events(response.text)
    assert payloads[-1] == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    assert all(chunk["object"] == "chat.completion.chunk" and chunk["id"] == "r" and "usage" not in chunk for chunk in chunks)
    assert all(set(chunk["choices"][0]) == {"index", "delta", "logprobs", "finish_reason"} for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected(max_tokens=4, temperature=0).text
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["choices"][0]["delta"] == {}


def test_include_usage_adds_one_last_chunk() -> None:
    response = call("POST", CHAT, json=chat_body(stream=True, stream_options={"include_usage": True}))
    chunks = [json.loads(payload) for payload in events(response.text)[:-1]]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4


def test_include_usage_without_stream_is_harmless() -> None:
    assert call("POST", CHAT, json=chat_body(stream_options={"include_usage": True})).json()["usage"]["completion_tokens"] == 4


def test_eos_ends_with_stop_and_is_counted() -> None:
    body = call("POST", CHAT, fake(eos_after=3), json=chat_body(max_tokens=9)).json()
    assert body["choices"][0]["finish_reason"] == "stop"
    assert len(body["choices"][0]["message"]["content"]) == 3
    assert body["usage"]["completion_tokens"] == 4


def test_text_outside_ascii_survives_a_stream() -> None:
    backend = fake(alphabet=[0xE2, 0x80, 0xA8])  # pieces of U+2028, which some clients take for a line end
    body = chat_body(temperature=0, max_tokens=60)
    whole = call("POST", CHAT, backend, json=body).json()["choices"][0]["message"]["content"]
    text = call("POST", CHAT, fake(alphabet=[0xE2, 0x80, 0xA8]), json={**body, "stream": True}).text
    assert text.isascii()
    chunks = [json.loads(payload) for payload in events(text)[:-1]]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == whole
    assert "\ufffd" in whole


def test_max_completion_tokens_wins() -> None:
    assert call("POST", CHAT, json=chat_body(max_tokens=9, max_completion_tokens=2)).json()["usage"]["completion_tokens"] == 2
    assert call("POST", CHAT, json=chat_body(max_tokens=2.0, max_completion_tokens=None)).json()["usage"]["completion_tokens"] == 2


def test_without_budget_chat_runs_to_the_end_of_the_context() -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    usage = call("POST", CHAT, fake(context_length=50), json=body).json()["usage"]
    assert usage["total_tokens"] == 50
    assert call("POST", CHAT, json=body, default_max_tokens=5).json()["usage"]["completion_tokens"] == 5
    assert call("POST", CHAT, fake(context_length=50), json=body, default_max_tokens=500).json()["usage"]["total_tokens"] == 50
    assert call("POST", "/v1/completions", fake(context_length=10), json={"prompt": "Hello"}).json()["usage"]["total_tokens"] == 10


@pytest.mark.parametrize(
    ("fields", "mark"),
    [
        ({"thinking_mode": "thinking"}, "[thinking True]"),
        ({"thinking_mode": "chat"}, "[thinking False]"),
        ({"reasoning_effort": "low"}, "[thinking True][effort low]"),
        ({"reasoning_effort": "none"}, "[thinking False]"),
        ({"reasoning": False}, "[thinking False]"),
        ({"reasoning": {"effort": "high"}}, "[thinking True][effort high]"),
        ({"drop_thinking": True}, "[drop True]"),
    ],
)
def test_template_options_reach_the_template(fields: dict[str, Any], mark: str) -> None:
    plain = call("POST", CHAT, json=chat_body()).json()["usage"]["prompt_tokens"]
    assert call("POST", CHAT, json=chat_body(**fields)).json()["usage"]["prompt_tokens"] == plain + len(mark)


def test_add_generation_prompt_can_be_left_out() -> None:
    plain = call("POST", CHAT, json=chat_body()).json()["usage"]["prompt_tokens"]
    assert call("POST", CHAT, json=chat_body(add_generation_prompt=False)).json()["usage"]["prompt_tokens"] == plain - len("<assistant>")


def test_seed_repeats_and_no_seed_differs() -> None:
    def text(**fields: Any) -> str:
        content: str = call("POST", CHAT, json=chat_body(max_tokens=20, temperature=1, **fields)).json()["choices"][0]["message"]["content"]
        return content

    assert text(seed=3) == text(seed=3.0) != text(seed=4)
    assert text() != text()


def test_many_streams_at_once_each_equal_their_solo_text() -> None:
    async def run() -> None:
        async with in_process(fake(max_slots=4)) as client:

            async def one(index: int, stream: bool) -> str:
                body = {"messages": [{"role": "user", "content": f"number {index}"}], "max_tokens": 30, "temperature": 0, "stream": stream}
                response = await client.post(CHAT, json=body)
                if not stream:
                    content: str = response.json()["choices"][0]["message"]["content"]
                    return content
                chunks = [json.loads(payload) for payload in events(response.text)[:-1]]
                return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)

            solo = [await one(index, False) for index in range(32)]
            assert await asyncio.gather(*(one(index, True) for index in range(32))) == solo
            assert len(set(solo)) == 32

    asyncio.run(run())


@pytest.mark.parametrize(
    ("messages", "where"),
    [
        (None, "messages"),
        ([], "messages"),
        ("Hi", "messages"),
        ({"role": "user"}, "messages"),
        (["Hi"], "messages[0]"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "Hi"}], "messages[0].role"),
        ([{"role": ["user"], "content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "Hi"}, {"role": "user", "content": ["Hi"]}], "messages[1].content[0]"),
        ([{"role": "user", "content": "\ud800"}], "messages[0].content"),
        ([{"role": "assistant", "audio": {"id": "x"}}], "messages[0].audio"),
    ],
)
def test_bad_messages_are_refused_by_path(messages: Any, where: str) -> None:
    content = json.dumps({"messages": messages, "max_tokens": 1}).encode()
    response = call("POST", CHAT, content=content)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == where
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_prompt_beyond_the_context_is_named_as_such() -> None:
    response = call("POST", CHAT, fake(context_length=16), json=chat_body())
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
