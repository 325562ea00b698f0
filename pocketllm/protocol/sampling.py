"""Between request fields and SamplingParams, in both directions, so that HTTP and the library are refused by the one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.protocol.conditions import whole_number
from pocketllm.protocol.fields import FIELDS, Endpoint, check_fields
from pocketllm.protocol.refusals import refusal
from pocketllm.sampling_params import SamplingParams

BUDGET_FIELDS = ("max_completion_tokens", "max_tokens")  # the first one sent wins
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "seed", "n", "stop", "logprobs", "top_logprobs")
_SPELLED = {"max_completion_tokens": "Use max_tokens", "top_logprobs": "Use logprobs, the number of alternatives"}


def sampling_from(body: Mapping[str, Any], endpoint: Endpoint) -> SamplingParams:
    """SamplingParams of a body that `check_fields` passed; null and absent fields are left to their defaults."""
    budget = next((body[name] for name in BUDGET_FIELDS if body.get(name) is not None), None)
    logprobs = whole_number(body.get("logprobs"))
    if endpoint == "chat" and body.get("logprobs"):
        logprobs = whole_number(body.get("top_logprobs")) or 0
    return SamplingParams(
        max_tokens=whole_number(budget),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=whole_number(body.get("top_k")),
        seed=whole_number(body.get("seed")),
        n=whole_number(body.get("n")) or 1,
        stop=body.get("stop"),
        logprobs=logprobs,
    )


def sampling_fields(sampling: SamplingParams, endpoint: Endpoint) -> dict[str, Any]:
    """The request fields that say what `sampling` says; `check_fields` takes them."""
    found: dict[str, Any] = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p", "top_k", "seed", "n", "logprobs")}
    if endpoint == "chat" and sampling.logprobs is not None:
        found |= {"logprobs": True, "top_logprobs": sampling.logprobs}
    return {name: value for name, value in found.items() if value is not None}


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
