"""Conditions on request values, for the rules of fields.py. Each takes the value and the whole body; none sees a null."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pocketllm.protocol.refusals import summary

REASONING_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
STRUCTURED_OUTPUTS = ("json", "regex", "choice", "grammar", "json_object")  # vLLM's names
_TEMPLATES_OWN = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize", "self")
MAX_PROMPTS = 128  # times n: each choice of each prompt is a row of the engine


@dataclass(frozen=True, slots=True)
class Fault:
    """Which part of a value fails its condition.

    Args:
        path: from the field to the part, such as "[1].function.name"; "" is the field itself.
        value: of the part.
        instead, remedy: the two halves of the refusal, as in a Rule.
    """

    path: str
    value: object
    instead: str
    remedy: str


Condition = Callable[[Any, Mapping[str, Any]], "bool | Fault"]


def whole_number(value: object) -> int | None:
    """`value` as an int when it is a whole number (2 and 2.0 are, True and "2" are not), else None."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e300:
        return None
    return float(value)


def is_list(value: object) -> bool:
    return isinstance(value, (list, tuple))


def whole(low: int, high: float = math.inf) -> Condition:
    def allows(value: Any, _body: Mapping[str, Any]) -> bool:
        found = whole_number(value)
        return found is not None and low <= found <= high

    return allows


def real(low: float, high: float = math.inf, *, above: bool = False) -> Condition:
    def allows(value: Any, _body: Mapping[str, Any]) -> bool:
        found = number(value)
        return found is not None and (low < found if above else low <= found) and found <= high

    return allows


def budget(most: int) -> Condition:
    """At least 1, or 0 where the prompt alone is asked about."""

    def allows(value: Any, body: Mapping[str, Any]) -> bool:
        found = whole_number(value)
        return found is not None and (0 if body.get("echo") is True or body.get("prompt_logprobs") is not None else 1) <= found <= most

    return allows


def candidates(most: int) -> Condition:
    """A whole number of at least n."""

    def allows(value: Any, body: Mapping[str, Any]) -> bool | Fault:
        found, choices = whole_number(value), whole_number(body.get("n")) or 1
        if found is None or not 1 <= found <= most:
            return False
        if found >= choices:
            return True
        return Fault("", value, f"{choices} choices can't be the best of {found} candidates", f'Send "best_of" as a number from {choices} to {most}')

    return allows


def instance_of(*kinds: type) -> Condition:
    return lambda value, _body: isinstance(value, kinds)


def one_of(*values: object) -> Condition:
    """Equality that keeps booleans and numbers apart, and takes 1.0 for 1."""
    return lambda value, _body: any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in values)


def never(_value: Any, _body: Mapping[str, Any]) -> bool:
    return False


def is_empty(value: Any, _body: Mapping[str, Any]) -> bool:
    return not value


def is_strings(value: Any, _body: Mapping[str, Any]) -> bool:
    return isinstance(value, str) or (is_list(value) and all(isinstance(item, str) for item in value))


def is_token_ids(value: Any, _body: Mapping[str, Any]) -> bool:
    return is_list(value) and _bad_id(value) is None


def are_token_ids(value: Any, body: Mapping[str, Any]) -> bool:
    """At least one."""
    return is_token_ids(value, body) and len(value) > 0


