"""What every client is asked. The answers are bounded, so that the small model can't run out of its budget in the middle of one."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

HELLO = "Hello! Who are you?"
ASK_WEATHER = "What is the weather in Paris? Use the tool."
ASK_ANIMAL = "Tell me about a dog: which kind of animal is it, and how many legs has it?"
REPORT = "Sunny, 21 degrees."

WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
}
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "The weather in a city.", "parameters": WEATHER_PARAMETERS},
}


class Animal(BaseModel):
    """A kind of animal."""

    model_config = ConfigDict(extra="forbid")

    kind: Literal["mammal", "bird", "fish"]
    legs: int = Field(ge=0, le=8)
    is_tame: bool


City = Literal["Paris", "Rome", "Oslo"]
