"""THE table of request fields: what each endpoint takes, at which values, and the words in which it refuses the others.

A field is accepted only when something acts on it. FIELDS says which group a field is in; RULES (rules.py), in the order in
which they are applied, say which of its values pass. The server, LLM.chat, SamplingParams, the documentation and the tests read
this table, so a field changes its state here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from pocketllm.protocol.conditions import (
    MAX_PROMPTS,
    REASONING_EFFORTS,
    STRUCTURED_OUTPUTS,
    Fault,
)
from pocketllm.protocol.field import BOTH, CHAT, COMPLETIONS, PATHS, RANKS, Endpoint, Field, Rule
from pocketllm.protocol.refusals import refusal, summary
from pocketllm.protocol.rules import RULES
from pocketllm.protocol.tools import MAX_TOOLS
from pocketllm.sampling_params import (
    MAX_BAD_WORDS,
    MAX_BAD_WORDS_CHARACTERS,
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MAX_TOP_K,
)

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
    Field("top_logprobs", CHAT, "implemented", f"{RANKS}, above 0 only with logprobs", "How many alternatives to rank at each token."),
    Field("logprobs", COMPLETIONS, "implemented", RANKS, "Each token's log probability is returned, with so many alternatives."),
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
        RANKS,
        "As vLLM has it: for each token of the prompt but the first, its log probability and so many alternatives, by token id.",
    ),
    *(
        Field(name, BOTH, "inert", "anything", "Cannot change the text; accepted and ignored.")
        for name in ("user", "store", "metadata", "service_tier", "model", "prompt_cache_key", "safety_identifier", "verbosity", "prediction")
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
