"""The call syntax of DeepSeek-V4: tags that all hold one token, with a flag at each argument for whether it is text or JSON."""

# ruff: noqa: RUF001 (the bars of the control tokens are full-width ones)

from __future__ import annotations

from typing import Any

from pocketllm.text.tool_parsers.base import OTHERWISE, ToolParser, Tools, ToolSyntax
from pocketllm.text.tool_parsers.call_json import read_json
from pocketllm.text.tool_parsers.cursor import Cursor, MalformedCall, Steps
from pocketllm.text.tool_parsers.held_parser import Calls, HeldParser
from pocketllm.text.tool_parsers.value_grammar import CallGrammar, grammar_without, literal

TOKEN = "｜DSML｜"
_BLOCK = f"<{TOKEN}tool_calls>"
_BLOCK_END = f"</{TOKEN}tool_calls>"
_INVOKE = f'<{TOKEN}invoke name="'
_INVOKE_END = f"</{TOKEN}invoke>"
_PARAMETER = f'<{TOKEN}parameter name="'
_VALUE_END = f"</{TOKEN}parameter>"
_NOT_IN_NAMES = '"\n'


class Dsml(ToolSyntax):
    """One block of calls at the end of the answer. Text is as it stands between its tags, and ends at the first closing tag that another parameter
    or the end of the call follows; JSON, which has to be JSON, ends at the first one outside its strings.
    """

    def parser(self, tools: Tools) -> ToolParser:
        return HeldParser(_BLOCK, [_calls])

    def grammar(self, tools: Tools, *, parallel: bool, optional: bool = False, instead: str = OTHERWISE) -> str:
        grammar = CallGrammar(tools, _VALUE_END, _NOT_IN_NAMES, instead)
        for index, tool in enumerate(grammar.tools):
            parts = [literal(f'{_INVOKE}{tool.name}">\n')]
            closing = literal(f"{_VALUE_END}\n")
            for name, schema in grammar.parameters(tool):
                forms = grammar.forms(tool, name, schema)
                opening = literal(f'{_PARAMETER}{name}" string="')
                alternatives = []
                if forms.raw:
                    text = literal('true">')
                    alternatives.append(grammar.terminal(f"{text} {forms.raw_expression} {closing}", (tool, name)))
                json_flag = literal('false">')
                alternatives.extend(f"{json_flag} {grammar.json(tool, name, value)} {closing}" for value in forms.values)
                rule = grammar.rule(f"{opening} ({' | '.join(alternatives)})")
                parts.append(rule if name in tool.required else f"{rule}?")
            if not tool.required:
                parts.append(r'"\n"?')  # the checkpoint writes an empty line where there are no arguments
            parts.append(literal(f"{_INVOKE_END}\n"))
            grammar.define(f"call_{index}", " ".join(parts))
        call = f"({' | '.join(f'call_{index}' for index in range(len(grammar.tools)))})"
        calls = f"{call}{'+' if parallel else ''} {literal(_BLOCK_END)}"
        return grammar.text(_BLOCK + "\n", calls, {}, marker=_BLOCK if optional else None)

    def grammar_without_calls(self) -> str:
        return grammar_without(_BLOCK)


def _calls(cursor: Cursor) -> Steps[Calls]:
    calls: Calls = []
    yield from cursor.literal(_BLOCK)
    while True:
        yield from cursor.space()
        tag = yield from cursor.one_of((_INVOKE, _BLOCK_END))
        if tag is None or (tag == _BLOCK_END and not calls):
            raise MalformedCall
        if tag == _BLOCK_END:
            yield from cursor.space()
            if not (yield from cursor.at_end()):
                raise MalformedCall
            return calls
        calls.append((yield from _invoke(cursor)))


def _invoke(cursor: Cursor) -> Steps[tuple[str, dict[str, Any]]]:
    name = yield from cursor.name('"', "\n")
    yield from cursor.literal(">")
    arguments: dict[str, Any] = {}
    while True:
        yield from cursor.space()
        tag = yield from cursor.one_of((_PARAMETER, _INVOKE_END))
        if tag is None:
            raise MalformedCall
        if tag == _INVOKE_END:
            return name, arguments
        key = yield from cursor.name('"', "\n")
        yield from cursor.literal(' string="')
        flag = yield from cursor.one_of(('true">', 'false">'))
        if flag is None or key in arguments:
            raise MalformedCall
        if flag == 'true">':
            arguments[key] = yield from _text(cursor)
            continue
        try:
            arguments[key] = read_json((yield from cursor.until(_VALUE_END, outside_strings=True)))
        except ValueError:
            raise MalformedCall from None


def _text(cursor: Cursor) -> Steps[str]:
    pieces = []
    while True:
        pieces.append((yield from cursor.until(_VALUE_END)))
        space = yield from cursor.space()
        if (yield from cursor.sees((_PARAMETER, _INVOKE_END))):
            return "".join(pieces)
        pieces += [_VALUE_END, space]
