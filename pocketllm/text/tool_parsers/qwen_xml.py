"""The call syntax of Qwen3-Coder and Qwen3.5: tags, with each argument as bare text.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

White space between the tags is optional. A value loses one newline at each end, which belongs to the tags, and is typed by the tool's schema.
"""

from __future__ import annotations

from typing import Any

from pocketllm.text.tool_parsers.base import OTHERWISE, ToolParser, Tools, ToolSyntax
from pocketllm.text.tool_parsers.cursor import Cursor, MalformedCall, Steps
from pocketllm.text.tool_parsers.held_parser import Calls, HeldParser
from pocketllm.text.tool_parsers.tool_schema import ToolSchema, tool_schemas
from pocketllm.text.tool_parsers.typed_value import reading_order, typed_value
from pocketllm.text.tool_parsers.value_grammar import CallGrammar, grammar_without, literal

_MARKER = "<tool_call>"
_END = "</tool_call>"
_FUNCTION = "<function="
_FUNCTION_END = "</function>"
_PARAMETER = "<parameter="
_VALUE_END = "</parameter>"
_NOT_IN_NAMES = "<\n"
_NEWLINE = "\n"


class QwenXml(ToolSyntax):
    """See the module. A value may hold any text, the tags' own included: it ends at the first `</parameter>` that the next parameter, or the end of
    its function and its call, follows. Within a string of a JSON object or array none is looked for, unless the call can't be read so.
    """

    def parser(self, tools: Tools) -> ToolParser:
        schemas = tool_schemas(tools)
        return HeldParser(_MARKER, [_Reader(schemas, strings=True).calls, _Reader(schemas, strings=False).calls])

    def grammar(self, tools: Tools, *, parallel: bool, optional: bool = False, instead: str = OTHERWISE) -> str:
        grammar = CallGrammar(tools, _VALUE_END, _NOT_IN_NAMES + ">", instead)
        for index, tool in enumerate(grammar.tools):
            parts = [literal(f"{_FUNCTION}{tool.name}>\n")]
            for name, schema in grammar.parameters(tool):
                forms = grammar.forms(tool, name, schema)
                if forms.raw:
                    forms = grammar.apart(tool, name, forms, reading_order(tool.types(schema)))
                opening = literal(f"{_PARAMETER}{name}>\n")
                closing = literal(f"\n{_VALUE_END}\n")
                alternatives = []
                if forms.raw:
                    alternatives.append(grammar.terminal(f"{forms.raw_expression} {closing}", (tool, name)))
                alternatives.extend(f"{grammar.json(tool, name, value)} {closing}" for value in forms.values)
                rule = grammar.rule(f"{opening} ({' | '.join(alternatives)})")
                parts.append(rule if name in tool.required else f"{rule}?")
            parts.append(literal(f"{_FUNCTION_END}\n{_END}"))
            grammar.define(f"call_{index}", " ".join(parts))
        names = " | ".join(f"call_{index}" for index in range(len(grammar.tools)))
        more = f" ({literal(_NEWLINE + _MARKER + _NEWLINE)} call)*" if parallel else ""
        return grammar.text(_MARKER + _NEWLINE, f"call{more}", {"call": names}, marker=_MARKER if optional else None)

    def grammar_without_calls(self) -> str:
        return grammar_without(_MARKER)


class _Reader:
    """Reads the calls of one answer.

    Args:
        strings: look for no closing tag within the strings of a value that is to be JSON.
    """

    def __init__(self, schemas: dict[str, ToolSchema], *, strings: bool) -> None:
        self._schemas = schemas
        self._strings = strings

    def calls(self, cursor: Cursor) -> Steps[Calls]:
        calls: Calls = []
        while True:
            yield from cursor.literal(_MARKER)
            calls.append((yield from self._call(cursor)))
            yield from cursor.space()
            if (yield from cursor.at_end()):
                return calls

    def _call(self, cursor: Cursor) -> Steps[tuple[str, dict[str, Any]]]:
        yield from cursor.space()
        yield from cursor.literal(_FUNCTION)
        name = yield from cursor.name(">", _NOT_IN_NAMES)
        tool = self._schemas.get(name)
        arguments: dict[str, Any] = {}
        yield from cursor.space()
        tag = yield from cursor.one_of((_PARAMETER, _FUNCTION_END))
        if tag == _FUNCTION_END:
            yield from cursor.space()
            yield from cursor.literal(_END)
            return name, arguments
        if tag is None:
            raise MalformedCall
        more = True
        while more:
            key = yield from cursor.name(">", _NOT_IN_NAMES)
            if key in arguments:
                raise MalformedCall
            schema = tool.properties.get(key) if tool is not None else None
            types = tool.types(schema) if tool is not None and schema is not None else ()
            text, more = yield from self._value(cursor, types)
            text = text.removeprefix("\n").removesuffix("\n")
            arguments[key] = typed_value(text, schema, tool) if tool is not None and schema is not None else text
            if self._strings and _VALUE_END in text and isinstance(arguments[key], str) and _is_json_type(types):
                raise MalformedCall  # what seemed to be strings was not: read again without them
        return name, arguments

    def _value(self, cursor: Cursor, types: tuple[str, ...]) -> Steps[tuple[str, bool]]:
        """The text of a value, and whether another parameter follows; if not, its call has been read to the end."""
        pieces = [(yield from cursor.space())]
        quoted = False
        if self._strings and _is_json_type(types):
            quoted = (yield from cursor.peek()) in ("{", "[")
        while True:
            pieces.append((yield from cursor.until(_VALUE_END, outside_strings=quoted)))
            after = [_VALUE_END, (yield from cursor.space())]
            tag = yield from cursor.one_of((_PARAMETER, _FUNCTION_END))
            if tag == _PARAMETER:
                return "".join(pieces), True
            if tag == _FUNCTION_END:
                after += [tag, (yield from cursor.space())]
                if (yield from cursor.one_of((_END,))):
                    return "".join(pieces), False
            pieces += after


def _is_json_type(types: tuple[str, ...]) -> bool:
    return "object" in types or "array" in types
