"""THE table of request fields: what each endpoint takes, at which values, and the words in which it refuses the others.

A field is accepted only when something acts on it. FIELDS says which group a field is in; RULES, in the order in which
they are applied, say which of its values pass. The server, LLM.chat, the documentation and the tests read this table,
so a field changes its state here and nowhere else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.conditions import (
    REASONING_EFFORTS,
    Condition,
    instance_of,
    is_empty,
    is_greedy,
    is_one_prompt,
    is_prompt,
    is_reasoning,
    is_strings,
    matches_nothing,
    one_of,
    ranking_asked,
    real,
    whole,
)
from pocketllm.sampling_params import MAX_SEED

Endpoint = Literal["chat", "completions"]
Group = Literal["implemented", "refused", "inert"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)

THINKING_MODES = ("thinking", "chat")
MAX_TOP_K = 2**31 - 1
MAX_TOKENS = 2**63 - 1  # beyond, a message would hold hundreds of digits, or more than Python will print
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Field:
    """One request field: its endpoints, its group, and what the server does with it, for the documentation."""

    name: str
    endpoints: tuple[Endpoint, ...]
    group: Group
    behaviour: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on one field.

    Args:
        field: the field; "a.b" is key b of field a, and its value is that of the key.
        endpoints: where the rule holds.
        allows: whether a value passes, given the whole body; never called with None, which always passes.
        instead: what the server does instead, or why the value means nothing; the second half of a sentence.
        remedy: what the caller should send.
        capability: name of the Capabilities flag that lifts the rule, or None.
        is_shape: whether it refuses the value's form rather than a feature.
    """

    field: str
    endpoints: tuple[Endpoint, ...]
    allows: Condition
    instead: str
    remedy: str
    capability: str | None = None
    is_shape: bool = False


FIELDS: tuple[Field, ...] = (
    Field("messages", CHAT, "implemented", "The conversation, rendered by the checkpoint's own chat template."),
    Field("prompt", COMPLETIONS, "implemented", "A text, or a list of token ids, completed as it stands."),
    Field("max_tokens", BOTH, "implemented", "Most tokens to generate."),
    Field("max_completion_tokens", BOTH, "implemented", "As max_tokens, and wins when both are sent."),
    Field("temperature", BOTH, "implemented", "Divides the logits; 0 is greedy decoding."),
    Field("top_p", BOTH, "implemented", "Nucleus mass; 1 is off."),
    Field("top_k", BOTH, "implemented", "Size of the candidate set; 0 and -1 are off."),
    Field("seed", BOTH, "implemented", "The same seed gives the same tokens, whatever else is running."),
    Field("stream", BOTH, "implemented", "Server-sent events that end with [DONE]."),
    Field("stream_options", BOTH, "implemented", "include_usage adds a last chunk with the token counts."),
    Field("n", BOTH, "refused", "One choice is generated for each request."),
    Field("thinking_mode", CHAT, "implemented", 'Handed to the chat template: "thinking" or "chat".'),
    Field("reasoning_effort", CHAT, "implemented", "Handed to the chat template."),
    Field("reasoning", CHAT, "implemented", 'true, false, or {"effort": ...}; another spelling of the two fields above.'),
    Field("add_generation_prompt", CHAT, "implemented", "Whether the rendered prompt ends where the assistant begins."),
    Field("drop_thinking", CHAT, "implemented", "Handed to the chat template: leave out the reasoning of earlier turns."),
    Field("request_id", CHAT, "implemented", "Id of the response, and of DELETE /v1/requests/{id}."),
    Field("stop", BOTH, "refused", "No stop sequence is matched."),
    Field("logprobs", BOTH, "refused", "No log probabilities are returned."),
    Field("top_logprobs", BOTH, "refused", "No alternatives are ranked."),
    Field("frequency_penalty", BOTH, "refused", "The sampler has no such term."),
    Field("presence_penalty", BOTH, "refused", "The sampler has no such term."),
    Field("repetition_penalty", BOTH, "refused", "The sampler has no such term."),
    Field("min_p", BOTH, "refused", "The sampler has no such cut."),
    Field("logit_bias", BOTH, "refused", "No per-token bias is applied."),
    Field("min_tokens", BOTH, "refused", "An answer may end at any length."),
    Field("ignore_eos", BOTH, "refused", "The first end-of-sequence token ends the answer."),
    Field("stop_token_ids", BOTH, "refused", "The checkpoint's own end-of-sequence ids end the answer."),
    Field("response_format", CHAT, "refused", "The text is free."),
    Field("best_of", COMPLETIONS, "refused", "One candidate is generated for each request."),
    Field("suffix", COMPLETIONS, "refused", "The completion is returned on its own."),
    Field("echo", COMPLETIONS, "refused", "The text holds only what was generated."),
    Field("tools", CHAT, "refused", "No tool definitions reach the chat template."),
    Field("tool_choice", CHAT, "refused", "Nothing makes the model call a tool."),
    Field("parallel_tool_calls", CHAT, "refused", "The number of tool calls is not limited."),
    *(
        Field(name, BOTH, "inert", "Cannot change the text; accepted and ignored.")
        for name in ("user", "store", "metadata", "service_tier", "model", "prompt_cache_key", "safety_identifier", "verbosity", "prediction")
    ),
)

