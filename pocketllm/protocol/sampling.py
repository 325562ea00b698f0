"""Between request fields and SamplingParams, in both directions, so that HTTP and the library are refused by the one table."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pocketllm.protocol.conditions import whole_number
from pocketllm.protocol.fields import FIELDS, Endpoint, check_fields
from pocketllm.protocol.refusals import refusal
from pocketllm.sampling_params import SamplingParams

BUDGET_FIELDS = ("max_completion_tokens", "max_tokens")  # the first one sent wins
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "seed", "n", "stop", "logprobs", "top_logprobs", "prompt_logprobs")
_SAME = ("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "logprobs", "prompt_logprobs")  # in a request and in SamplingParams
_SPELLED = {"max_completion_tokens": "Use max_tokens", "top_logprobs": "Use logprobs, the number of alternatives"}


def sampling_from(body: Mapping[str, Any], endpoint: Endpoint) -> SamplingParams:
    """SamplingParams of a body that `check_fields` passed; null and absent fields are left to their defaults."""
    budget = next((body[name] for name in BUDGET_FIELDS if body.get(name) is not None), None)
    logprobs = body.get("logprobs")
    if endpoint == "chat":
        logprobs = (body.get("top_logprobs") or 0) if logprobs else None
    rest: dict[str, Any] = {name: body.get(name) for name in ("temperature", "top_p", "top_k", "seed", "n", "stop", "prompt_logprobs")}
    if budget == 0 and rest["prompt_logprobs"] is None:
        rest["prompt_logprobs"] = 0  # of an echo: without an answer the prompt has to be what is asked about
    return SamplingParams(max_tokens=budget, logprobs=logprobs, **rest)


def sampling_fields(sampling: SamplingParams, endpoint: Endpoint) -> dict[str, Any]:
    """The request fields that say what `sampling` says; `check_fields` takes them."""
    found: dict[str, Any] = {name: getattr(sampling, name) for name in _SAME}
    if endpoint == "chat" and sampling.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    return {name: value for name, value in found.items() if value is not None}


def check_values(sampling: SamplingParams) -> None:
    """Refuse, in the words of the table, a value that no request may have.

    Raises:
        ConfigurationError: `param` names the field.
    """
    check_fields({field.name: getattr(sampling, field.name) for field in dataclasses.fields(sampling)}, "completions")


def whole_values(sampling: SamplingParams) -> dict[str, int | None]:
    """Those of the fields that are whole numbers, as such."""
    found = {name: whole_number(getattr(sampling, name)) for name in ("max_tokens", "top_k", "seed", "n", "logprobs", "prompt_logprobs")}
    return {**found, "n": found["n"] or 1}


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
