"""Grammars of what a tool's parameters may be: bare text for strings, JSON for everything else."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.refusals import summary
from pocketllm.text.grammar import ONE_STYLE, grammar_fault, json_rule
from pocketllm.text.json_schema import enforceable_schema
from pocketllm.text.schema_error import SchemaError
from pocketllm.text.schema_keywords import is_annotation
from pocketllm.text.tool_parsers.base import Tools
from pocketllm.text.tool_parsers.call_json import write_json
from pocketllm.text.tool_parsers.string_grammar import is_plain_string, string_expression, text_without
from pocketllm.text.tool_parsers.tool_schema import ToolSchema, json_type, literals

_NUMBER = r"/-?(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?/"  # any that a double can be
_OBJECT_KEYS = ("type", "properties", "required", "additionalProperties", "unevaluatedProperties", "$ref")
_NAMING = ("properties", "required", "patternProperties", "$ref", "allOf", "anyOf", "oneOf")  # from where properties may come
_TYPED = frozenset(("type", "const", "enum", "$ref", "allOf", "anyOf", "oneOf"))  # what has a type of its own, or may have
_MAX_DEPTH = 64
_MAX_ALTERNATIVES = 500  # of one parameter
_MAX_KEPT = 100_000  # characters of a grammar that is remembered
_MAX_TEXT = 1_000_000  # characters of all schemas of a request, as they are written for llguidance

# What a text that is read as another type looks like, by that type. Only the number and the brackets say it at their first characters.
_SPACE = r"[ \t\r\n]*"
_LOOKS = {
    "null": rf"/{_SPACE}(?:null|None){_SPACE}/",
    "boolean": rf"/{_SPACE}(?:true|false|True|False){_SPACE}/",
    "object": rf"/{_SPACE}[\[{{](?s:.*)/",
    "array": rf"/{_SPACE}[\[{{](?s:.*)/",
    "integer": rf"/{_SPACE}-?[0-9](?s:.*)/",
    "number": rf"/{_SPACE}-?[0-9](?s:.*)/",
}


@dataclass(frozen=True, slots=True)
class Forms:
    """How a value may be written.

    Args:
        literals: strings that it may be, exactly, as bare text.
        texts: Lark expressions of other bare text that it may be.
        values: schemas of what it may be as JSON.
    """

    literals: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    values: tuple[Any, ...] = ()

    def __add__(self, other: Forms) -> Forms:
        return Forms(self.literals + other.literals, self.texts + other.texts, self.values + other.values)

    @property
    def raw(self) -> bool:
        return bool(self.literals or self.texts)

    @property
    def raw_expression(self) -> str:
        return f"({' | '.join([*map(literal, self.literals), *self.texts])})"


class CallGrammar:
    """Collects the rules of one grammar of calls, and knows which parameter each is for.

    Args:
        tools: of the request, at least one.
        value_end: what ends a value, and so can't be within bare text.
        not_in_names: characters that no name can hold.
        instead: see `ToolSyntax.grammar`.

    Raises:
        ConfigurationError: there is no tool, or a schema is no JSON Schema.
        UnsupportedFeatureError: a name can't be written in the syntax, or a schema can't be enforced in any.
    """

    def __init__(self, tools: Tools, value_end: str, not_in_names: str, instead: str) -> None:
        if not tools:
            raise ConfigurationError('"tools" is empty, and so no call can be made: give one, or leave "tool_choice" out.', param="tools")
        self.tools = [ToolSchema(tool) for tool in tools]
        self._value_end = value_end
        self._not_in_names = not_in_names
        self._instead = instead
        self._written = self._alternatives = 0
        self._rules: dict[str, str] = {}
        self._owners: dict[str, tuple[str, str]] = {}  # rules that are made of a schema: tool and parameter
        for tool in self.tools:
            if self._is_unwritable(tool.name):
                raise UnsupportedFeatureError(f"\"tools\": the function {summary(tool.name)} can't be called in this model's syntax: rename it.", param="tools")
        self._documents = {tool.name: self._document(tool) for tool in self.tools}

    def define(self, name: str, expression: str) -> str:
        self._rules[name] = expression
        return name

    def rule(self, expression: str) -> str:
        return self.define(f"r{len(self._rules)}", expression)

    def terminal(self, expression: str, owner: tuple[ToolSchema, str]) -> str:
        """A rule that is one regular expression, without which complement and intersection have no meaning."""
        name = self.define(f"T{len(self._rules)}", expression)
        self._owners[name] = (owner[0].name, owner[1])
        if " & " in expression and (fault := _fault(_lark({"start": name, name: expression}))):  # as one of several, one without any text goes unnoticed
            self._refuse(_place(*self._owners[name]), fault, "Send a simpler schema")
        return name

    def parameters(self, tool: ToolSchema) -> Iterator[tuple[str, Any]]:
        """A function's parameters in the order in which they are written: that of the schema. One that the schema forbids is left out.

        Raises:
            UnsupportedFeatureError: the object's schema asks for more than that.
        """
        where = _place(tool.name)
        if (keyword := tool.clash(tool.document)) is not None:
            self._refuse(where, f'"{keyword}" beside "$ref" or "allOf"', "Say it in one of the two")
        names = [*tool.properties, *sorted(tool.required - tool.properties.keys())]
        for key in tool.root:
            if key == "minProperties" and tool.root[key] <= len(tool.required):
                continue
            if key == "maxProperties" and tool.root[key] >= len(names):
                continue
            if key not in _OBJECT_KEYS and not is_annotation(key):
                self._refuse(where, summary(key), f"Leave {summary(key)} out, or say it of one parameter")
        for name in names:
            schema = tool.properties.get(name, True)
            if schema is False and name not in tool.required:
                continue
            if self._is_unwritable(name):
                self._refuse(where, f"the name {summary(name)}", "Choose another name")
            yield name, schema

    def forms(self, tool: ToolSchema, name: str, schema: Any) -> Forms:
        """How a parameter's value may be written.

        Raises:
            UnsupportedFeatureError: the schema has a keyword that can't be honoured.
        """
        self._alternatives = 0
        return self._forms(tool, _place(tool.name, name), schema, 0)

    def apart(self, tool: ToolSchema, name: str, forms: Forms, order: tuple[str, ...]) -> Forms:
        """`forms` such that each text means what it was written for to a reader that tries the types in `order`."""
        earlier = order[: order.index("string")] if "string" in order else ()
        exact, values = list(forms.literals), []
        for value in forms.values:
            members = literals(value) if isinstance(value, Mapping) else None
            types = tool.types(value)
            if members is not None:
                exact.extend(map(write_json, members))
            elif types == ("null",):
                exact.append("null")
            elif types == ("boolean",):
                exact.extend(("true", "false") if "boolean" in earlier else ())
            elif set(types) <= {"integer", "number"}:
                values.extend([value] if set(types) <= set(earlier) else [])
            elif set(types) <= {"object", "array"}:
                values.append(value)
            else:
                self._refuse(_place(tool.name, name), f"a choice of {', '.join(types)} beside text", 'Use "anyOf" with one branch for each type')
        excluded = "".join(f" & ~{looks}" for looks in dict.fromkeys(_LOOKS[kind] for kind in earlier))
        return Forms(tuple(exact), tuple(f"({text}{excluded})" for text in forms.texts), tuple(values))

    def json(self, tool: ToolSchema, name: str, schema: Any) -> str:
        """A rule of the JSON of `schema`."""
        if isinstance(schema, Mapping) and schema.get("type") == "number" and all(key == "type" or is_annotation(key) for key in schema):
            return self.terminal(_NUMBER, (tool, name))
        return self._json(tool, name, self._enforceable(tool, name, schema))

    def arguments(self, tool: ToolSchema) -> str:
        """A rule of the JSON object of all arguments. Properties that the schema neither declares nor gives a schema are left out."""
        return self._json(tool, "", self._documents[tool.name])

    def text(self, opening: str, calls: str, more: Mapping[str, str], *, marker: str | None = None) -> str:
        """The whole grammar: calls, perhaps after the empty line that a model puts after its reasoning; or, with `marker`, any text that calls may end.

        Args:
            opening: what comes before the first call.
            calls: an expression of all that follows it.
            more: further rules.
            marker: the beginning of `opening`, which no text but that of calls holds.

        Raises:
            UnsupportedFeatureError: llguidance can't honour a schema.
        """
        if marker is None:
            rules = {"start": f"LEAD? {literal(opening) if opening else ''} {calls}", "LEAD": r'"\n" | "\n\n"'}
        else:
            free = text_without(marker)  # the text and the opening are one terminal, so that nothing has to be read twice
            rules = {"start": f"TEXT | HEAD {calls}", "TEXT": free, "HEAD": f"{free} {literal(opening)}"}
        rules |= {**more, **self._rules}
        grammar = _lark(rules)
        if _fault(grammar):
            for name, (tool_name, parameter) in self._owners.items():
                if fault := _fault(_lark({"start": name, name: self._rules[name]})):
                    self._refuse(_place(tool_name, parameter), fault, "Send a simpler schema")
            self._refuse("the set of all functions", _fault(grammar), "Send fewer or smaller tools")
        return grammar

    def _document(self, tool: ToolSchema) -> dict[str, Any]:
        """The schema of the object of all arguments."""
        document = {**tool.document}
        declared = document.setdefault("type", "object")
        if isinstance(declared, list) and "object" in declared:
            document["type"] = declared = "object"
        if declared != "object":
            self._refuse(_place(tool.name), f'"type": {summary(declared)}', 'Send "type" as "object"')
        if not isinstance(document.get("additionalProperties"), Mapping) and not any(document.get(key) for key in _NAMING):
            document["additionalProperties"] = False
        return self._enforceable(tool, "", document)

    def _enforceable(self, tool: ToolSchema, name: str, schema: Any) -> dict[str, Any]:
        try:
            found = enforceable_schema(schema, document=tool.document, closed=True)
        except SchemaError as error:
            kind = ConfigurationError if error.is_invalid else UnsupportedFeatureError
            where = _place(tool.name, name or error.parameter or "")
            raise kind(f'"tools": in {where}, {error.reason}. {error.remedy}; {self._instead}.', param="tools") from None
        self._written += len(json.dumps(found))
        if self._written > _MAX_TEXT:
            self._refuse("the set of all functions", f"schemas of more than {_MAX_TEXT} characters", "Send fewer or smaller tools")
        return found

    def _json(self, tool: ToolSchema, name: str, document: Mapping[str, Any]) -> str:
        rule = self.rule(json_rule(document, ONE_STYLE))
        self._owners[rule] = (tool.name, name)
        return rule

    def _forms(self, tool: ToolSchema, where: str, schema: Any, depth: int) -> Forms:
        self._alternatives += 1
        if depth > _MAX_DEPTH or self._alternatives > _MAX_ALTERNATIVES:
            self._refuse(where, f"more than {_MAX_ALTERNATIVES} alternatives, or {_MAX_DEPTH} within each other", "Send a smaller schema")
        types = tool.types(schema)
        if types and "string" not in types:
            return Forms(values=(schema,))
        if (keyword := tool.clash(schema)) is not None:
            self._refuse(where, f'"{keyword}" beside "$ref" or "allOf"', "Say it in one of the two")
        schema = tool.resolve(schema)
        if schema is False:
            self._refuse(where, "the schema false", "Leave the parameter out")
        if not isinstance(schema, Mapping):
            schema = {}
        if "allOf" in schema and not (types == ("string",) and all(map(is_plain_string, (schema, *schema["allOf"])))):
            self._refuse(where, '"allOf"', "Send one schema")
        if (members := literals(schema)) is not None:
            return self._members(members, schema, types, where)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                if extra := [other for other in schema if other not in (key, "type") and not is_annotation(other)]:
                    self._refuse(where, f'{summary(extra[0])} beside "{key}"', f'Say it in the branches of "{key}"')
                branches = schema[key]
                if "type" in schema:  # zod writes it once for all branches
                    if not all(isinstance(branch, Mapping) and not branch.keys() & _TYPED for branch in branches):
                        self._refuse(where, f'"type" beside "{key}"', f'Say it in the branches of "{key}"')
                    branches = [{"type": schema["type"], **branch} for branch in branches]
                return sum((self._forms(tool, where, branch, depth + 1) for branch in branches), Forms())
        others = [kind for kind in types if kind != "string"]
        text = string_expression(schema, self._value_end)
        return Forms(texts=(text,), values=tuple({**schema, "type": kind} for kind in others))

    def _members(self, members: list[Any], schema: Mapping[str, Any], types: tuple[str, ...], where: str) -> Forms:
        fitting = [member for member in members if json_type(member) in types or (json_type(member) == "integer" and "number" in types)]
        if not fitting:
            self._refuse(where, "no value that its type and its list of values both allow", "Send values of its type")
        strings = [member for member in fitting if isinstance(member, str)]
        if any(self._value_end in member for member in strings):
            self._refuse(where, f"a value that holds {self._value_end}", "Send other values")
        if extra := [key for key in schema if key not in ("type", "const" if "const" in schema else "enum") and not is_annotation(key)]:
            self._refuse(where, f"{summary(extra[0])} beside a list of values", f"Leave {summary(extra[0])} out, and the values that it excludes")
        others = [member for member in fitting if not isinstance(member, str)]
        return Forms(literals=tuple(dict.fromkeys(strings)), values=({"enum": others},) if others else ())

    def _is_unwritable(self, name: str) -> bool:
        return not name or any(character in name for character in self._not_in_names)

    def _refuse(self, where: str, what: str, remedy: str) -> NoReturn:
        raise UnsupportedFeatureError(f'"tools": {where} can\'t be enforced, because of {what}. {remedy}; {self._instead}.', param="tools")


def _place(tool: str, parameter: str = "") -> str:
    return f"the parameter {summary(parameter)} of {summary(tool)}" if parameter else f"the parameters of {summary(tool)}"


def literal(text: str) -> str:
    """A Lark string."""
    return json.dumps(text, ensure_ascii=False)


def grammar_without(marker: str) -> str:
    """A grammar of any text that does not hold `marker`."""
    return _lark({"start": "TEXT", "TEXT": text_without(marker)})


def _lark(rules: Mapping[str, str]) -> str:
    return "".join(f"{name}: {expression}\n" for name, expression in rules.items())


def _fault(grammar: str) -> str:
    """Why llguidance refuses a grammar, or nothing."""
    return _known_fault(grammar) if len(grammar) < _MAX_KEPT else grammar_fault(grammar)


_known_fault = functools.lru_cache(maxsize=256)(grammar_fault)  # a chat sends the same tools turn after turn