_STREAM_KEYS = {"include_usage", "include_obfuscation"}

RULES: tuple[Rule, ...] = (
    Rule("n", BOTH, whole(1), "n is the number of choices, which is a whole number of at least 1", 'Send "n" as 1, or leave it out', is_shape=True),
    Rule("n", BOTH, one_of(1), "one choice is generated for each request", "Send one request for each choice that you want"),
    Rule(
        "stop",
        BOTH,
        is_strings,
        "a stop sequence is a string, or a list of strings, and this value is neither",
        'Send "stop" as a string or an array of strings',
        is_shape=True,
    ),
    Rule("stop", BOTH, matches_nothing, "no stop sequence is matched, so the answer would run past it", 'Leave "stop" out and cut the text yourself'),
    Rule(
        "logprobs",
        CHAT,
        instance_of(bool),
        'a count is the spelling of /v1/completions; on chat "logprobs" is a boolean and the count is "top_logprobs"',
        'Send "logprobs" as false, or leave it out',
        is_shape=True,
    ),
    Rule(
        "logprobs",
        COMPLETIONS,
        whole(0, 20),
        'on this endpoint "logprobs" is the number of alternatives for each token, a whole number from 0 to 20',
        'Leave "logprobs" out',
        is_shape=True,
    ),
    Rule(
        "top_logprobs",
        COMPLETIONS,
        lambda _value, _body: False,
        'this endpoint names the number of alternatives in "logprobs" itself',
        'Leave "top_logprobs" out',
        is_shape=True,
    ),
    Rule(
        "top_logprobs",
        CHAT,
        whole(0, 20),
        "it is the number of alternatives for each token, a whole number from 0 to 20",
        'Send "top_logprobs" as a whole number from 0 to 20, or leave it out',
        is_shape=True,
    ),
    Rule(
        "top_logprobs",
        CHAT,
        ranking_asked,
        "no log probabilities are asked for, so there is no ranking to take alternatives from",
        'Leave "top_logprobs" out',
        is_shape=True,
    ),
    Rule("logprobs", CHAT, one_of(False), "no log probabilities are returned", 'Send "logprobs" as false, or leave it out'),
    Rule("logprobs", COMPLETIONS, lambda _value, _body: False, "no log probabilities are returned", 'Leave "logprobs" out'),
    Rule(
        "stream_options",
        BOTH,
        instance_of(dict),
        "stream options are an object",
        'Send "stream_options" as {"include_usage": true}, or leave it out',
        is_shape=True,
    ),
    Rule(
        "stream_options",
        BOTH,
        lambda value, _body: set(value) <= _STREAM_KEYS,
        'the one stream option acted on is "include_usage"',
        'Send "stream_options" with "include_usage" alone',
    ),
    Rule(
        "stream_options.include_usage",
        BOTH,
        instance_of(bool),
        "it says whether a last chunk carries the token counts",
        'Send "include_usage" as true or false',
        is_shape=True,
    ),
    Rule("stream_options.include_obfuscation", BOTH, one_of(False), "chunks are not padded", 'Send "include_obfuscation" as false, or leave it out'),
    *(
        Rule(
            name,
            BOTH,
            one_of(0),
            f"the sampler has no {name.removesuffix('_penalty')} term, so the answer would be generated as if it were 0",
            f'Send "{name}" as 0, or leave it out',
        )
        for name in ("frequency_penalty", "presence_penalty")
    ),
    Rule(
        "repetition_penalty",
        BOTH,
        one_of(1),
        "the sampler has no repetition term, so the answer would be generated as if it were 1",
        'Send "repetition_penalty" as 1, or leave it out',
    ),
    Rule("min_p", BOTH, one_of(0), "the sampler has no such cut, so the answer would be generated as if it were 0", 'Send "min_p" as 0, or leave it out'),
    Rule(
        "logit_bias",
        BOTH,
        is_empty,
        "no per-token bias is applied, so biased tokens would be sampled at their own probability",
        'Send "logit_bias" as {}, or leave it out',
    ),
    Rule("min_tokens", BOTH, one_of(0), "an answer may end at any length", 'Send "min_tokens" as 0, or leave it out'),
    Rule("ignore_eos", BOTH, one_of(False), "the first end-of-sequence token ends the answer", 'Send "ignore_eos" as false, or leave it out'),
    Rule(
        "stop_token_ids",
        BOTH,
        is_empty,
        "only the checkpoint's own end-of-sequence ids end an answer",
        'Send "stop_token_ids" as [], or leave it out',
    ),
    Rule(
        "response_format",
        CHAT,
        lambda value, _body: isinstance(value, Mapping) and value.get("type") == "text" and len(value) == 1,
        "the text is not constrained to any format",
        'Send "response_format" as {"type": "text"}, or leave it out',
    ),
    Rule(
        "best_of",
        COMPLETIONS,
        one_of(1),
        "one candidate is generated for each request, and there is no second one to compare it with",
        'Send "best_of" as 1, or leave it out',
    ),
    Rule("suffix", COMPLETIONS, one_of(""), "the completion is returned on its own, with no suffix after it", 'Send "suffix" as "", or leave it out'),
    Rule(
        "echo",
        COMPLETIONS,
        one_of(False),
        "the text holds only what was generated, never the prompt",
        'Send "echo" as false and put the prompt before the text yourself',
    ),
    Rule("tools", CHAT, is_empty, "no tool definitions reach the chat template", 'Send "tools" as [], or leave it out'),
    Rule(
        "tool_choice",
        CHAT,
        one_of("auto", "none"),
        "nothing makes the model call a tool, or one tool rather than another",
        'Send "tool_choice" as "auto" or "none", or leave it out',
    ),
    Rule(
        "parallel_tool_calls",
        CHAT,
        one_of(True),
        "the number of tool calls is not limited",
        'Send "parallel_tool_calls" as true, or leave it out',
    ),
    Rule("prompt", COMPLETIONS, is_one_prompt, "one prompt is completed for each request", "Send one request per prompt"),
    Rule(
        "prompt",
        COMPLETIONS,
        is_prompt,
        "a prompt is a string, or a list of token ids",
        'Send "prompt" as a string or an array of whole numbers',
        is_shape=True,
    ),
    *(
        Rule(
            name,
            BOTH,
            whole(1, MAX_TOKENS),
            "the budget of an answer is a whole number of at least 1 and below 2**63",
            f'Send "{name}" as a whole number of at least 1, or leave it out',
            is_shape=True,
        )
        for name in ("max_tokens", "max_completion_tokens")
    ),
    Rule(
        "temperature",
        BOTH,
        real(0),
        "logits are divided by a number that is 0 (greedy) or more",
        'Send "temperature" as a number, often 0 to 2',
        is_shape=True,
    ),
    Rule("top_p", BOTH, real(0, 1, above=True), "the nucleus mass is a number above 0 and at most 1", 'Send "top_p" as such a number; 1 is off', is_shape=True),
    Rule(
        "top_k", BOTH, whole(-1, MAX_TOP_K), "the candidate set has a whole number of tokens", 'Send "top_k" as a whole number; 0 or -1 is off', is_shape=True
    ),
    Rule("seed", BOTH, whole(0, MAX_SEED), f"a seed is a whole number from 0 to {MAX_SEED}", 'Send "seed" as such a number, or leave it out', is_shape=True),
    Rule(
        "temperature",
        BOTH,
        one_of(0),
        "this engine decodes greedily for every request",
        'Send "temperature" as 0',
        capability="per_request_sampling",
    ),
    Rule(
        "top_p",
        BOTH,
        lambda value, body: value == 1 or is_greedy(value, body),
        "this engine decodes greedily for every request",
        'Send "top_p" as 1, or leave it out',
        capability="per_request_sampling",
    ),
    Rule(
        "top_k",
        BOTH,
        lambda value, body: value in (0, -1) or is_greedy(value, body),
        "this engine takes no candidate set of a request's own",
        'Send "top_k" as 0, or leave it out',
        capability="per_request_top_k",
    ),
    Rule("stream", BOTH, instance_of(bool), "it says whether the answer comes as events", 'Send "stream" as true or false', is_shape=True),
    Rule(
        "thinking_mode",
        CHAT,
        one_of(*THINKING_MODES),
        "a chat template knows two modes",
        'Send "thinking_mode" as "thinking" or "chat", or leave it out',
        is_shape=True,
    ),
    Rule(
        "reasoning_effort",
        CHAT,
        one_of(*REASONING_EFFORTS),
        "it is not an effort that a chat template knows",
        f'Send "reasoning_effort" as one of {", ".join(REASONING_EFFORTS)}, or leave it out',
        is_shape=True,
    ),
    Rule(
        "reasoning",
        CHAT,
        is_reasoning,
        "reasoning is switched by true or false, or by an effort",
        'Send "reasoning" as true, false or {"effort": "low"}, or leave it out',
        is_shape=True,
    ),
    *(
        Rule(name, CHAT, instance_of(bool), "the chat template takes it as a switch", f'Send "{name}" as true or false', is_shape=True)
        for name in ("add_generation_prompt", "drop_thinking")
    ),
    Rule(
        "request_id",
        CHAT,
        lambda value, _body: isinstance(value, str) and _REQUEST_ID.fullmatch(value) is not None,
        "an id has 1 to 128 letters, digits, dots, colons, dashes or underscores, so that it fits into a URL and a header",
        'Send such a "request_id", or leave it out',
        is_shape=True,
    ),
)

