"""What generation hands back: a finished answer, or one event of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Args:
        prompt_tokens: tokens of the prompt, the chat template's included; of several prompts, the sum. Choices of one prompt count it once.
        completion_tokens: tokens that the engine generated for all choices, the EOS steps included.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        reasoning_tokens: those of the completion tokens that were reasoning.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def as_dict(self) -> dict[str, int]:
        """The three counts of OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.total_tokens,
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made.

    Args:
        id: unique, such as "call_1f…".
        name: the function's.
        arguments: a JSON object as text, as OpenAI's clients expect it.
    """

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """Part of a call on a stream. The first of a call has its id and name and no arguments; the arguments of the others, joined, are the call's.

    Args:
        index: which call of the choice, from 0.
        arguments: text to append.
        id, name: on the first delta of the call only.
    """

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Alternative:
    """One token that could have stood at a position.

    Args:
        token: its text, read alone; bytes that are no character of their own are U+FFFD, and a control token has its name.
        bytes: the UTF-8 bytes that it adds to the text; none for a control token.
        logprob: natural log of its probability.
        token_id: its id.
    """

    token: str
    bytes: bytes
    logprob: float
    token_id: int


@dataclass(frozen=True, slots=True)
class TokenLogprob(Alternative):
    """A generated token. Where a stop sequence cuts the answer within it, token and bytes end at the cut, so that the bytes of all tokens are the answer.

    Args:
        top: the most likely tokens there, most likely first.
    """

    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """A token of the prompt.

    Args:
        token, bytes, token_id: as in Alternative.
        logprob: natural log of its probability behind the tokens before it; None for the first token, which has none before it.
        top: the most likely tokens there, most likely first.
    """

    token: str
    bytes: bytes
    token_id: int
    logprob: float | None
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceOutput:
    """One finished choice.

    Args:
        index: from 0; choice k of prompt p is p * n + k.
        text: the answer, with special tokens, reasoning and tool calls left out.
        token_ids: all generated ids, the EOS id left out; a stop sequence cuts the text alone.
        finish_reason: "stop" at an EOS id, a stop sequence or the end of a grammar, "tool_calls" when there are calls, "length" when the
            token budget or the context ended first.
        reasoning_content: what the model thought before it answered, or None where it has no such part.
        tool_calls: the calls; all of them, or none when any is malformed, and then the text has them as they were written.
        logprobs: one entry a token of the text, reasoning and calls included, where they were asked for.
        prompt_logprobs: one entry a token of the prompt, where they were asked for.
        echo: the prompt's text, where the answer is to begin with it; `text` does not hold it.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    reasoning_content: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[PromptToken, ...] | None = None
    echo: str = ""


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """The finished answer to one request. `text` and its kin are those of the first choice.

    Args:
        request_id: id of the request, as accepted by `cancel`.
        choices: in the order of their index; fewer than were asked for when some did not finish.
        usage: token counts of all choices.
    """

    request_id: str
    choices: tuple[ChoiceOutput, ...]
    usage: Usage

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason

    @property
    def reasoning_content(self) -> str | None:
        return self.choices[0].reasoning_content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return self.choices[0].tool_calls

    @property
    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        return self.choices[0].logprobs

    @property
    def prompt_logprobs(self) -> tuple[PromptToken, ...] | None:
        return self.choices[0].prompt_logprobs


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """What one choice of a stream adds. The texts of a choice's events, joined, are the finished choice's text.

    Args:
        request_id: id of the request.
        text: text that this event adds; may be empty while a character, a stop sequence or a call is incomplete.
        token_ids: ids that this event adds, the EOS id left out.
        finish_reason: set on the last event of the choice only.
        usage: set on the last event of the stream only.
        index: of the choice.
        reasoning_content: reasoning that this event adds.
        tool_calls: parts of calls that this event adds.
        logprobs: of tokens whose text can no longer change, where a stream was asked for them; those of all events, joined, are the finished choice's.
        prompt_logprobs, echo: as in ChoiceOutput, on the first event of the choice.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0
    reasoning_content: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[PromptToken, ...] | None = None
    echo: str = ""
