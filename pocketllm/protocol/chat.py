"""Chat messages: checked, normalized, and made into the one GenerationRequest that the server and the library share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.conditions import whole_number
from pocketllm.protocol.fields import check_fields, checked_text, refusal
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.sampling_params import SamplingParams

ROLES = ("system", "developer", "user", "assistant", "tool")
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "seed")
BUDGET_FIELDS = ("max_completion_tokens", "max_tokens")  # the first one sent wins
CHAT_OPTIONS = TEMPLATE_FIELDS = ("reasoning_effort", "reasoning", "thinking_mode", "add_generation_prompt", "drop_thinking")


def build_chat_request(
    messages: Sequence[Mapping[str, Any]],
    sampling: SamplingParams,
    *,
    request_id: str | None = None,
    features: frozenset[str] | None = None,
    default_max_tokens: int | None = None,
    **options: Any,
) -> GenerationRequest:
    """The request that answers a conversation.

    Args:
        messages: as in /v1/chat/completions; never changed.
        sampling: budget and sampling.
        request_id: the caller's id, or None for a new one.
        features: what is acted on, where it is known.
        default_max_tokens: budget where `sampling` has none, cut to what the context leaves.
        options: the other fields of /v1/chat/completions, checked by the same table.

    Raises:
        ConfigurationError, UnsupportedFeatureError: a message or a field is not valid; `param` names it.
    """
    for name in (*BUDGET_FIELDS, *SAMPLING_FIELDS):
        if name in options:
            raise ConfigurationError(f'"{name}" is given twice: put it into SamplingParams alone.', param=name)
    if options.get("stream"):
        raise ConfigurationError('"stream" = true has no meaning here: call chat_stream() for events.', param="stream")
    check_fields({**options, "request_id": request_id}, "chat", features)
    normalized = normalize_messages(messages)
    template = template_options(options)
    return GenerationRequest(
        prompt=render_role_content(normalized, add_generation_prompt=template["add_generation_prompt"]),
        sampling=sampling,
        request_id=request_id or new_request_id("chatcmpl"),
        default_max_tokens=default_max_tokens,
        metadata={"messages": normalized, **template},
    )


def normalize_messages(messages: object) -> list[dict[str, Any]]:
    """Messages as a chat template reads them: content is a string, "developer" is "system", null keys are left out.

    The caller's objects are copied, never changed.

    Raises:
        ConfigurationError: naming the message and the key at fault; `param` is "messages" or a path such as "messages[2].content".
    """
    if not isinstance(messages, (list, tuple)) or not messages:
        raise refusal(
            "messages",
            messages,
            "a conversation has at least one message",
            'Send "messages" as an array such as [{"role": "user", "content": "Hi"}]',
            is_shape=True,
        )
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def render_role_content(messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True) -> str:
    """Normalized messages as `role: content` lines, for checkpoints without a chat template."""
    lines = [f"{message['role']}: {message['content']}" for message in messages]
    return "\n".join([*lines, "assistant:"] if add_generation_prompt else lines)


def sampling_from(body: Mapping[str, Any], endpoint: str) -> SamplingParams:
    """SamplingParams of a body that `check_fields` passed; null and absent fields are None."""
    budget = next((body[name] for name in BUDGET_FIELDS if body.get(name) is not None), None)
    return SamplingParams(
        max_tokens=whole_number(budget),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=whole_number(body.get("top_k")),
        seed=whole_number(body.get("seed")),
    )


def template_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What the chat template is given beside the messages.

    Templates spell the switch for reasoning `enable_thinking` or `thinking`: both are set, and neither is when the caller
    said nothing, so that the template's own default holds.
    """
    reasoning = options.get("reasoning")
    effort = options.get("reasoning_effort")
    if effort is None and isinstance(reasoning, Mapping):
        effort = reasoning.get("effort")
    found: dict[str, Any] = {"add_generation_prompt": options.get("add_generation_prompt") is not False}
    thinking: bool | None = None
    if options.get("thinking_mode") is not None:
        thinking = options["thinking_mode"] == "thinking"
    elif isinstance(reasoning, bool):
        thinking = reasoning
    elif effort is not None:
        thinking = effort != "none"
    if thinking is not None:
        found["enable_thinking"] = found["thinking"] = thinking
    if effort is not None and effort != "none":
        found["reasoning_effort"] = effort
    if options.get("drop_thinking") is not None:
        found["drop_thinking"] = options["drop_thinking"]
    return found


def _normalize(message: object, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise refusal(where, message, "a message is an object with a role and a content", 'Send it as {"role": "user", "content": "Hi"}', is_shape=True)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise refusal(f"{where}.role", role, "no chat template knows such a role", f"Send one of {', '.join(ROLES)}", is_shape=True)
    for key in ("audio", "function_call"):
        if message.get(key) is not None:
            raise refusal(f"{where}.{key}", message[key], "only text reaches the model", f'Leave "{key}" out', is_shape=False)
    rest = {str(key): copy.deepcopy(value) for key, value in message.items() if key not in ("role", "content") and value is not None}
    content = _content(message.get("content"), role, f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content, **rest}


def _content(content: object, role: str, where: str) -> str:
    if content is None and role == "assistant":
        return ""
    if isinstance(content, str):
        return checked_text(content, where)
    if not isinstance(content, (list, tuple)):
        raise refusal(where, content, "a content is a string, or an array of text parts", "Send the content as a string", is_shape=True)
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, Mapping) or part.get("type") != "text":
            raise refusal(f"{where}[{index}]", part, "only text reaches the model", 'Send parts of the form {"type": "text", "text": "Hi"}', is_shape=False)
        if not isinstance(part.get("text"), str):
            raise refusal(f"{where}[{index}].text", part.get("text"), "a text part holds a string", 'Send "text" as a string', is_shape=True)
        texts.append(checked_text(part["text"], f"{where}[{index}].text"))
    return "\n".join(texts)