_NAMES: dict[Endpoint, frozenset[str]] = {endpoint: frozenset(f.name for f in FIELDS if endpoint in f.endpoints) for endpoint in BOTH}
_RULES: dict[Endpoint, tuple[Rule, ...]] = {endpoint: tuple(rule for rule in RULES if endpoint in rule.endpoints) for endpoint in BOTH}


def check_fields(body: Mapping[str, Any], endpoint: Endpoint, features: frozenset[str] | None = None) -> None:
    """Pass `body`, or refuse the first field at fault. A null is the same as an absent field.

    Args:
        body: the request's fields.
        endpoint: whose fields they are.
        capabilities: of the loaded plane; None applies no rule that a capability would lift.

    Raises:
        ConfigurationError: a value has the wrong form, or no endpoint has such a field. `param` names it.
        UnsupportedFeatureError: nothing acts on the value. `param` names it.
    """
    for rule in _RULES[endpoint]:
        name, _, key = rule.field.partition(".")
        value = body.get(name)
        if key and value is not None:
            value = value.get(key)
        if value is None or rule.allows(value, body):
            continue
        if rule.capability is not None and (features is None or rule.capability in features):
            continue
        raise refusal(rule.field, value, rule.instead, rule.remedy, is_shape=rule.is_shape)
    for name, value in body.items():
        if value is not None and name not in _NAMES[endpoint]:
            raise refusal(name, value, f"{PATHS[endpoint]} has no such field, and nothing would act on it", f"Leave {summary(name)} out", is_shape=True)


