"""Reading whole answers, and writing calls as models do."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pocketllm.text.deepseek_v4 import render_deepseek_v4
from pocketllm.text.tool_parsers import JSON_CALLS, ToolSyntax, find_syntax

QWEN = find_syntax("<tool_call><function=name><parameter=key>", "qwen3_5")
DSML = find_syntax(None, "deepseek_v4")
assert QWEN is not None
assert DSML is not None
SYNTAXES: dict[str, ToolSyntax] = {"qwen": QWEN, "dsml": DSML, "json": JSON_CALLS}


def tool(name: str = "f", /, required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def read(syntax: ToolSyntax, pieces: str | Iterable[str], tools: Sequence[Mapping[str, Any]] = ()) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    """Content and calls of an answer that arrives in `pieces`."""
    parser = syntax.parser(tools)
    content = [parser.feed(piece) for piece in ([pieces] if isinstance(pieces, str) else pieces)]
    end = parser.finish()
    return "".join([*content, end.text]), [(call.name, json.loads(call.arguments)) for call in end.calls]


def write_qwen(name: str, arguments: Mapping[str, Any]) -> str:
    """As the template of Qwen3.5 does: containers as JSON, all else as Python's str()."""
    lines = [f"<tool_call>\n<function={name}>\n"]
    for key, value in arguments.items():
        text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
        lines.append(f"<parameter={key}>\n{text}\n</parameter>\n")
    return "".join([*lines, "</function>\n</tool_call>"])


def write_dsml(*calls: tuple[str, Mapping[str, Any]]) -> str:
    """As DeepSeek-V4's own prompt does, without the end of the turn."""
    message = {"role": "assistant", "tool_calls": [{"function": {"name": name, "arguments": dict(arguments)}} for name, arguments in calls]}
    return render_deepseek_v4([message], thinking=False).removeprefix("<｜begin▁of▁sentence｜>").removesuffix("<｜end▁of▁sentence｜>")  # noqa: RUF001


def one_qwen(text: str, schema: Any) -> Any:
    """What the argument that `text` stands for is under `schema`."""
    content, calls = read(SYNTAXES["qwen"], f"<tool_call>\n<function=f>\n<parameter=x>\n{text}\n</parameter>\n</function>\n</tool_call>", [tool(x=schema)])
    assert content == ""
    ((_, arguments),) = calls
    return arguments["x"]
