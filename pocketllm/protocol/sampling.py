"""Between request fields and SamplingParams, in both directions, so that HTTP and the library are refused by the one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.protocol.conditions import whole_number
from pocketllm.protocol.field import Endpoint
from pocketllm.protocol.fields import FIELDS, check_fields
from pocketllm.protocol.refusals import refusal
from pocketllm.sampling_params import SamplingParams

BUDGET_FIELDS = ("max_completion_tokens", "max_tokens")  # the first one sent wins
# Those whose name and values are the same in a request and in SamplingParams; 0, 1, false and empty ones are as good as absent.
_TERMS = (
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "min_p",
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "priority",
)
SAMPLING_FIELDS = (
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "stop",
    "logprobs",
    "top_logprobs",
    "prompt_logprobs",
    "best_of",
    "structured_outputs",
    *_TERMS,
)
_REALS = ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p")
_DEFAULTS: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(SamplingParams) if field.name in _TERMS}
_SAME = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "n",
    "logprobs",
    "prompt_logprobs",
    "best_of",
    "structured_outputs",
)  # in a request and in SamplingParams
_SPELLED = {"max_completion_tokens": "Use max_tokens", "top_logprobs": "Use logprobs, the number of alternatives"}


def sampling_from(body: Mapping[str, Any], endpoint: Endpoint) -> SamplingParams:
    """SamplingParams of a body that `check_fields` passed; null and absent fields are left to their defaults."""
    budget = next((body[name] for name in BUDGET_FIELDS if body.get(name) is not None), None)
    logprobs = body.get("logprobs")
    if endpoint == "chat":
        logprobs = (body.get("top_logprobs") or 0) if logprobs else None
    rest: dict[str, Any] = {
        name: body.get(name) for name in ("temperature", "top_p", "top_k", "seed", "n", "stop", "prompt_logprobs", "best_of", "structured_outputs", *_TERMS)
    }
    if budget == 0 and rest["prompt_logprobs"] is None:
        rest["prompt_logprobs"] = 0  # of an echo: without an answer the prompt has to be what is asked about
    return SamplingParams(max_tokens=budget, logprobs=logprobs, **rest)


def sampling_fields(sampling: SamplingParams, endpoint: Endpoint) -> dict[str, Any]:
    """The request fields that say what `sampling` says; `check_fields` takes them."""
    found: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME}
    found |= {name: value for name in _TERMS if (value := getattr(sampling, name)) != _DEFAULTS[name]}
    if endpoint == "chat" and sampling.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    return {name: value for name, value in found.items() if value is not None}


def check_values(sampling: SamplingParams) -> None:
    """Refuse, in the words of the table, a value that no request may have.

    Raises:
        ConfigurationError: `param` names the field.
    """
    check_fields({field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}, "completions")


def resolved_values(sampling: SamplingParams) -> dict[str, Any]:
    """The fields of `sampling`, once `check_values` has passed it, as later code reads them: whole numbers as ints, sequences as tuples, defaults for None."""
    whole = ("max_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs", "best_of", "min_tokens", "priority")
    found: dict[str, Any] = {name: whole_number(getattr(sampling, name)) for name in whole}
    found |= {name: None if (value := getattr(sampling, name)) is None else float(value) for name in _REALS}
    found["ignore_eos"] = sampling.ignore_eos
    found["stop_token_ids"] = _ids(sampling.stop_token_ids)
    found["bad_words"] = tuple(sampling.bad_words or ())
    for name, default in _DEFAULTS.items():
        found[name] = default if found.get(name) is None else found[name]
    found["allowed_token_ids"] = None if sampling.allowed_token_ids is None else _ids(sampling.allowed_token_ids)
    found["logit_bias"] = {int(key): float(bias) for key, bias in sampling.logit_bias.items()} if sampling.logit_bias else None
    return {**found, "n": found["n"] or 1}


def _ids(ids: Sequence[Any] | None) -> tuple[int, ...]:
    return tuple(map(int, ids or ()))


def check_sampling(sampling: SamplingParams, endpoint: Endpoint, features: frozenset[str]) -> None:
    """Refuse, in the words of the table, what the loaded plane does not act on. Raises as `check_fields` does."""
    check_fields(sampling_fields(sampling, endpoint), endpoint, features)


def refuse_keywords(options: Mapping[str, Any]) -> None:
    """Refuse keywords that SamplingParams does not have, unless it is a field that nothing acts on at a value that changes nothing.

    Raises:
        ConfigurationError, UnsupportedFeatureError: in the words of the table; `param` names the keyword.
    """
    for name, value in options.items():
        fields = [field for field in FIELDS if field.name == name]
        if value is not None and any(field.group != "refused" for field in fields):
            raise refusal(name, value, "it is no field of SamplingParams", _SPELLED.get(name, "Give it to chat() as an option, or leave it out"), is_shape=True)
        endpoint = fields[0].endpoints[0] if fields else "completions"
        check_fields({name: value}, endpoint, frozenset())