def refusal(name: str, value: object, instead: str, remedy: str, *, is_shape: bool) -> ConfigurationError | UnsupportedFeatureError:
    """The error that refuses `value` of field `name`, in four parts: field, value, what happens instead, remedy."""
    kind = ConfigurationError if is_shape else UnsupportedFeatureError
    return kind(f"{summary(name)} = {summary(value)} is not supported by this server: {instead}. {remedy}.", param=name)


def checked_text(text: str, where: str) -> str:
    """`text`, unless it holds half of a surrogate pair, which no tokenizer can read.

    Raises:
        ConfigurationError: naming `where`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f'"{where}" holds half of a surrogate pair at character {error.start}: that is no character of any text. Send valid Unicode.', param=where
        ) from None
    return text


def summary(value: object) -> str:
    """`value` as JSON on one short line; what is long or nested is cut to an ellipsis."""
    if isinstance(value, Mapping):
        shown = [f"{_scalar(str(key))}: {_scalar(item)}" for key, item in list(value.items())[:3]]
        return "{" + ", ".join(shown + ["…"] * (len(value) > 3)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_scalar(item) for item in value[:3]] + ["…"] * (len(value) > 3)) + "]"
    return _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, Mapping):
        return "{…}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[…]" if value else "[]"
    if isinstance(value, str):
        return json.dumps(value[:60] + "…" * (len(value) > 60), ensure_ascii=False)
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 10**40):
        return json.dumps(value)
    return "a very large number" if isinstance(value, int) else f"a {type(value).__name__}"
