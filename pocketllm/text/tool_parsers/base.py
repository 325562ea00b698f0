"""What every call syntax offers: a parser of answers, and a grammar that makes a model call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.outputs import ToolCall

Tools = Sequence[Mapping[str, Any]]  # in OpenAI's form
OTHERWISE = 'or let the model choose with "tool_choice": "auto"'


@dataclass(frozen=True, slots=True)
class ParsedEnd:
    """What was still open when an answer ended.

    Args:
        text: content that the parser had held back; everything since the first call when any call is malformed.
        calls: all calls of the answer, or none.
    """

    text: str
    calls: tuple[ToolCall, ...] = ()


class ToolParser(ABC):
    """Reads one answer's text as it arrives, in pieces cut anywhere. The texts of all `feed`s and of `finish`, joined, are the content.

    All or nothing: a call that was cut off, is malformed, or has prose after it leaves no calls, and the content is then the answer
    exactly as it was generated.
    """

    @abstractmethod
    def feed(self, text: str) -> str:
        """Content that `text` settles: that can no longer be part of a call, or be white space before one."""

    @abstractmethod
    def finish(self) -> ParsedEnd:
        """The answer has ended. With calls, white space between the content and the first call belongs to neither."""


class ToolSyntax(ABC):
    """One way in which a model writes calls."""

    @abstractmethod
    def parser(self, tools: Tools) -> ToolParser:
        """A parser of one answer. `tools` are the request's, whose schemas type the arguments."""

    @abstractmethod
    def grammar(self, tools: Tools, *, parallel: bool, optional: bool = False, instead: str = OTHERWISE) -> str:
        """An llguidance Lark grammar of an answer that is one call, or with `parallel` one or more, of `tools`, with typed arguments. With `optional` text may
        come before the calls, and they may be missing.

        Args:
            tools: at least one.
            instead: what frees the calls from their schemas; the end of the sentence in which a schema is refused.

        Raises:
            ConfigurationError: a schema is no JSON Schema.
            UnsupportedFeatureError: a schema can't be honoured. Both have `param` "tools" and name the function, the parameter and the keyword.
        """

    @abstractmethod
    def grammar_without_calls(self) -> str | None:
        """An llguidance Lark grammar of any answer that holds no call, or None when no text is read as a call."""
