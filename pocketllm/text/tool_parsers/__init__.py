"""How models write calls, and how they are read back."""

from __future__ import annotations

from pocketllm.text.deepseek_v4 import DEEPSEEK_V4_TYPES
from pocketllm.text.tool_parsers.base import ToolSyntax
from pocketllm.text.tool_parsers.dsml import Dsml
from pocketllm.text.tool_parsers.json_call import JsonCalls
from pocketllm.text.tool_parsers.qwen_xml import QwenXml

JSON_CALLS: ToolSyntax = JsonCalls()


def find_syntax(template_source: str | None, model_type: str) -> ToolSyntax | None:
    """The syntax in which a checkpoint writes calls, or None where it has none that is known: its calls stay text.

    Args:
        template_source: the checkpoint's chat template, which shows the model's calls to it; None where it has none.
        model_type: config.json's, or the GGUF's architecture.
    """
    if model_type in DEEPSEEK_V4_TYPES:
        return Dsml()
    if template_source is not None and "<function=" in template_source and "<parameter=" in template_source and "<tool_call>" in template_source:
        return QwenXml()
    return None
