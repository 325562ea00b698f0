"""litellm, which speaks to any server of OpenAI's API under the provider's name "openai"."""

from __future__ import annotations

import json
from typing import Any

import litellm
import pytest

from tests.clients.questions import ASK_ANIMAL, ASK_WEATHER, HELLO, REPORT, WEATHER_TOOL, Animal

# pydantic's remark on types that litellm makes when it is first called
pytestmark = pytest.mark.filterwarnings("ignore:.*`ReadOnly` qualifier:UserWarning")

HELLO_MESSAGES = [{"role": "user", "content": HELLO}]


@pytest.fixture
def given(base_url: str, model_name: str) -> dict[str, Any]:
    """The arguments that name the server."""
    return {"model": f"openai/{model_name}", "api_base": base_url, "api_key": "none"}


def test_chat(given: dict[str, Any]) -> None:
    answer = litellm.completion(**given, messages=HELLO_MESSAGES)
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0


def test_log_probabilities(given: dict[str, Any]) -> None:
    (choice,) = litellm.completion(**given, messages=HELLO_MESSAGES, logprobs=True, top_logprobs=2, n=1, max_tokens=4).choices
    assert all(len(entry.top_logprobs) == 2 for entry in choice.logprobs.content)


def test_stream(given: dict[str, Any]) -> None:
    chunks = list(litellm.completion(**given, messages=HELLO_MESSAGES, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert chunks[-1].choices[0].finish_reason in ("stop", "length")


def test_tool_round_trip(given: dict[str, Any]) -> None:
    messages: list[Any] = [{"role": "user", "content": ASK_WEATHER}]
    message = litellm.completion(**given, messages=messages, tools=[WEATHER_TOOL], tool_choice="required").choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome", "Oslo")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": REPORT}]
    assert litellm.completion(**given, messages=messages, tools=[WEATHER_TOOL]).choices[0].message.content


def test_structured_answer(given: dict[str, Any]) -> None:
    answer = litellm.completion(**given, messages=[{"role": "user", "content": ASK_ANIMAL}], response_format=Animal)
    Animal.model_validate_json(answer.choices[0].message.content)


def test_too_long_a_prompt(given: dict[str, Any]) -> None:
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**given, messages=[{"role": "user", "content": "word " * 10_000}])


def test_refused_field(given: dict[str, Any]) -> None:
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**given, messages=HELLO_MESSAGES, temperature=99)


@pytest.mark.anyio
async def test_async(given: dict[str, Any]) -> None:
    answer = await litellm.acompletion(**given, messages=HELLO_MESSAGES)
    assert answer.choices[0].message.content
