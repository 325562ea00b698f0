"""The one request type that every front end builds."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pocketllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a chat and who may call them.

    Args:
        definitions: in OpenAI's form, {"type": "function", "function": {"name", "description", "parameters", "strict"}}; at least one.
        choice: "auto" lets the model decide, "none" forbids calls, "required" asks for at least one, "function" for one of `name`.
        name: of the function that must be called, with choice "function".
        parallel: whether one answer may hold several calls.
    """

    definitions: tuple[Mapping[str, Any], ...]
    choice: str = "auto"
    name: str | None = None
    parallel: bool = True

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice in ("required", "function")

    @property
    def callable(self) -> tuple[Mapping[str, Any], ...]:
        """The definitions that may be called."""
        if self.choice == "function":
            return tuple(tool for tool in self.definitions if tool["function"]["name"] == self.name)
        return () if self.choice == "none" else self.definitions


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt with its sampling, before any tokenizer has seen it.

    Args:
        prompt: text, or token ids; for a chat, the `role: content` rendering used where the checkpoint has no template.
        sampling: what the caller asked for; None fields take the checkpoint's defaults.
        request_id: the caller's, or a new one.
        default_max_tokens: budget where `sampling` has none, cut to what the context leaves; None is all that it leaves.
        metadata: for a chat, "messages" (normalized) and the template's options; empty for a plain prompt.
        response_format: {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": …}}; None leaves the text free.
        tools: of a chat; None without tools.
        reports_calls: whether calls in the answer are reported as such; else they stay content.
        echo: whether the answer begins with the prompt, and its log probabilities, where they are asked for, with the prompt's.
        is_streamed: whether events carry the log probabilities of their tokens.
        continues: of a chat: whether the answer goes on with the last message, an assistant's.
        thinking_budget: of a chat: most tokens of reasoning, or None for any number.
        suffix: of a plain prompt: what follows the answer, which fills in the middle; "" is nothing.
    """

    prompt: str | tuple[int, ...]
    sampling: SamplingParams
    request_id: str
    default_max_tokens: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    response_format: Mapping[str, Any] | None = None
    tools: ToolUse | None = None
    reports_calls: bool = True
    echo: bool = False
    is_streamed: bool = False
    continues: bool = False
    thinking_budget: int | None = None
    suffix: str = ""

    @property
    def form(self) -> tuple[str, Mapping[str, Any]] | None:
        """The request field that holds the answer to a form, and its value; None where the text is free."""
        if self.response_format is not None:
            return "response_format", self.response_format
        wanted = self.sampling.structured_outputs
        return None if wanted is None else ("structured_outputs", wanted)


def new_request_id(prefix: str) -> str:
    """A fresh id such as `chatcmpl-9f…`."""
    return f"{prefix}-{uuid.uuid4().hex}"
