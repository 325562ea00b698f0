"""Variables of the chat template, an answer that goes on with the last message, a budget of reasoning, and filling in the middle, over HTTP."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import httpx
import numpy as np
import pytest

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.fake import FakeBackend
from pocketllm.checkpoint import GenerationDefaults
from pocketllm.errors import ConfigurationError
from pocketllm.generation import GenerationService
from pocketllm.llm import build_request
from pocketllm.sampling_params import SamplingParams
from pocketllm.text.chat_template import ChatTemplate
from pocketllm.text.conversation import render_conversation
from pocketllm.text.infill import find_infill_markers
from pocketllm.text.reasoned import AfterReasoning
from tests.fake_serving import byte_tokenizer, call, chat_body, fake, qwen_like, qwen_tokenizer
from tests.id_constraint import IdConstraint

CHAT = "/v1/chat/completions"
CONTINUED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The answer is "}]


def prompt_of(**fields: Any) -> str:
    """What the engine is given for a chat."""
    seen: list[bytes] = []

    def answer(request: EngineRequest) -> Sequence[int]:
        seen.append(bytes(request.prompt_token_ids))
        return [97]

    response = call("POST", CHAT, fake(answers=answer), json={**chat_body(), **fields})
    assert response.status_code == 200, response.text
    return seen[0].decode()


def test_variables_reach_the_template_and_win() -> None:
    assert "[thinking False]" in prompt_of(chat_template_kwargs={"enable_thinking": False, "unknown": [1, {"a": None}]})
    assert "[thinking False]" in prompt_of(chat_template_kwargs={"enable_thinking": False}, thinking_mode="thinking")
    assert "[effort low]" in prompt_of(chat_template_kwargs={"reasoning_effort": "low"})


def test_an_answer_goes_on_with_the_last_message() -> None:
    assert prompt_of(messages=CONTINUED, continue_final_message=True) == "<user>q\n<assistant>The answer is "
    assert prompt_of(messages=CONTINUED, continue_final_message=True, add_generation_prompt=False).endswith("The answer is ")
    assert prompt_of(messages=CONTINUED).endswith("The answer is \n<assistant>")


@pytest.mark.parametrize("content", ["The answer is", "", "two\n\n", "﷐ marks ﷐﷐", "<think>and so"])
def test_the_end_of_the_last_message_is_the_end_of_the_prompt(content: str) -> None:
    messages = [{"role": "user", "content": "﷐﷐﷐ q"}, {"role": "assistant", "content": content}]
    variables = {"messages": messages, "add_generation_prompt": False}
    trimming = ChatTemplate("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}", {})
    assert render_conversation(trimming, variables, continues=True) == f"[user]﷐﷐﷐ q[end][assistant]{content.lstrip()}"
    assert render_conversation(None, variables, continues=True) == f"user: ﷐﷐﷐ q\nassistant: {content}"


def test_a_template_that_drops_the_last_message_is_named() -> None:
    template = ChatTemplate("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(ConfigurationError) as caught:
        render_conversation(template, {"messages": CONTINUED, "add_generation_prompt": False}, continues=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize("fields", [{"messages": CONTINUED[:1]}, {"messages": CONTINUED, "add_generation_prompt": True}], ids=["user", "both"])
def test_what_can_not_go_on_is_refused(fields: dict[str, Any]) -> None:
    response = call("POST", CHAT, json={**chat_body(), "continue_final_message": True, **fields})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "continue_final_message"


def thought(answer: str, **fields: Any) -> tuple[str | None, str, int]:
    """Reasoning, content and the number of reasoning tokens, markers included."""
    body = call("POST", CHAT, qwen_like(answer), json=chat_body(max_tokens=60, **fields)).json()
    message = body["choices"][0]["message"]
    return message.get("reasoning_content"), message["content"], body["usage"]["completion_tokens_details"]["reasoning_tokens"]


def test_reasoning_is_closed_at_its_budget() -> None:
    long = "a long thought"
    assert thought(f"<think>{long}</think>\n\nso") == (long, "so", len(long) + 2)
    assert thought(f"<think>{long}</think>\n\nso", thinking_token_budget=100) == (long, "so", len(long) + 2)
    assert thought(f"<think>{long}</think>\n\nso", thinking_token_budget=len(long)) == (long, "so", len(long) + 2)
    reasoning, content, tokens = thought(f"<think>{long}</think>\n\nso", thinking_token_budget=6)
    assert (reasoning, tokens) == (long[:6], 8)
    assert content.endswith("so")
    assert thought(f"{long}</think>\n\nso", thinking_mode="thinking", thinking_token_budget=4)[::2] == (long[:4], 5)
    assert thought(f"{long}</think>\n\nso", thinking_mode="thinking", thinking_token_budget=0)[::2] == ("", 1)
    assert thought("no thought at all", thinking_token_budget=0) == (None, "no thought at all", 0)


def test_a_budget_beside_a_form() -> None:
    fields = {"structured_outputs": {"choice": ["left", "right"]}, "thinking_token_budget": 3}
    reasoning, content, tokens = thought("<think>which one</think>\n\nright", **fields)
    assert (reasoning, tokens) == ("whi", 5)
    assert content in ("left", "right")


def test_a_budget_where_nothing_marks_the_reasoning_is_refused() -> None:
    response = call("POST", CHAT, json=chat_body(thinking_token_budget=5))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "thinking_token_budget"


def allowed(constraint: AfterReasoning) -> set[int]:
    mask = np.zeros(2, np.uint32)
    constraint.fill(mask)
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def test_a_budget_alone_holds_nothing_but_the_reasoning() -> None:
    everything, start, end, call_id, eos = set(range(64)), 40, 41, 42, 43
    constraint = AfterReasoning(None, start, end, frozenset({eos}), is_open=False, budget=2, call_id=call_id)
    assert allowed(constraint) == everything
    constraint.accept(start)
    assert allowed(constraint) == everything - {start}, "an answer that is held to nothing may end in its reasoning"
    constraint.accept(5)
    constraint.accept(6)
    assert allowed(constraint) == {end}
    constraint.accept(end)
    assert allowed(constraint) == everything
    assert not constraint.is_complete
    calls = AfterReasoning(None, start, end, frozenset({eos}), is_open=True, budget=2, call_id=call_id)
    calls.accept(call_id)
    assert allowed(calls) == everything
    held = AfterReasoning(IdConstraint({7}), start, end, frozenset({eos}), is_open=True, budget=1)
    assert allowed(held) == everything - {start, eos}
    held.accept(9)
    assert allowed(held) == {end}
    held.accept(end)
    assert allowed(held) == {7}


def infilling(markers: tuple[str, str, str], backend: FakeBackend) -> GenerationService:
    tokenizer = byte_tokenizer()
    tokenizer.backend.add_special_tokens(list(markers))
    backend.load(lambda progress: None)
    return GenerationService(backend, tokenizer, None, GenerationDefaults(), model_name="fake-fim")


@pytest.mark.parametrize(
    "markers",
    [
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # noqa: RUF001
        ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ],
    ids=["qwen", "starcoder", "deepseek", "codellama"],
)
def test_a_suffix_is_put_behind_the_gap(markers: tuple[str, str, str]) -> None:
    service = infilling(markers, fake(vocab_size=259))
    try:
        assert "suffix" in service.features
        assert "suffix" not in service.features_of("guide")
        request = build_request("if a", SamplingParams(max_tokens=1), None, service.features)
        (row,) = service.prepare([type(request)(request.prompt, request.sampling, "r", suffix=": b")]).rows
        ids = [service.tokenizer.backend.token_to_id(marker) for marker in markers]
        assert row.prompt_token_ids == (ids[0], *b"if a", ids[1], *b": b", ids[2])
    finally:
        service.close()


def test_a_suffix_is_refused_by_name_where_nothing_marks_a_gap() -> None:
    assert find_infill_markers(qwen_tokenizer()) is None
    response: httpx.Response = call("POST", "/v1/completions", json={"prompt": "a", "suffix": "b"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "suffix"
    assert call("POST", "/v1/completions", json={"prompt": "a", "suffix": ""}).status_code == 200
