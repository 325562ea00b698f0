"""Grammars of what a tool's parameters may be: bare text for strings, JSON for everything else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.conditions import number
from pocketllm.text.tool_parsers.base import Tools
from pocketllm.text.tool_parsers.call_json import write_json
from pocketllm.text.tool_parsers.string_grammar import InvalidPattern, string_expression, text_without
from pocketllm.text.tool_parsers.tool_schema import ToolSchema, json_type, literals

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}  # no white space that a model could go on with forever
_NUMBER = r"/-?(?:0|[1-9][0-9]{0,15})(?:\.[0-9]{1,17})?(?:[eE][+-]?[0-9]{1,2})?/"  # any that a double can be
_ANNOTATIONS = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "nullable", "strict", "$comment", "$schema", "$id", "id")
)
_OBJECT_KEYS = _ANNOTATIONS | {"type", "properties", "required", "additionalProperties", "unevaluatedProperties", "$defs", "definitions"}
_EVERY_TYPE_KEYS = ("not", "if", "then", "else", "allOf", "$dynamicRef", "$recursiveRef")
_MAX_DEPTH = 64
_MAX_REASON = 200  # characters of a message
_POSITION = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?")  # what llguidance's messages begin with

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

    Raises:
        UnsupportedFeatureError: a name can't be written in the syntax.
    """

    def __init__(self, tools: Tools, value_end: str, not_in_names: str) -> None:
        if not tools:
            raise ConfigurationError('"tools" is empty, and so no call can be made: give one, or leave "tool_choice" out.', param="tools")
        self.tools = [ToolSchema(tool) for tool in tools]
        self._value_end = value_end
        self._not_in_names = not_in_names
        self._rules: dict[str, str] = {}
        self._owners: dict[str, tuple[str, str]] = {}  # rules that are made of a schema: tool and parameter
        for tool in self.tools:
            if self._is_unwritable(tool.name):
                raise UnsupportedFeatureError(f"\"tools\": the function {_shown(tool.name)} can't be called in this model's syntax: rename it.", param="tools")

    def define(self, name: str, expression: str) -> str:
        self._rules[name] = expression
        return name

    def rule(self, expression: str) -> str:
        return self.define(f"r{len(self._rules)}", expression)

    def terminal(self, expression: str, owner: tuple[ToolSchema, str]) -> str:
        """A rule that is one regular expression, without which complement and intersection have no meaning."""
        name = self.define(f"T{len(self._rules)}", expression)
        self._owners[name] = (owner[0].name, owner[1])
        return name

    def parameters(self, tool: ToolSchema) -> Iterator[tuple[str, Any]]:
        """A function's parameters in the order in which they are written: that of the schema. One that the schema forbids is left out.

        Raises:
            UnsupportedFeatureError: the object's schema asks for more than that.
        """
        where = _place(tool.name)
        declared = tool.root.get("type", "object")
        if declared != "object" and not (isinstance(declared, list) and "object" in declared):
            self._refuse(where, f"type {_shown(declared)}")
        names = [*tool.properties, *sorted(tool.required - tool.properties.keys())]
        for key in tool.root:
            count = number(tool.root[key])
            if key == "minProperties" and count is not None and count <= len(tool.required):
                continue
            if key == "maxProperties" and count is not None and count >= len(names):
                continue
            if key not in _OBJECT_KEYS and not key.startswith("x-"):
                self._refuse(where, f'"{key}"')
        for name in names:
            schema = tool.properties.get(name, True)
            if schema is False and name not in tool.required:
                continue
            if self._is_unwritable(name):
                self._refuse(where, f"the name {_shown(name)}")
            yield name, schema

    def forms(self, tool: ToolSchema, name: str, schema: Any) -> Forms:
        """How a parameter's value may be written.

        Raises:
            UnsupportedFeatureError: the schema has a keyword that can't be honoured.
        """
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
                self._refuse(_place(tool.name, name), f"a choice of {', '.join(types)} beside text")
        excluded = "".join(f" & ~{looks}" for looks in dict.fromkeys(_LOOKS[kind] for kind in earlier))
        return Forms(tuple(exact), tuple(f"({text}{excluded})" for text in forms.texts), tuple(values))

    def json(self, tool: ToolSchema, name: str, schema: Any) -> str:
        """A rule of the JSON of `schema`."""
        if isinstance(schema, Mapping) and schema.get("type") == "number" and schema.keys() - _ANNOTATIONS == {"type"}:
            return self.terminal(_NUMBER, (tool, name))
        where = _place(tool.name, name)
        document = dict(self._bounded(schema, where, 0))
        if '"$ref"' in json.dumps(document):
            document.update((key, self._bounded_all(parts, where, 0)) for key, parts in tool.definitions.items())
        document["x-guidance"] = _JSON_STYLE
        rule = self.rule(f"%json {json.dumps(document)}")
        self._owners[rule] = (tool.name, name)
        return rule

    def arguments(self, tool: ToolSchema) -> str:
        """A rule of the JSON object of all arguments. Properties that the schema neither declares nor gives a schema are left out."""
        schema = {"type": "object", "properties": {}, **tool.root}
        if not isinstance(schema.get("additionalProperties"), Mapping):
            schema["additionalProperties"] = False
        return self.json(tool, "", schema)

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
                    self._refuse(_place(tool_name, parameter), fault)
            self._refuse("the set of all functions", _fault(grammar))
        return grammar

    def _forms(self, tool: ToolSchema, where: str, schema: Any, depth: int) -> Forms:
        if depth > _MAX_DEPTH:
            self._refuse(where, f"more than {_MAX_DEPTH} levels")
        if (reference := tool.dangling(schema)) is not None:
            self._refuse(where, f'"$ref" to {_shown(reference)}')
        schema = tool.resolve(schema)
        if schema is False:
            self._refuse(where, "the schema false")
        if not isinstance(schema, Mapping):
            schema = {}
        types = tool.types(schema)
        if types and "string" not in types:
            return Forms(values=(schema,))
        for key in _EVERY_TYPE_KEYS:
            if key in schema:
                self._refuse(where, f'"{key}"')
        if (members := literals(schema)) is not None:
            return self._members(members, types, where)
        for key in ("anyOf", "oneOf"):
            if key in schema:
                if extra := schema.keys() - _ANNOTATIONS - {key}:
                    self._refuse(where, f'"{min(extra)}" beside "{key}"')
                if not isinstance(schema[key], list):
                    self._refuse(where, f'"{key}" that is no array')
                branches = [self._forms(tool, where, branch, depth + 1) for branch in schema[key]]
                kinds = [kind for branch in schema[key] for kind in {name.replace("integer", "number") for name in tool.types(branch) or ("string",)}]
                if key == "oneOf" and len(set(kinds)) < len(kinds):
                    self._refuse(where, '"oneOf" of alternatives that overlap')
                return sum(branches, Forms())
        others = [kind for kind in types if kind != "string"]
        try:
            text = string_expression(schema, self._value_end)
        except InvalidPattern as error:
            self._refuse(where, str(error))
        return Forms(texts=(text,), values=tuple({**schema, "type": kind} for kind in others))

    def _members(self, members: list[Any], types: tuple[str, ...], where: str) -> Forms:
        fitting = [member for member in members if json_type(member) in types or (json_type(member) == "integer" and "number" in types)]
        if not fitting:
            self._refuse(where, "no value that its type and its list of values both allow")
        strings = [member for member in fitting if isinstance(member, str)]
        if any(self._value_end in member for member in strings):
            self._refuse(where, f"a value that holds {self._value_end}")
        others = [member for member in fitting if not isinstance(member, str)]
        return Forms(literals=tuple(dict.fromkeys(strings)), values=({"enum": others},) if others else ())

    def _bounded(self, schema: Any, where: str, depth: int) -> Any:
        """`schema` with bounds for numbers that have none: their digits would have no end, and a double none of their values."""
        if depth > _MAX_DEPTH:
            self._refuse(where, f"more than {_MAX_DEPTH} levels")
        if not isinstance(schema, Mapping):
            return schema
        bounded: dict[str, Any] = {}
        for key, value in schema.items():
            if key in ("properties", "patternProperties", "$defs", "definitions"):
                bounded[key] = self._bounded_all(value, where, depth)
            elif key in ("anyOf", "oneOf", "allOf", "prefixItems", "items") and isinstance(value, list):
                bounded[key] = [self._bounded(part, where, depth + 1) for part in value]
            elif key in ("items", "additionalProperties"):
                bounded[key] = self._bounded(value, where, depth + 1)
            elif key == "$ref" and not str(value).startswith(("#/$defs/", "#/definitions/")):
                self._refuse(where, f'"$ref" to {_shown(value)}')
            else:
                bounded[key] = value
        declared = schema.get("type")
        kinds = [declared] if isinstance(declared, str) else (declared if isinstance(declared, list) else [])
        if ("number" in kinds or "integer" in kinds) and not schema.keys() & {"enum", "const", "multipleOf"}:
            bound = 10**15 if "number" in kinds else 10**18
            if not schema.keys() & {"minimum", "exclusiveMinimum"}:
                bounded["minimum"] = -bound
            if not schema.keys() & {"maximum", "exclusiveMaximum"}:
                bounded["maximum"] = bound
        return bounded

    def _bounded_all(self, schemas: Any, where: str, depth: int) -> Any:
        return {name: self._bounded(part, where, depth + 1) for name, part in schemas.items()} if isinstance(schemas, Mapping) else schemas

    def _is_unwritable(self, name: str) -> bool:
        return not name or any(character in name for character in self._not_in_names)

    def _refuse(self, where: str, what: str) -> NoReturn:
        what = what if len(what) <= _MAX_REASON else f"{what[: _MAX_REASON - 1]}…"  # llguidance quotes all of what it refuses
        raise UnsupportedFeatureError(
            f'"tools": {where} can\'t be enforced, because of {what}: simplify the schema, or let the model choose with "tool_choice": "auto".',
            param="tools",
        )


def _place(tool: str, parameter: str = "") -> str:
    return f"the parameter {_shown(parameter)} of {_shown(tool)}" if parameter else f"the parameters of {_shown(tool)}"


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
    from llguidance import LLMatcher  # only where a call is forced

    refused, messages = LLMatcher.validate_grammar_with_warnings(grammar)
    return _POSITION.sub("", " ".join(messages[0].split("\n")[0].split())) if refused else ""


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | list | bool | int | float | None) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:79]}…"
