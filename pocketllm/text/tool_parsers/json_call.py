"""The call form for models that have none of their own: the answer is one JSON object. Only forced calls are written so."""

from __future__ import annotations

from typing import Any

from pocketllm.text.tool_parsers.base import OTHERWISE, ParsedEnd, ToolParser, Tools, ToolSyntax
from pocketllm.text.tool_parsers.call_json import new_call, read_json, write_json
from pocketllm.text.tool_parsers.cursor import SPACE
from pocketllm.text.tool_parsers.value_grammar import CallGrammar, literal


class JsonCalls(ToolSyntax):
    """`{"name": "f", "arguments": {...}}`, or a list of such objects."""

    def parser(self, tools: Tools) -> ToolParser:
        return _JsonParser()

    def grammar(self, tools: Tools, *, parallel: bool, optional: bool = False, instead: str = OTHERWISE) -> str:
        """One call, with `parallel` and `optional` as well: only forced calls are written so, and a model that has not learnt to make any would not stop."""
        grammar = CallGrammar(tools, "", "", instead)
        for index, tool in enumerate(grammar.tools):
            opening, closing = literal(f'{{"name": {write_json(tool.name)}, "arguments": '), literal("}")
            grammar.define(f"call_{index}", f"{opening} {grammar.arguments(tool)} {closing}")
        return grammar.text("", f"({' | '.join(f'call_{index}' for index in range(len(grammar.tools)))})", {})

    def grammar_without_calls(self) -> None:
        return None


class _JsonParser(ToolParser):
    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._begun = False
        self._is_text = False

    def feed(self, text: str) -> str:
        if self._is_text:
            return text
        self._pieces.append(text)
        if not self._begun and (start := text.lstrip(SPACE)):
            self._begun = True
            if start[0] not in "{[":
                self._is_text = True
                return self._take()
        return ""

    def finish(self) -> ParsedEnd:
        text = self._take()
        try:
            value = read_json(text)
        except ValueError:
            return ParsedEnd(text)
        calls = value if isinstance(value, list) else [value]
        if not calls or not all(map(_is_call, calls)):
            return ParsedEnd(text)
        return ParsedEnd("", tuple(new_call(call["name"], call["arguments"]) for call in calls))

    def _take(self) -> str:
        text = "".join(self._pieces)
        self._pieces.clear()
        return text


def _is_call(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == {"name", "arguments"}
        and isinstance(value["name"], str)
        and value["name"] != ""
        and isinstance(value["arguments"], dict)
    )