def are_words(most: int, characters: int) -> Condition:
    """At most `most` texts of so many `characters` together, none of them empty."""

    def allows(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
        if not is_list(value) or not all(isinstance(item, str) for item in value):
            return False
        if len(value) > most:
            return Fault("", value, f"there are {len(value)} of them, and one request has at most {most}", "Send fewer")
        if (length := sum(map(len, value))) > characters:
            return Fault("", value, f"they have {length} characters together, and one request has at most {characters}", "Send fewer, or shorter ones")
        if not all(value):
            return Fault(f"[{list(value).index('')}]", "", "an empty text is in every answer", "Leave it out")
        return True

    return allows


def is_logit_bias(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
    if not isinstance(value, Mapping):
        return False
    for key, bias in value.items():
        is_id = isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 19 and str(int(key)) == key  # else two keys may be one id
        if not is_id and not (isinstance(key, int) and not isinstance(key, bool) and key >= 0):  # JSON has strings alone, Python has both
            return Fault("", value, f"{summary(key)} is no token id, which is a whole number of at least 0", "Send the ids of tokens as keys")
        found = number(bias)
        if found is None or not -100 <= found <= 100:
            return Fault(f".{key}", bias, "a bias is a number from -100 to 100", "Send such a number")
    return True


def only_keys(*known: str) -> Condition:
    """Every key with a value is one of `known`."""

    def allows(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
        for key, item in value.items():
            if key not in known and item is not None:
                return Fault(f".{key}", item, "there is no such option, and nothing would act on it", f"Leave {summary(key)} out")
        return True

    return allows


def is_prompt(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
    """A string, a list of strings, token ids, or a list of those."""
    if isinstance(value, str):
        return True
    if not is_list(value):
        return False
    if not value:
        return Fault("", value, "there is nothing to complete", "Send at least one prompt, or one token id")
    if isinstance(value[0], str):
        return all(isinstance(item, str) for item in value)
    if not is_list(value[0]):
        return _ids_fault(value, value)
    for item in value:
        if not is_list(item):
            return False
        if not item:
            return Fault("", value, "one of the prompts has no token, so there is nothing to complete", "Send at least one token id in each prompt")
        fault = _ids_fault(item, value)
        if fault is not True:
            return fault
    return True


def fits_choices(value: Any, body: Mapping[str, Any]) -> bool | Fault:
    """Prompts times n is at most MAX_PROMPTS."""
    choices = whole_number(body.get("best_of")) or whole_number(body.get("n")) or 1
    prompts = len(value) if is_list(value) and (isinstance(value[0], str) or is_list(value[0])) else 1
    if prompts * choices <= MAX_PROMPTS:
        return True
    return Fault(
        "",
        value,
        f"{prompts} prompts with {choices} choices each are {prompts * choices} answers, and one request has at most {MAX_PROMPTS}",
        "Send fewer prompts, or several requests",
    )


def is_text_prompt(value: Any, _body: Mapping[str, Any]) -> bool:
    return isinstance(value, str) or isinstance(value[0], str)


def ranking_asked(value: Any, body: Mapping[str, Any]) -> bool:
    return value == 0 or body.get("logprobs") is True


def one_or_not_streamed(value: Any, body: Mapping[str, Any]) -> bool:
    return value == 1 or body.get("stream") is not True


def is_not_streamed(_value: Any, body: Mapping[str, Any]) -> bool:
    return body.get("stream") is not True


def false_or_not_streamed(value: Any, body: Mapping[str, Any]) -> bool:
    return value is False or body.get("stream") is not True


def is_greedy(_value: Any, body: Mapping[str, Any]) -> bool:
    return number(body.get("temperature")) == 0


def one_or_greedy(value: Any, body: Mapping[str, Any]) -> bool:
    return value == 1 or is_greedy(value, body)


def off_or_greedy(value: Any, body: Mapping[str, Any]) -> bool:
    return value in (0, -1) or is_greedy(value, body)


def is_reasoning(value: Any, _body: Mapping[str, Any]) -> bool:
    if isinstance(value, bool):
        return True
    return isinstance(value, Mapping) and set(value) <= {"effort"} and value.get("effort") in (None, *REASONING_EFFORTS)


def is_response_format(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
    """The outer form of a response format; what a schema may say is the grammar's to decide."""
    if not isinstance(value, Mapping):
        return False
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in ("text", "json_object", "json_schema"):
        return Fault("", value, '"type" is "text", "json_object" or "json_schema"', "Send one of these types")
    known = ("type", "json_schema") if kind == "json_schema" else ("type",)
    if extra := unknown_key(value, known):
        return Fault("", value, f'a format of type "{kind}" has no {extra}', f"Leave {extra} out")
    if kind != "json_schema":
        return True
    inner = value.get("json_schema")
    if not isinstance(inner, Mapping):
        return Fault("", value, '"json_schema" is an object that holds the schema', 'Send "json_schema" as {"name": "answer", "schema": {...}}')
    if extra := unknown_key(inner, ("name", "description", "schema", "strict")):
        return Fault("", value, f'"json_schema" has no {extra}', f'Leave {extra} out; the schema itself goes into "json_schema.schema"')
    if not isinstance(inner.get("schema"), Mapping):
        return Fault("", value, '"json_schema.schema" is an object, the JSON schema of the answer', 'Send it as {"type": "object", ...}')
    for key, form, words in (("name", str, "a string"), ("description", str, "a string"), ("strict", bool, "true or false")):
        if inner.get(key) is not None and not isinstance(inner[key], form):
            return Fault("", value, f'"json_schema.{key}" is {words}', f'Send "json_schema.{key}" as {words}, or leave it out')
    return True


def is_structured_outputs(value: Any, body: Mapping[str, Any]) -> bool | Fault:
    """The outer form of vLLM's object; what it may say is the grammar's to decide."""
    if not isinstance(value, Mapping):
        return False
    for key, item in value.items():
        if key not in STRUCTURED_OUTPUTS and item is not None and item is not False:
            return Fault(f".{key}", item, "there is no such form, and nothing would act on it", f"Leave {summary(key)} out")
    asked = [name for name in STRUCTURED_OUTPUTS if value.get(name) is not None and value.get(name) is not False]
    if len(asked) != 1:
        return Fault("", value, f"it has {len(asked)} forms, and an answer has one", f"Send one of {', '.join(STRUCTURED_OUTPUTS)}")
    name, form = asked[0], value[asked[0]]
    if name == "choice":
        if not is_list(form) or not form or not all(isinstance(item, str) for item in form):
            return Fault(".choice", form, "it is an array of at least one text", "Send such an array")
    elif name == "json_object":
        if form is not True:
            return Fault(".json_object", form, "it is a switch", "Send true, or leave it out")
    elif not isinstance(form, str) and not (name == "json" and isinstance(form, Mapping)):
        words = "a JSON schema, as an object or as its text" if name == "json" else "a text"
        return Fault(f".{name}", form, f"it is {words}", "Send it so")
    other = body.get("response_format")
    if isinstance(other, Mapping) and other.get("type") not in (None, "text"):
        return Fault("", value, '"response_format" asks for a form too, and an answer has one', "Send one of the two")
    return True


def are_template_variables(value: Any, _body: Mapping[str, Any]) -> bool | Fault:
    """Names of variables that no other field sets; what they may be is the template's to say."""
    if not isinstance(value, Mapping):
        return False
    for name, item in value.items():
        if not (isinstance(name, str) and name.isidentifier() and not name.startswith("_")):
            return Fault("", value, f"{summary(name)} is no name of a variable", "Send names of letters, digits and underscores")
        if name in _TEMPLATES_OWN:
            return Fault(f".{name}", item, "it is made of the request's other fields", f"Leave {summary(name)} out of it")
        if name == "reasoning_effort" and item not in REASONING_EFFORTS:
            return Fault(f".{name}", item, "it is not an effort that a chat template knows", f"Send one of {', '.join(REASONING_EFFORTS)}, or leave it out")
    return True


def no_open_turn(value: Any, body: Mapping[str, Any]) -> bool:
    return value is False or body.get("add_generation_prompt") is not True


def no_echo(value: Any, body: Mapping[str, Any]) -> bool:
    return not value or body.get("echo") is not True


def is_text_format(value: Any, _body: Mapping[str, Any]) -> bool:
    return bool(value["type"] == "text")


def unknown_key(value: Mapping[str, Any], known: Sequence[str]) -> str | None:
    """The first key, as shown in a message, that has a value and is not one of `known`."""
    return next((summary(key) for key, item in value.items() if key not in known and item is not None), None)


def _bad_id(ids: Sequence[Any]) -> int | None:
    """Where the first entry is that is no whole number of at least 0."""
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0:  # prompts are long, and this is how they come
        return None
    return next((index for index, item in enumerate(ids) if (found := whole_number(item)) is None or found < 0), None)


def _ids_fault(ids: Sequence[Any], value: object) -> bool | Fault:
    index = _bad_id(ids)
    if index is None:
        return True
    return Fault(
        "",
        value,
        f"a token id is a whole number of at least 0, and entry {index} is {summary(ids[index])}",
        "Send a string, an array of token ids, or an array of either",
    )
