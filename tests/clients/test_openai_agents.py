"""openai-agents over chat completions."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai.types.responses import ResponseTextDeltaEvent

from tests.clients.questions import ASK_ANIMAL, ASK_WEATHER, HELLO, REPORT, Animal, City

pytestmark = pytest.mark.anyio


@pytest.fixture
async def model(base_url: str, model_name: str) -> AsyncIterator[OpenAIChatCompletionsModel]:
    set_tracing_disabled(True)  # traces go to OpenAI
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none") as client:
        yield OpenAIChatCompletionsModel(model=model_name, openai_client=client)


async def test_chat(model: OpenAIChatCompletionsModel) -> None:
    result = await Runner.run(Agent(name="greeter", instructions="Be brief.", model=model), HELLO)
    assert result.final_output
    assert result.context_wrapper.usage.output_tokens > 0


async def test_stream(model: OpenAIChatCompletionsModel) -> None:
    result = Runner.run_streamed(Agent(name="greeter", model=model), HELLO)
    events: list[Any] = [event async for event in result.stream_events()]
    text = "".join(event.data.delta for event in events if event.type == "raw_response_event" and isinstance(event.data, ResponseTextDeltaEvent))
    assert text
    assert text == result.final_output


@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
async def test_tool_round_trip(model: OpenAIChatCompletionsModel, is_streamed: bool) -> None:
    cities: list[str] = []

    @function_tool
    def get_weather(city: City) -> str:
        """The weather in a city."""
        cities.append(city)
        return REPORT

    # After the call the choice is the model's again: that is this client's default.
    agent = Agent(name="forecaster", model=model, tools=[get_weather], model_settings=ModelSettings(tool_choice="required"))
    if is_streamed:
        streamed = Runner.run_streamed(agent, ASK_WEATHER)
        assert [event.type async for event in streamed.stream_events()]
        answer = streamed.final_output
    else:
        answer = (await Runner.run(agent, ASK_WEATHER)).final_output
    assert answer
    assert len(cities) == 1


async def test_structured_answer(model: OpenAIChatCompletionsModel) -> None:
    result = await Runner.run(Agent(name="zoologist", model=model, output_type=Animal), ASK_ANIMAL)
    assert isinstance(result.final_output, Animal)
