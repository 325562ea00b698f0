"""THE table of request fields: what each endpoint takes, at which values, and the words in which it refuses the others.

A field is accepted only when something acts on it. FIELDS says which group a field is in; RULES, in the order in which
they are applied, say which of its values pass. The server, LLM.chat, SamplingParams, the documentation and the tests read
this table, so a field changes its state here and nowhere else.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from pocketllm.backends.base import MAX_LOGPROBS
from pocketllm.protocol.conditions import (
    MAX_PROMPTS,
    REASONING_EFFORTS,
    STRUCTURED_OUTPUTS,
    Condition,
    Fault,
    are_template_variables,
    are_token_ids,
    are_words,
    budget,
    candidates,
    false_or_not_streamed,
    fits_choices,
    instance_of,
    is_empty,
    is_logit_bias,
    is_not_streamed,
    is_prompt,
    is_reasoning,
    is_response_format,
    is_strings,
    is_structured_outputs,
    is_text_format,
    is_text_prompt,
    is_token_ids,
    never,
    no_echo,
    no_open_turn,
    off_or_greedy,
    one_of,
    one_or_greedy,
    one_or_not_streamed,
    only_keys,
    ranking_asked,
    real,
    whole,
)
from pocketllm.protocol.refusals import refusal, summary
from pocketllm.protocol.tools import MAX_TOOLS, TOOL_CHOICES, are_tools, can_be_chosen, has_no_strict_tool, is_tool_choice
from pocketllm.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
)

Endpoint = Literal["chat", "completions"]
Group = Literal["implemented", "refused", "inert"]

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}
BOTH: tuple[Endpoint, ...] = ("chat", "completions")
CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)

THINKING_MODES = ("thinking", "chat")
MAX_TOKENS = 2**63 - 1  # beyond, a message would hold hundreds of digits, or more than Python will print
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


@dataclass(frozen=True, slots=True)
class Field:
    """One request field, for the documentation.

    Args:
        name: as it is sent.
        endpoints: that have it.
        group: whether something acts on it, on a server with every feature that exists.
        accepts: its values, in words.
        behaviour: what the server does with it.
    """

    name: str
    endpoints: tuple[Endpoint, ...]
    group: Group
    accepts: str
    behaviour: str


@dataclass(frozen=True, slots=True)
class Rule:
    """One condition on one field.

    Args:
        field: the field; "a.b" is key b of field a, and its value is that of the key.
        endpoints: where the rule holds.
        allows: whether a value passes, given the whole body, or the part of it that does not; never called with None, which always passes.
        when: the values that it refuses, in words.
        instead: what the server does instead, or why the value means nothing; the second half of a sentence.
        remedy: what the caller should send.
        feature: the name in protocol/features.py that lifts the rule, or None.
        is_shape: whether it refuses the value's form rather than a feature.
    """

    field: str
    endpoints: tuple[Endpoint, ...]
    allows: Condition
    when: str
    instead: str
    remedy: str
    feature: str | None = None
    is_shape: bool = False


def _shape(field: str, endpoints: tuple[Endpoint, ...], allows: Condition, when: str, instead: str, remedy: str) -> Rule:
    return Rule(field, endpoints, allows, when, instead, remedy, is_shape=True)


def _needs(feature: str | None, field: str, endpoints: tuple[Endpoint, ...], allows: Condition, when: str, instead: str, remedy: str) -> Rule:
    return Rule(field, endpoints, allows, when, instead, remedy, feature)


_RANKS = f"a whole number from 0 to {MAX_LOGPROBS}"
_SWITCH = "true or false"

FIELDS: tuple[Field, ...] = (
    Field("messages", CHAT, "implemented", "an array of at least one message", "The conversation, rendered by the checkpoint's own chat template."),
    Field(
        "prompt",
        COMPLETIONS,
        "implemented",
        f"a string, an array of strings, an array of token ids, or an array of those; at most {MAX_PROMPTS} prompts times n",
        "Completed as it stands.",
    ),
    Field("max_tokens", BOTH, "implemented", "a whole number of at least 1", "Most tokens to generate."),
    Field("max_completion_tokens", BOTH, "implemented", "a whole number of at least 1", "As max_tokens, and wins when both are sent."),
    Field("temperature", BOTH, "implemented", f"a number from 0 to {MAX_TEMPERATURE}", "Divides the logits; 0 is greedy decoding."),
    Field("top_p", BOTH, "implemented", "a number above 0 and at most 1", "Nucleus mass; 1 is off."),
    Field("top_k", BOTH, "implemented", f"a whole number from -1 to {MAX_TOP_K}", "Size of the candidate set; 0 and -1 are off."),
    Field(
        "seed",
        BOTH,
        "implemented",
        "a whole number from 0 to 2**63 - 1",
        "The same seed gives the same tokens, whatever else is running; in the fast compute types, up to what near-ties change.",
    ),
    Field("stream", BOTH, "implemented", _SWITCH, "Server-sent events that end with [DONE]."),
    Field("stream_options", BOTH, "implemented", '{"include_usage": true or false}', "include_usage adds a last chunk with the token counts."),
    Field("n", BOTH, "implemented", f"a whole number from 1 to {MAX_CHOICES}", "Number of choices."),
    Field("stop", BOTH, "implemented", "a string, or an array of strings", "The first occurrence of any of them in the answer ends it and is not part of it."),
    Field("logprobs", CHAT, "implemented", _SWITCH, "Whether each token's log probability is returned."),
    Field("top_logprobs", CHAT, "implemented", f"{_RANKS}, above 0 only with logprobs", "How many alternatives to rank at each token."),
    Field("logprobs", COMPLETIONS, "implemented", _RANKS, "Each token's log probability is returned, with so many alternatives."),
    Field("top_logprobs", COMPLETIONS, "refused", "nothing but null", "The count is in logprobs itself."),
    Field(
        "response_format",
        CHAT,
        "implemented",
        '{"type": "text"}, {"type": "json_object"}, or {"type": "json_schema", "json_schema": {"schema": {...}}}',
        "Holds the answer to a form.",
    ),
    Field(
        "structured_outputs",
        BOTH,
        "implemented",
        f"an object with one of {', '.join(STRUCTURED_OUTPUTS)}",
        "As vLLM has it: holds the answer to a regular expression, one of several texts, a grammar in Lark, or a JSON schema.",
    ),
    Field("tools", CHAT, "implemented", f"an array of at most {MAX_TOOLS} functions", "Handed to the chat template; calls are reported in tool_calls."),
    Field("tool_choice", CHAT, "implemented", '"auto", "none", "required", or one function\'s name', "Whether the answer may be, must not be, or is a call."),
    Field("parallel_tool_calls", CHAT, "implemented", _SWITCH, "Whether an answer may hold several calls."),
    Field("thinking_mode", CHAT, "implemented", '"thinking" or "chat"', "Handed to the chat template."),
    Field(
        "reasoning_effort",
        CHAT,
        "implemented",
        ", ".join(f'"{effort}"' for effort in REASONING_EFFORTS),
        "Handed to the chat template in the nearest word that it knows.",
    ),
    Field("reasoning", CHAT, "implemented", 'true, false, or {"effort": ...}', "Another spelling of the two fields above."),
    Field("add_generation_prompt", CHAT, "implemented", _SWITCH, "Whether the rendered prompt ends where the assistant begins."),
    Field("drop_thinking", CHAT, "implemented", _SWITCH, "Handed to the chat template: leave out the reasoning of earlier turns."),
    Field("chat_template_kwargs", CHAT, "implemented", "an object", "Further variables of the chat template, as vLLM has it, before those of other fields."),
    Field(
        "continue_final_message",
        CHAT,
        "implemented",
        f"{_SWITCH}; true not beside an add_generation_prompt of true",
        "Whether the answer goes on with the last message, an assistant's, in place of a turn of its own.",
    ),
    Field(
        "thinking_token_budget",
        CHAT,
        "implemented",
        "a whole number of at least 0",
        "As vLLM has it: most tokens of reasoning, which is then closed; for models that mark their reasoning.",
    ),
    Field(
        "request_id", CHAT, "implemented", "1 to 128 letters, digits, dots, colons, dashes or underscores", "Id of the answer, and of DELETE /v1/requests/{id}."
    ),
    Field(
        "frequency_penalty",
        BOTH,
        "implemented",
        f"a number from -{MAX_PENALTY} to {MAX_PENALTY}",
        "Taken from an id's logit for each time that it is in the answer so far.",
    ),
    Field(
        "presence_penalty",
        BOTH,
        "implemented",
        f"a number from -{MAX_PENALTY} to {MAX_PENALTY}",
        "Taken from the logit of each id that is in the answer so far.",
    ),
    Field(
        "repetition_penalty",
        BOTH,
        "implemented",
        f"a number above 0 and at most {MAX_REPETITION_PENALTY}",
        "Divides the logit of each id of the prompt and of the answer so far where it is above 0, and multiplies it elsewhere; 1 is off.",
    ),
    Field("min_p", BOTH, "implemented", "a number from 0 to 1", "Only ids are drawn that are at least so likely as this part of the likeliest one; 0 is off."),
    Field(
        "logit_bias",
        BOTH,
        "implemented",
        f"an object from token ids to numbers from -{MAX_LOGIT_BIAS} to {MAX_LOGIT_BIAS}",
        "Added to the ids' logits after the penalties.",
    ),
    Field("min_tokens", BOTH, "implemented", "a whole number of at least 0", "No id that would end the answer is drawn before it has so many tokens."),
    Field("ignore_eos", BOTH, "implemented", _SWITCH, "Whether the checkpoint's own end-of-sequence ids are ids like others."),
    Field("stop_token_ids", BOTH, "implemented", "an array of token ids", "Ids that end the answer beside the checkpoint's own, and are not part of it."),
    Field("allowed_token_ids", BOTH, "implemented", "an array of at least one token id", "No other id is drawn."),
    Field(
        "bad_words",
        BOTH,
        "implemented",
        f"an array of at most {MAX_BAD_WORDS} texts of {MAX_BAD_WORDS_CHARACTERS:,} characters together",
        "Texts that the answer does not contain, alone and after a space.",
    ),
    Field(
        "priority",
        BOTH,
        "implemented",
        f"a whole number from -2**31 to {MAX_PRIORITY}",
        "Requests with a lower number are started first, and give up their memory last.",
    ),
    Field(
        "best_of",
        COMPLETIONS,
        "implemented",
        f"a whole number from n to {MAX_CHOICES}",
        "So many candidates are generated, and counted in usage; the n with the highest mean log probability of a token are the choices.",
    ),
    Field(
        "suffix",
        COMPLETIONS,
        "implemented",
        "a text",
        "What follows the answer, which fills in the middle; for models whose vocabulary has tokens for that.",
    ),
    Field("echo", COMPLETIONS, "implemented", _SWITCH, "Whether the text begins with the prompt, and `logprobs` with those of its tokens; the first has none."),
    Field(
        "prompt_logprobs",
        BOTH,
        "implemented",
        _RANKS,
        "As vLLM has it: for each token of the prompt but the first, its log probability and so many alternatives, by token id.",
    ),
    *(
        Field(name, BOTH, "inert", "anything", "Cannot change the text; accepted and ignored.")
        for name in ("user", "store", "metadata", "service_tier", "model", "prompt_cache_key", "safety_identifier", "verbosity", "prediction")
    ),
)

RULES: tuple[Rule, ...] = (
    _shape(
        "n",
        BOTH,
        whole(1, MAX_CHOICES),
        f"not a whole number from 1 to {MAX_CHOICES}",
        f"n is the number of choices, which is a whole number from 1 to {MAX_CHOICES}",
        'Send "n" as such a number, or leave it out',
    ),
    _needs(
        "per_request_sampling",
        "n",
        BOTH,
        one_or_greedy,
        "above 1, and `temperature` is not 0",
        "this engine has no sampling of a choice's own, so all choices would be the same text",
        'Send "n" as 1, or "temperature" as 0',
    ),
    _shape(
        "stop",
        BOTH,
        is_strings,
        "not a string and not an array of strings",
        "a stop sequence is a string, or a list of strings, and this value is neither",
        'Send "stop" as a string or an array of strings',
    ),
    _shape(
        "logprobs",
        CHAT,
        instance_of(bool),
        "not a boolean",
        'a count is the spelling of /v1/completions; on chat "logprobs" is a boolean and the count is "top_logprobs"',
        'Send "logprobs" as true or false, or leave it out',
    ),
    _shape(
        "logprobs",
        COMPLETIONS,
        whole(0, MAX_LOGPROBS),
        f"not {_RANKS}",
        f'on this endpoint "logprobs" is the number of alternatives for each token, {_RANKS}',
        'Send "logprobs" as such a number, or leave it out',
    ),
    _shape(
        "top_logprobs",
        COMPLETIONS,
        never,
        "anything but null",
        'this endpoint names the number of alternatives in "logprobs" itself',
        'Leave "top_logprobs" out',
    ),
    _shape(
        "top_logprobs",
        CHAT,
        whole(0, MAX_LOGPROBS),
        f"not {_RANKS}",
        f"it is the number of alternatives for each token, {_RANKS}",
        f'Send "top_logprobs" as {_RANKS}, or leave it out',
    ),
    _shape(
        "top_logprobs",
        CHAT,
        ranking_asked,
        "above 0, and `logprobs` is not true",
        "no log probabilities are asked for, so there is no ranking to take alternatives from",
        'Send "logprobs" as true too, or leave "top_logprobs" out',
    ),
    _needs(
        "logprobs",
        "logprobs",
        CHAT,
        one_of(False),
        "true",
        "this engine returns no log probabilities",
        'Send "logprobs" as false, or leave it out',
    ),
    _needs("logprobs", "logprobs", COMPLETIONS, never, "any count", "this engine returns no log probabilities", 'Leave "logprobs" out'),
    _needs(
        "streamed_logprobs",
        "logprobs",
        CHAT,
        false_or_not_streamed,
        "true on a stream",
        "a chunk of a stream carries its text with no ranking beside it",
        'Send "stream" as false, or leave "logprobs" out',
    ),
    _needs(
        "streamed_logprobs",
        "logprobs",
        COMPLETIONS,
        is_not_streamed,
        "any count on a stream",
        "a chunk of a stream carries its text with no ranking beside it",
        'Send "stream" as false, or leave "logprobs" out',
    ),
    _shape(
        "stream_options",
        BOTH,
        instance_of(dict),
        "not an object",
        "stream options are an object",
        'Send "stream_options" as {"include_usage": true}, or leave it out',
    ),
    _shape(
        "stream_options",
        BOTH,
        only_keys("include_usage", "include_obfuscation", "continuous_usage_stats"),
        "any other key",
        'the one stream option acted on is "include_usage"',
        'Send "stream_options" with "include_usage" alone',
    ),
    _shape(
        "stream_options.include_usage",
        BOTH,
        instance_of(bool),
        "not a boolean",
        "it says whether a last chunk carries the token counts",
        'Send "include_usage" as true or false',
    ),
    _needs(
        "include_usage",
        "stream_options.include_usage",
        BOTH,
        false_or_not_streamed,
        "true on a stream",
        "a stream is chunks of text and then [DONE], and none of them carries the token counts",
        'Leave "include_usage" out; an answer that is not streamed has them',
    ),
    _needs(
        None,
        "stream_options.continuous_usage_stats",
        BOTH,
        one_of(False),
        "anything but false",
        "the token counts come once, in a stream's last chunk",
        'Send "continuous_usage_stats" as false, or leave it out',
    ),
    _needs(
        None,
        "stream_options.include_obfuscation",
        BOTH,
        one_of(False),
        "anything but false",
        "chunks are not padded",
        'Send "include_obfuscation" as false, or leave it out',
    ),
    *(
        rule
        for name in ("frequency_penalty", "presence_penalty")
        for rule in (
            _shape(
                name,
                BOTH,
                real(-MAX_PENALTY, MAX_PENALTY),
                "not a number from -2 to 2",
                "a penalty is a number from -2 to 2",
                f'Send "{name}" as 0, or leave it out',
            ),
            _needs(
                "penalties",
                name,
                BOTH,
                one_of(0),
                "not 0",
                f"the sampler has no {name.removesuffix('_penalty')} term, so the answer would be generated as if it were 0",
                f'Send "{name}" as 0, or leave it out',
            ),
        )
    ),
    _shape(
        "repetition_penalty",
        BOTH,
        real(0, MAX_REPETITION_PENALTY, above=True),
        "not a number above 0 and at most 2",
        "this penalty is a number above 0 and at most 2",
        'Send "repetition_penalty" as 1, or leave it out',
    ),
    _needs(
        "repetition_penalty",
        "repetition_penalty",
        BOTH,
        one_of(1),
        "not 1",
        "the sampler has no repetition term, so the answer would be generated as if it were 1",
        'Send "repetition_penalty" as 1, or leave it out',
    ),
    _shape("min_p", BOTH, real(0, 1), "not a number from 0 to 1", "it is a number from 0 to 1", 'Send "min_p" as 0, or leave it out'),
    _needs(
        "min_p",
        "min_p",
        BOTH,
        one_of(0),
        "not 0",
        "the sampler has no such cut, so the answer would be generated as if it were 0",
        'Send "min_p" as 0, or leave it out',
    ),
    _shape(
        "logit_bias",
        BOTH,
        is_logit_bias,
        "not an object from token ids to numbers from -100 to 100",
        "biases are an object from token ids to numbers from -100 to 100",
        'Send "logit_bias" as such an object, or leave it out',
    ),
    _needs(
        "logit_bias",
        "logit_bias",
        BOTH,
        is_empty,
        "not empty",
        "no per-token bias is applied, so biased tokens would be sampled at their own probability",
        'Send "logit_bias" as {}, or leave it out',
    ),
    _shape(
        "min_tokens",
        BOTH,
        whole(0, MAX_TOKENS),
        "not a whole number of at least 0",
        "it is a whole number of at least 0",
        'Send "min_tokens" as 0, or leave it out',
    ),
    _needs("min_tokens", "min_tokens", BOTH, one_of(0), "not 0", "an answer may end at any length", 'Send "min_tokens" as 0, or leave it out'),
    _shape("ignore_eos", BOTH, instance_of(bool), "not a boolean", "it is a switch", 'Send "ignore_eos" as false, or leave it out'),
    _needs(
        "ignore_eos",
        "ignore_eos",
        BOTH,
        one_of(False),
        "true",
        "the first end-of-sequence token ends the answer",
        'Send "ignore_eos" as false, or leave it out',
    ),
    _shape(
        "stop_token_ids",
        BOTH,
        is_token_ids,
        "not an array of token ids",
        "token ids are whole numbers of at least 0",
        'Send "stop_token_ids" as an array of them, or leave it out',
    ),
    _needs(
        "stop_token_ids",
        "stop_token_ids",
        BOTH,
        is_empty,
        "not empty",
        "only the checkpoint's own end-of-sequence ids end an answer",
        'Send "stop_token_ids" as [], or leave it out',
    ),
    _shape(
        "allowed_token_ids",
        BOTH,
        are_token_ids,
        "not an array of at least one token id",
        "token ids are whole numbers of at least 0, and an answer needs one that may be drawn",
        'Send "allowed_token_ids" as an array of them, or leave it out',
    ),
    _needs(
        "allowed_token_ids",
        "allowed_token_ids",
        BOTH,
        never,
        "any array",
        "any token may be drawn",
        'Leave "allowed_token_ids" out',
    ),
    _shape(
        "bad_words",
        BOTH,
        are_words(MAX_BAD_WORDS, MAX_BAD_WORDS_CHARACTERS),
        f"not an array of at most {MAX_BAD_WORDS} texts of {MAX_BAD_WORDS_CHARACTERS:,} characters together, or one of them is empty",
        "bad words are an array of texts",
        'Send "bad_words" as such an array, or leave it out',
    ),
    _needs("bad_words", "bad_words", BOTH, is_empty, "not empty", "no text is kept out of an answer", 'Send "bad_words" as [], or leave it out'),
    _shape(
        "priority",
        BOTH,
        whole(-MAX_PRIORITY - 1, MAX_PRIORITY),
        f"not a whole number from -2**31 to {MAX_PRIORITY}",
        f"it is a whole number from {-MAX_PRIORITY - 1} to {MAX_PRIORITY}",
        'Send "priority" as such a number, or leave it out',
    ),
    _needs("priority", "priority", BOTH, one_of(0), "not 0", "requests are started in the order in which they come", 'Send "priority" as 0, or leave it out'),
    _shape(
        "response_format",
        CHAT,
        is_response_format,
        "not one of the three forms above, or `json_schema` without a `schema`",
        "a response format is an object with a type",
        'Send "response_format" as {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}',
    ),
    _needs(
        "structured_outputs",
        "response_format",
        CHAT,
        is_text_format,
        "not of type `text`",
        "this engine holds no answer to a form",
        'Send "response_format" as {"type": "text"}, or leave it out',
    ),
    _shape(
        "structured_outputs",
        BOTH,
        is_structured_outputs,
        "not of the form above, or beside a `response_format` that asks for a form too",
        f"it is an object with one of {', '.join(STRUCTURED_OUTPUTS)}",
        'Send "structured_outputs" as {"regex": "[a-z]+"}, or leave it out',
    ),
    _needs(
        "answer_forms",
        "structured_outputs",
        BOTH,
        never,
        "any form",
        "no answer is held to such a form",
        'Leave "structured_outputs" out',
    ),
    _shape(
        "best_of",
        COMPLETIONS,
        candidates(MAX_CHOICES),
        f"not a whole number from `n` to {MAX_CHOICES}",
        f"it is a number of candidates, at most {MAX_CHOICES}",
        'Send "best_of" as such a number, or leave it out',
    ),
    _needs(
        "best_of",
        "best_of",
        COMPLETIONS,
        one_of(1),
        "not 1",
        "one candidate is generated for each choice, and there is no second one to compare it with",
        'Send "best_of" as 1, or leave it out',
    ),
    _needs(
        None,
        "best_of",
        COMPLETIONS,
        one_or_not_streamed,
        "above 1 on a stream",
        "which candidates are the best is known when all have ended",
        'Send "stream" as false, or leave "best_of" out',
    ),
    _shape("suffix", COMPLETIONS, instance_of(str), "not a string", "it is a text", 'Send "suffix" as "", or leave it out'),
    _needs(
        "suffix",
        "suffix",
        COMPLETIONS,
        is_empty,
        "not empty",
        "the completion is returned on its own, with no suffix after it",
        'Send "suffix" as "", or leave it out',
    ),
    _needs(
        None,
        "suffix",
        COMPLETIONS,
        no_echo,
        "not empty, and `echo` is true",
        "an echo is followed by what was generated, and the suffix would be missing",
        'Send "echo" as false, or leave "suffix" out',
    ),
    _shape("echo", COMPLETIONS, instance_of(bool), "not a boolean", "it is a switch", 'Send "echo" as false, or leave it out'),
    _needs(
        "prompt_logprobs",
        "echo",
        COMPLETIONS,
        one_of(False),
        "true",
        "the text holds only what was generated, never the prompt",
        'Send "echo" as false and put the prompt before the text yourself',
    ),
    _shape(
        "prompt_logprobs",
        BOTH,
        whole(0, MAX_LOGPROBS),
        f"not {_RANKS}",
        f"it is the number of alternatives for each token of the prompt, {_RANKS}",
        'Send "prompt_logprobs" as such a number, or leave it out',
    ),
    _needs(
        "prompt_logprobs",
        "prompt_logprobs",
        BOTH,
        never,
        "any count",
        "the tokens of a prompt are not ranked",
        'Leave "prompt_logprobs" out',
    ),
    _needs(
        None,
        "prompt_logprobs",
        BOTH,
        is_not_streamed,
        "any count on a stream",
        "a chunk of a stream has no place for it",
        'Send "stream" as false; on /v1/completions "echo" and "logprobs" rank a prompt on a stream',
    ),
    _shape(
        "tools",
        CHAT,
        are_tools,
        f"not an array of at most {MAX_TOOLS} function definitions, each with a name of its own",
        "tools are an array of function definitions",
        'Send "tools" as an array, or leave it out',
    ),
    _needs(
        "strict_tools",
        "tools",
        CHAT,
        has_no_strict_tool,
        "one of them is `strict`",
        "arguments are not held to the schema of a tool",
        'Send "strict" as false, or leave it out',
    ),
    _shape(
        "tool_choice",
        CHAT,
        is_tool_choice,
        "none of these forms",
        f"a choice is one of {', '.join(TOOL_CHOICES)}, or names one function",
        'Send "tool_choice" as "auto", or leave it out',
    ),
    _needs(
        "tool_choice",
        "tool_choice",
        CHAT,
        one_of("auto"),
        'anything but `"auto"`',
        "tools reach the chat template, and nothing makes the model call one of them, another one, or none",
        'Send "tool_choice" as "auto", or leave it out',
    ),
    _shape(
        "tool_choice",
        CHAT,
        can_be_chosen,
        "a call is required, and `tools` lacks what has to be called",
        "what has to be called is one of the tools",
        'Name one of the functions in "tools"',
    ),
    _shape("parallel_tool_calls", CHAT, instance_of(bool), "not a boolean", "it is a switch", 'Send "parallel_tool_calls" as true or false'),
    _needs(
        "single_tool_call",
        "parallel_tool_calls",
        CHAT,
        one_of(True),
        "false",
        "the number of tool calls is not limited",
        'Send "parallel_tool_calls" as true, or leave it out',
    ),
    _shape(
        "prompt",
        COMPLETIONS,
        is_prompt,
        "of another form, or empty",
        "a prompt is a string, an array of strings, an array of token ids, or an array of those",
        'Send "prompt" as one of these',
    ),
    _shape(
        "prompt",
        COMPLETIONS,
        fits_choices,
        f"more than {MAX_PROMPTS} answers in all",
        f"one request has at most {MAX_PROMPTS} answers",
        "Send several requests",
    ),
    _needs(
        "token_id_prompts",
        "prompt",
        COMPLETIONS,
        is_text_prompt,
        "token ids",
        "a prompt is text, which is tokenized here",
        'Send "prompt" as a string or an array of strings',
    ),
    *(
        _shape(
            name,
            BOTH,
            budget(MAX_TOKENS),
            "not a whole number of at least 1; 0 passes with `echo` or `prompt_logprobs`",
            "the budget of an answer is a whole number of at least 1 and below 2**63",
            f'Send "{name}" as a whole number of at least 1, or leave it out',
        )
        for name in ("max_tokens", "max_completion_tokens")
    ),
    _shape(
        "temperature",
        BOTH,
        real(0, MAX_TEMPERATURE),
        f"not a number from 0 to {MAX_TEMPERATURE}",
        f"logits are divided by a number from 0 (greedy) to {MAX_TEMPERATURE}",
        'Send "temperature" as such a number, or leave it out',
    ),
    _shape(
        "top_p",
        BOTH,
        real(0, 1, above=True),
        "not a number above 0 and at most 1",
        "the nucleus mass is a number above 0 and at most 1",
        'Send "top_p" as such a number; 1 is off',
    ),
    _shape(
        "top_k",
        BOTH,
        whole(-1, MAX_TOP_K),
        f"not a whole number from -1 to {MAX_TOP_K}",
        f"the candidate set has a whole number of tokens, at most {MAX_TOP_K}",
        'Send "top_k" as such a number; 0 or -1 is off',
    ),
    _shape(
        "seed",
        BOTH,
        whole(0, MAX_SEED),
        "not a whole number from 0 to 2**63 - 1",
        f"a seed is a whole number from 0 to {MAX_SEED}",
        'Send "seed" as such a number, or leave it out',
    ),
    _needs("per_request_sampling", "temperature", BOTH, one_of(0), "not 0", "this engine decodes greedily for every request", 'Send "temperature" as 0'),
    _needs(
        "per_request_sampling",
        "top_p",
        BOTH,
        one_or_greedy,
        "not 1, and `temperature` is not 0",
        "this engine decodes greedily for every request",
        'Send "top_p" as 1, or leave it out',
    ),
    _needs(
        "per_request_top_k",
        "top_k",
        BOTH,
        off_or_greedy,
        "neither 0 nor -1, and `temperature` is not 0",
        "this engine takes no candidate set of a request's own",
        'Send "top_k" as 0, or leave it out',
    ),
    _shape("stream", BOTH, instance_of(bool), "not a boolean", "it says whether the answer comes as events", 'Send "stream" as true or false'),
    _shape(
        "thinking_mode",
        CHAT,
        one_of(*THINKING_MODES),
        "anything else",
        "a chat template knows two modes",
        'Send "thinking_mode" as "thinking" or "chat", or leave it out',
    ),
    _shape(
        "reasoning_effort",
        CHAT,
        one_of(*REASONING_EFFORTS),
        "anything else",
        "it is not an effort that a chat template knows",
        f'Send "reasoning_effort" as one of {", ".join(REASONING_EFFORTS)}, or leave it out',
    ),
    _shape(
        "reasoning",
        CHAT,
        is_reasoning,
        "anything else",
        "reasoning is switched by true or false, or by an effort",
        'Send "reasoning" as true, false or {"effort": "low"}, or leave it out',
    ),
    *(
        _shape(name, CHAT, instance_of(bool), "not a boolean", "the chat template takes it as a switch", f'Send "{name}" as true or false')
        for name in ("add_generation_prompt", "drop_thinking", "continue_final_message")
    ),
    _needs(
        "template_options",
        "continue_final_message",
        CHAT,
        one_of(False),
        "true",
        "an answer is a turn of its own",
        'Send "continue_final_message" as false, or leave it out',
    ),
    _shape(
        "continue_final_message",
        CHAT,
        no_open_turn,
        "true, and `add_generation_prompt` is true",
        "the last message can't go on once a new turn has begun",
        'Send "add_generation_prompt" as false, or leave it out',
    ),
    _shape(
        "chat_template_kwargs",
        CHAT,
        are_template_variables,
        "not an object from names of variables, or one of them is another field's",
        "variables of a chat template are an object",
        'Send "chat_template_kwargs" as {"enable_thinking": false}, or leave it out',
    ),
    _needs(
        "template_options",
        "chat_template_kwargs",
        CHAT,
        is_empty,
        "not empty",
        "the chat template is given what the other fields say",
        'Send "chat_template_kwargs" as {}, or leave it out',
    ),
    _shape(
        "thinking_token_budget",
        CHAT,
        whole(0, MAX_TOKENS),
        "not a whole number of at least 0",
        "it is a number of tokens",
        'Send "thinking_token_budget" as such a number, or leave it out',
    ),
    _needs(
        "thinking_budget",
        "thinking_token_budget",
        CHAT,
        never,
        "any number",
        "reasoning is as long as the model makes it",
        'Leave "thinking_token_budget" out',
    ),
    _shape(
        "request_id",
        CHAT,
        lambda value, _body: isinstance(value, str) and _REQUEST_ID.fullmatch(value) is not None,
        "anything else",
        "an id has 1 to 128 letters, digits, dots, colons, dashes or underscores, so that it fits into a URL and a header",
        'Send such a "request_id", or leave it out',
    ),
)

_NAMES: dict[Endpoint, frozenset[str]] = {endpoint: frozenset(f.name for f in FIELDS if endpoint in f.endpoints) for endpoint in BOTH}


def check_fields(body: Mapping[str, Any], endpoint: Endpoint, features: frozenset[str] | None = None) -> None:
    """Pass `body`, or refuse the first field at fault. A null is the same as an absent field.

    Args:
        body: the request's fields.
        endpoint: whose fields they are.
        features: what is acted on, from protocol/features.py; None applies no rule that a feature would lift.

    Raises:
        ConfigurationError: a value has the wrong form, or no endpoint has such a field. `param` names it.
        UnsupportedFeatureError: nothing acts on the value. `param` names it.
    """
    for name, key, rule in _active(endpoint, features):
        value = body.get(name)
        if value is None:
            continue
        if key:
            value = value.get(key)
            if value is None:
                continue
        found = rule.allows(value, body)
        if found is True:
            continue
        if isinstance(found, Fault):
            raise refusal(rule.field + found.path, found.value, found.instead, found.remedy, is_shape=rule.is_shape)
        raise refusal(rule.field, value, rule.instead, rule.remedy, is_shape=rule.is_shape)
    names = _NAMES[endpoint]
    for name, value in body.items():
        if value is not None and name not in names:
            raise refusal(name, value, f"{PATHS[endpoint]} has no such field, and nothing would act on it", f"Leave {summary(name)} out", is_shape=True)


@lru_cache(maxsize=64)
def _active(endpoint: Endpoint, features: frozenset[str] | None) -> tuple[tuple[str, str, Rule], ...]:
    """The rules that hold, in their order, each after the field and the key that it is about."""
    rules = (rule for rule in RULES if endpoint in rule.endpoints and (rule.feature is None or (features is not None and rule.feature not in features)))
    return tuple((name, key, rule) for rule in rules for name, _, key in [rule.field.partition(".")])
