"""The grammar of an answer that is held to a form: a response format, or one of vLLM's structured outputs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.refusals import checked_text, refusal
from pocketllm.text.grammar import json_rule, response_format_grammar
from pocketllm.text.json_schema import enforceable_schema
from pocketllm.text.lark_text import LarkError, checked_lark
from pocketllm.text.schema_error import SchemaError
from pocketllm.text.schema_pattern import PatternError, whole_pattern

MAX_CHOICES, MAX_CHOICE_CHARACTERS = 1_000, 50_000


def form_grammar(field: str, value: Mapping[str, Any], *, leading_newlines: bool = False) -> str:
    """The grammar, in llguidance's Lark, of the answers that `value` of the request field `field` describes.

    Args:
        field: "response_format" or "structured_outputs".
        value: one that `check_fields` passed.
        leading_newlines: whether up to two line breaks may come first, as reasoning models write after their reasoning.

    Raises:
        ConfigurationError, UnsupportedFeatureError: it can't be enforced; `param` names the part at fault.
    """
    if field == "response_format":
        return response_format_grammar(value, leading_newlines=leading_newlines)
    kind, form = next((name, item) for name, item in value.items() if item is not None and item is not False)
    if kind == "grammar":
        return _grammar(form, leading_newlines=leading_newlines)
    rule = _regex(form) if kind == "regex" else _choice(form) if kind == "choice" else _json({"type": "object"} if kind == "json_object" else form)
    lead = "lines? " if leading_newlines else ""
    return f"start: {lead}answer\nanswer: {rule}\n" + ("lines: /\\n{1,2}/\n" if leading_newlines else "")


def _refused(part: str, value: object, reason: str, remedy: str, *, is_invalid: bool) -> ConfigurationError | UnsupportedFeatureError:
    return refusal(f"structured_outputs.{part}", value, reason, remedy, is_shape=is_invalid)


def _regex(text: str) -> str:
    """Of the texts that match as a whole, not in some part."""
    try:
        return f"/{whole_pattern(text)}/"
    except PatternError as error:
        raise _refused("regex", text, f"as a regular expression, {error}", "Send a simpler one", is_invalid=False) from None


def _choice(texts: list[str]) -> str:
    if len(texts) > MAX_CHOICES or sum(map(len, texts)) > MAX_CHOICE_CHARACTERS:
        raise _refused("choice", texts, f"at most {MAX_CHOICES} texts of {MAX_CHOICE_CHARACTERS} characters together are taken", "Send fewer", is_invalid=True)
    return " | ".join(json.dumps(checked_text(text, "structured_outputs.choice"), ensure_ascii=False) for text in texts)


def _json(schema: Any) -> str:
    try:
        if isinstance(schema, str):
            schema = json.loads(schema)
        return json_rule(enforceable_schema(schema))
    except SchemaError as error:  # a ValueError
        raise _refused("json", schema, f"in its schema, {error.reason}", error.remedy, is_invalid=error.is_invalid) from None
    except (ValueError, RecursionError):
        raise _refused("json", schema, "it is no JSON", "Send the schema as an object", is_invalid=True) from None


def _grammar(text: str, *, leading_newlines: bool) -> str:
    try:
        checked = checked_lark(checked_text(text, "structured_outputs.grammar"), "own_start")  # so that what is put around it may have a start of its own
    except LarkError as error:
        raise _refused("grammar", text, f"as a grammar in Lark, {error}", "Send a grammar without it", is_invalid=False) from None
    if not leading_newlines:
        return f"start: own_start\n{checked}"
    return f"start: own_lines? own_start\nown_lines: /\\n{{1,2}}/\n{checked}"
