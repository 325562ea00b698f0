"""A conversation and its options, made into the one GenerationRequest that the server and the library share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.conditions import is_list, whole_number
from pocketllm.protocol.fields import check_fields
from pocketllm.protocol.messages import normalize_messages, render_role_content
from pocketllm.protocol.refusals import checked_text, missing, refusal, summary
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.protocol.sampling import BUDGET_FIELDS, SAMPLING_FIELDS, sampling_fields, sampling_from
from pocketllm.protocol.tools import template_tools, tool_use
from pocketllm.sampling_params import SamplingParams


def build_chat_request(
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    *,
    request_id: str | None = None,
    features: frozenset[str] | None = None,
    default_max_tokens: int | None = None,
    **options: Any,
) -> GenerationRequest:
    """The request that answers a conversation, for the library.

    Args:
        messages: as in /v1/chat/completions; never changed.
        sampling: budget and sampling.
        request_id: the caller's id, or None for a new one.
        features: what is acted on, from protocol/features.py; None where that is not known.
        default_max_tokens: budget where `sampling` has none, cut to what the context leaves.
        options: the other fields of /v1/chat/completions, checked by the same table.

    Raises:
        ConfigurationError, UnsupportedFeatureError: a message or a field is not valid; `param` names it.
    """
    if not isinstance(sampling, SamplingParams):
        raise ConfigurationError(f'"sampling_params" = {summary(sampling)} is not valid: send a SamplingParams.', param="sampling_params")
    for name in (*BUDGET_FIELDS, *SAMPLING_FIELDS):
        if options.get(name) is not None:
            raise ConfigurationError(f'"{name}" is given beside SamplingParams, which has a field for it: put it there alone.', param=name)
    if options.get("stream"):
        raise ConfigurationError('"stream" = true has no meaning here: call chat_stream() for events.', param="stream")
    body = {**options, "request_id": request_id}
    check_fields({**body, **sampling_fields(sampling, "chat")}, "chat", features)
    return replace(_request(messages, body, sampling, default_max_tokens), is_streamed=True)


def chat_request(body: Mapping[str, Any], default_max_tokens: int | None = None) -> GenerationRequest:
    """The request that a body of /v1/chat/completions asks for, once `check_fields` has passed it.

    Raises:
        ConfigurationError, UnsupportedFeatureError: a message is not valid; `param` names it.
    """
    return _request(body.get("messages"), body, sampling_from(body, "chat"), default_max_tokens)


def prompts_of(body: Mapping[str, Any]) -> list[str | tuple[int, ...]]:
    """The prompts of a body of /v1/completions that `check_fields` passed; at least one.

    Raises:
        ConfigurationError: there is none, or one is no valid text; `param` is "prompt".
    """
    prompt = body.get("prompt")
    if prompt is None:
        raise missing("prompt", "there is nothing to complete", 'Send "prompt" as a string or an array of token ids')
    several = prompt if is_list(prompt) and (isinstance(prompt[0], str) or is_list(prompt[0])) else [prompt]
    return [checked_text(one, "prompt") if isinstance(one, str) else tuple(whole_number(token_id) or 0 for token_id in one) for one in several]


def template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template is given beside messages and tools.

    Templates spell the switch for reasoning `enable_thinking` or `thinking`: both are set, and neither is when the caller
    said nothing, so that the template's own default holds.
    """
    reasoning = options.get("reasoning")
    effort = options.get("reasoning_effort")
    if effort is None and isinstance(reasoning, Mapping):
        effort = reasoning.get("effort")
    is_open = options.get("add_generation_prompt") is not False and options.get("continue_final_message") is not True
    found: dict[str, Any] = {"add_generation_prompt": is_open}
    thinking: bool | None = None
    if options.get("thinking_mode") is not None:
        thinking = options["thinking_mode"] == "thinking"
    elif isinstance(reasoning, bool):
        thinking = reasoning
    elif effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        found["enable_thinking"] = found["thinking"] = thinking
        found["thinking_mode"] = "thinking" if thinking else "chat"
    if effort is not None:
        found["reasoning_effort"] = effort
    if options.get("drop_thinking") is not None:
        found["drop_thinking"] = options["drop_thinking"]
    return found | dict(options.get("chat_template_kwargs") or {})


def _request(messages: object, body: Mapping[str, Any], sampling: SamplingParams, default_max_tokens: int | None) -> GenerationRequest:
    normalized = normalize_messages(messages)
    template = template_options(body)
    tools = tool_use(body)
    form = body.get("response_format")
    continues = body.get("continue_final_message") is True
    if continues and normalized[-1]["role"] != "assistant":
        raise refusal(
            "continue_final_message", True, "the last message is not the assistant's", "Send one of role assistant last, or leave it out", is_shape=True
        )
    metadata: dict[str, Any] = {"messages": normalized, **template}
    if tools is not None:
        metadata["tools"] = template_tools(tools)
    return GenerationRequest(
        prompt=render_role_content(normalized, add_generation_prompt=template["add_generation_prompt"]),
        sampling=sampling,
        request_id=body.get("request_id") or new_request_id("chatcmpl"),
        default_max_tokens=default_max_tokens,
        metadata=metadata,
        response_format=None if form is None or form["type"] == "text" else form,
        tools=tools,
        continues=continues,
        thinking_budget=whole_number(body.get("thinking_token_budget")),
    )
