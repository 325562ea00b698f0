"""instructor, whose structured answers are calls of a tool, and whose retries send a call back with what is wrong with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import instructor
import openai
import pytest
from pydantic import field_validator

from tests.clients.questions import ASK_ANIMAL, HELLO, Animal


@pytest.fixture
def plain_client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def client(plain_client: openai.OpenAI) -> instructor.Instructor:
    return instructor.from_openai(plain_client)


def ask(question: str) -> list[Any]:
    return [{"role": "user", "content": question}]


def test_chat(client: instructor.Instructor, model_name: str) -> None:
    answer = client.chat.completions.create(model=model_name, messages=ask(HELLO), response_model=None)
    assert answer.choices[0].message.content


def test_structured_answer(client: instructor.Instructor, model_name: str) -> None:
    animal, answer = client.chat.completions.create_with_completion(model=model_name, messages=ask(ASK_ANIMAL), response_model=Animal)
    assert isinstance(animal, Animal)
    assert answer.choices[0].message.tool_calls[0].function.name == "Animal"


def test_stream(client: instructor.Instructor, model_name: str) -> None:
    parts = list(client.chat.completions.create_partial(model=model_name, messages=ask(ASK_ANIMAL), response_model=Animal))
    assert len(parts) > 1
    Animal.model_validate(parts[-1].model_dump())


def test_tool_round_trip(client: instructor.Instructor, model_name: str) -> None:
    refused: list[int] = []

    class Watched(Animal):
        @field_validator("legs")
        @classmethod
        def _refuse_once(cls, legs: int) -> int:
            if not refused:
                refused.append(legs)
                raise ValueError("count the legs again")
            return legs

    sent: list[list[dict[str, Any]]] = []
    client.on("completion:kwargs", lambda *_, **given: sent.append(list(given["messages"])))
    animal = client.chat.completions.create(model=model_name, messages=ask(ASK_ANIMAL), response_model=Watched, max_retries=3)
    assert isinstance(animal, Watched)
    assert len(refused) == 1
    assert [message["role"] for message in sent[1]][:3] == ["user", "assistant", "tool"]
    assert sent[1][1]["tool_calls"][0]["id"] == sent[1][2]["tool_call_id"]


def test_answer_by_a_response_format(plain_client: openai.OpenAI, model_name: str) -> None:
    client = instructor.from_openai(plain_client, mode=instructor.Mode.JSON_SCHEMA)
    animal = client.chat.completions.create(model=model_name, messages=ask(ASK_ANIMAL), response_model=Animal)
    assert isinstance(animal, Animal)
