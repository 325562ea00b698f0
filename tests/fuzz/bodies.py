"""Request bodies to begin from: valid ones of every kind that the two generation endpoints take."""

from __future__ import annotations

from typing import Any

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_HI: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 20, "pattern": "^[a-z ]+$"},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
        "ratio": {"type": ["number", "null"]},
        "kind": {"enum": ["a", "b", None, 3]},
        "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "minItems": 0, "maxItems": 3},
        "either": {"anyOf": [{"const": "x"}, {"type": "boolean"}]},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"tag": {"type": "string", "enum": ["red", "blue"]}},
}
_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": SCHEMA, "strict": True},
}
_CLOCK: dict[str, Any] = {"type": "function", "function": {"name": "clock"}}
_CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "oslo", "days": 3}'}}


def _chat(**fields: Any) -> tuple[str, dict[str, Any]]:
    return CHAT, {"messages": _HI, "max_tokens": 8, **fields}


def _completion(**fields: Any) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": "Once", "max_tokens": 8, **fields}


# What the model says, by the prompt: text, reasoning, calls that are complete, cut, and malformed; the last one stands for letters at random.
ANSWERS: tuple[str | None, ...] = (
    "Plain text, é and 🌍.",
    "<think>Hm, é.</think>\n\nSo it is a, b and c.",
    "Thinking of it.</think>The end",
    "Let me see.\n<tool_call>\n<function=get_weather>\n<parameter=city>\noslo\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    "<tool_call>\n<function=clock>\n</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
    "<tool_call>\n<function=clock>\n</function>\n</tool_call> and more",
    "<tool_call><function=get_weather><parameter=tags>[{'a': True}, ",
    '{"city": "oslo", "days": 3, "kind": null}',
    None,
)

VALID: tuple[tuple[str, dict[str, Any]], ...] = (
    _chat(),
    _chat(model="any", temperature=0.7, top_p=0.9, top_k=20, seed=7, user="me", store=False, metadata={"a": "b"}, service_tier="auto"),
    _chat(max_tokens=None, max_completion_tokens=5, stream=True, stream_options={"include_usage": True, "include_obfuscation": False}),
    _chat(stop=["a", "bc", ""], n=2, temperature=1),
    _chat(stop="q", stream=True, n=3, seed=1),
    _chat(logprobs=True, top_logprobs=3),
    _chat(logprobs=True, top_logprobs=0, n=2),
    _chat(logprobs=False, frequency_penalty=0, presence_penalty=0.0, logit_bias={}, repetition_penalty=1, min_p=0, min_tokens=0, ignore_eos=False),
    _chat(stop_token_ids=[], response_format={"type": "text"}, prediction=None, verbosity="low", prompt_cache_key="k", safety_identifier="s"),
    _chat(response_format={"type": "json_object"}, temperature=0),
    _chat(response_format={"type": "json_schema", "json_schema": {"name": "trip", "strict": True, "schema": SCHEMA}}),
    _chat(
        response_format={"type": "json_schema", "json_schema": {"name": "trip", "schema": {"type": "array", "items": {"type": "null"}}}},
        stream=True,
    ),
    _chat(tools=[_WEATHER, _CLOCK], tool_choice="auto", parallel_tool_calls=True),
    _chat(tools=[_WEATHER], tool_choice={"type": "function", "function": {"name": "get_weather"}}, parallel_tool_calls=False, stream=True),
    _chat(tools=[_WEATHER], tool_choice="required"),
    _chat(tools=[_CLOCK], tool_choice="none", logprobs=True),
    _chat(reasoning_effort="low", thinking_mode="thinking", drop_thinking=True, add_generation_prompt=True, request_id="mine"),
    _chat(reasoning={"effort": "high"}, thinking_mode="chat"),
    _chat(reasoning=False, stream=True),
    _chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be kind."}, {"type": "text", "text": "And quick."}]},
            {"role": "user", "content": [{"type": "text", "text": "Weather? 🌧️ é \u2028"}], "name": "ann"},
            {"role": "assistant", "content": None, "tool_calls": [_CALL], "reasoning_content": "Hm."},
            {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
            {"role": "assistant", "content": "It rains.", "refusal": None},
            {"role": "user", "content": "And tomorrow?"},
        ],
        tools=[_WEATHER],
    ),
    _chat(prompt_logprobs=2, structured_outputs={"regex": "[a-z]{1,9}( [a-z]+)*"}),
    _chat(structured_outputs={"grammar": 'start: "a" b* // c\nb: /[0-9]{1,3}/ | ("x" | "y")\n%import common.WS\n%ignore WS'}, stream=True, logprobs=True),
    _chat(chat_template_kwargs={"enable_thinking": True, "more": [{"a": None}]}, thinking_token_budget=3),
    _chat(messages=[{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}], continue_final_message=True, add_generation_prompt=False),
    _completion(),
    _completion(prompt=["Once upon"], stream=True),
    _completion(echo=True, logprobs=2, max_tokens=0),
    _completion(prompt=["One", "Two"], echo=True, logprobs=0, stream=True, n=2),
    _completion(prompt_logprobs=1, best_of=3, n=2, temperature=1),
    _completion(structured_outputs={"choice": ["yes", "no"]}),
    _completion(structured_outputs={"json": {"type": "object", "properties": {"a": {"type": "integer"}}}, "regex": None}),
    _completion(prompt=["One", "Two"], n=2),
    _completion(prompt=[72, 105]),
    _completion(prompt=[[72, 105], [33]], stream=True, stream_options={"include_usage": True}),
    _completion(logprobs=5, stop=["a", "b"]),
    _completion(logprobs=0, n=2),
    _completion(echo=False, suffix="", best_of=1, n=1, seed=3, temperature=1.5, top_p=0.5, top_k=-1),
    _completion(max_tokens=None, model=None, user=None),
)
