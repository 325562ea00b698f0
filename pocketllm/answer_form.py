"""What form an answer has to have: the grammar that holds the model to it, and the syntax in which its calls are read."""

from __future__ import annotations

from dataclasses import dataclass

from pocketllm.protocol.request import GenerationRequest
from pocketllm.text.form_grammar import form_grammar
from pocketllm.text.tool_parsers import JSON_CALLS
from pocketllm.text.tool_parsers.base import ToolSyntax


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """
    Args:
        grammar: in llguidance's Lark, or None for any text.
        param: the request field that asks for the grammar.
        syntax: how calls are read, or None where none are.
    """

    grammar: str | None = None
    param: str = ""
    syntax: ToolSyntax | None = None


def answer_form(request: GenerationRequest, syntax: ToolSyntax | None, *, reasons: bool) -> AnswerForm:
    """The form that `request` asks for.

    Args:
        request: of a chat, or a plain prompt, whose answer is any text.
        syntax: in which the model has learnt to write calls; None where it has none that is known.
        reasons: whether the answer may follow reasoning, and so line breaks.

    Raises:
        ConfigurationError, UnsupportedFeatureError: a schema can't be honoured; `param` is "tools" or the field that asks for the form.
    """
    tools, wanted = request.tools, request.form
    if tools is not None and tools.is_forced:
        used = syntax or JSON_CALLS
        return AnswerForm(used.grammar(tools.callable, parallel=tools.parallel, instead=_instead(request, syntax)), "tools", used)
    if wanted is not None and (tools is None or syntax is None or tools.choice == "none"):
        return AnswerForm(form_grammar(*wanted, leading_newlines=reasons), wanted[0])
    if syntax is None or "messages" not in request.metadata:
        return AnswerForm()
    if tools is None:  # a call that nobody offered is one all the same, whose arguments are text
        return AnswerForm(syntax=syntax if request.reports_calls else None)
    if tools.choice == "none":
        return AnswerForm(syntax.grammar_without_calls(), "tool_choice")
    read = syntax if request.reports_calls else None
    if wanted is not None:
        calls = syntax.grammar(tools.callable, parallel=tools.parallel, instead=_instead(request, syntax)).removeprefix("start: ")
        answer = form_grammar(*wanted, leading_newlines=reasons).removeprefix("start: ")
        return AnswerForm(f"start: in_calls | in_format\nin_calls: {calls}in_format: {answer}", wanted[0], read)
    if not tools.parallel or any(tool["function"].get("strict") for tool in tools.definitions):
        return AnswerForm(syntax.grammar(tools.callable, parallel=tools.parallel, optional=True, instead=_instead(request, syntax)), "tools", read)
    return AnswerForm(syntax=read)


def _instead(request: GenerationRequest, syntax: ToolSyntax | None) -> str:
    """How the request would have to be for its calls not to be held to the schemas of its tools."""
    tools = request.tools
    assert tools is not None
    changes = ['let the model choose with "tool_choice": "auto"'] if tools.is_forced else []
    if syntax is not None:  # else only a forced call is held to anything
        changes += ['leave "strict" out of the tools'] if any(tool["function"].get("strict") for tool in tools.definitions) else []
        changes += ['leave "parallel_tool_calls" out'] if not tools.parallel else []
        changes += [f'leave "{request.form[0]}" out'] if request.form is not None else []
    return f"or {' and '.join(changes)}"
