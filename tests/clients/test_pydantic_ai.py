"""pydantic-ai's agents."""

from __future__ import annotations

import pytest
from pydantic_ai import Agent, NativeOutput, RunContext
from pydantic_ai.messages import ToolCallPart, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

from tests.clients.questions import ASK_ANIMAL, ASK_WEATHER, HELLO, REPORT, Animal, City


@pytest.fixture
def model(base_url: str, model_name: str) -> OpenAIChatModel:
    return OpenAIChatModel(model_name, provider=OpenAIProvider(base_url=base_url, api_key="none"))


pytestmark = pytest.mark.anyio


async def test_chat(model: OpenAIChatModel) -> None:
    result = await Agent(model).run(HELLO)
    assert result.output
    assert result.usage.output_tokens > 0


async def test_stream(model: OpenAIChatModel) -> None:
    async with Agent(model).run_stream(HELLO) as result:
        text = "".join([delta async for delta in result.stream_text(delta=True)])
    assert text
    assert result.usage.output_tokens > 0


async def test_tool_round_trip(model: OpenAIChatModel) -> None:
    def settings(context: RunContext[None]) -> ModelSettings:
        return ModelSettings(tool_choice="required" if context.run_step == 1 else "auto")

    agent = Agent(model, model_settings=settings)
    cities: list[str] = []

    @agent.tool_plain
    def get_weather(city: City) -> str:
        """The weather in a city."""
        cities.append(city)
        return REPORT

    result = await agent.run(ASK_WEATHER)
    assert len(cities) == 1
    assert result.output
    parts = [part for message in result.all_messages() for part in message.parts]
    (call,) = [part for part in parts if isinstance(part, ToolCallPart)]
    (returned,) = [part for part in parts if isinstance(part, ToolReturnPart)]
    assert call.tool_call_id == returned.tool_call_id


async def test_answer_by_a_tool(model: OpenAIChatModel) -> None:
    result = await Agent(model, output_type=Animal).run(ASK_ANIMAL)
    assert isinstance(result.output, Animal)


async def test_streamed_answer_by_a_tool(model: OpenAIChatModel) -> None:
    async with Agent(model, output_type=Animal).run_stream(ASK_ANIMAL) as result:
        assert isinstance(await result.get_output(), Animal)


async def test_answer_by_a_response_format(model: OpenAIChatModel) -> None:
    result = await Agent(model, output_type=NativeOutput(Animal)).run(ASK_ANIMAL)
    assert isinstance(result.output, Animal)
