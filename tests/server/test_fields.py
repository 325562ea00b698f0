"""Every field of the table, at values that pass and at values that do not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from pocketllm.backends.base import Capabilities
from pocketllm.protocol.fields import BOTH, FIELDS, PATHS, RULES, Endpoint, check_fields, summary
from tests.fake_serving import chat_body, fake, in_process

# field: (endpoints, accepted values, refused values)
CASES: dict[str, tuple[tuple[Endpoint, ...], list[Any], list[Any]]] = {
    "n": (BOTH, [1, 1.0], [0, 2, -1, 1.5, True, "1", [1], 129]),
    "stop": (BOTH, ["", [], [""], ["", ""]], [5, True, {}, [5], [None], "a", ["a"], ["", "a"]]),
    "frequency_penalty": (BOTH, [0, 0.0, -0.0], [0.1, -1, False, "0", []]),
    "presence_penalty": (BOTH, [0, 0.0], [2, False, "0"]),
    "repetition_penalty": (BOTH, [1, 1.0], [1.1, True, "1"]),
    "min_p": (BOTH, [0, 0.0], [0.1, "0"]),
    "min_tokens": (BOTH, [0], [1, False]),
    "ignore_eos": (BOTH, [False], [True, 0]),
    "stop_token_ids": (BOTH, [[]], [[1], 1]),
    "logit_bias": (BOTH, [{}], [{"5": 1}, 5, "a", [1]]),
    "max_tokens": (BOTH, [1, 2.0], [0, -1, 1.5, True, "1", [1], 1e300, 10**4300 - 1]),
    "max_completion_tokens": (BOTH, [1, 2.0], [0, -1, 1.5, False, "1"]),
    "temperature": (BOTH, [0, 0.0, 1, 2.5], [-0.1, True, "1", [], 10**400]),
    "top_p": (BOTH, [1, 0.5, 1.0], [0, 1.1, -1, True, "1"]),
    "top_k": (BOTH, [-1, 0, 1, 40, 40.0], [-2, 1.5, True, "1", 10**30]),
    "seed": (BOTH, [0, 1, 2.0, 2**63 - 1], [-1, 1.5, True, "1", 2**63]),
    "stream": (BOTH, [True, False], [1, "true", 0, []]),
    "stream_options": (
        BOTH,
        [{}, {"include_usage": True}, {"include_usage": False}, {"include_usage": None}, {"include_obfuscation": False}],
        [5, True, [], "a", {"include_usage": 1}, {"include_usage": "yes"}, {"include_obfuscation": True}, {"continuous_usage_stats": True}],
    ),
    "response_format": (("chat",), [{"type": "text"}], [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, {}, "text", 5, {"type": []}]),
    "tools": (("chat",), [[]], [[{"type": "function", "function": {"name": "f"}}], 5, "a"]),
    "tool_choice": (("chat",), ["auto", "none"], ["required", {"type": "function", "function": {"name": "f"}}, 5, ""]),
    "parallel_tool_calls": (("chat",), [True], [False, 1, "true"]),
    "best_of": (("completions",), [1, 1.0], [2, 0, True, "1"]),
    "suffix": (("completions",), [""], ["a", 5, []]),
    "echo": (("completions",), [False], [True, 0, "a"]),
    "thinking_mode": (("chat",), ["thinking", "chat"], ["on", True, 5, {}]),
    "reasoning_effort": (("chat",), ["none", "low", "xhigh", "max"], ["lowest", 5, True, [], {}]),
    "reasoning": (("chat",), [True, False, {}, {"effort": "low"}, {"effort": None}], ["low", 5, {"effort": "lowest"}, {"effort": []}, {"summary": "auto"}]),
    "add_generation_prompt": (("chat",), [True, False], [1, "true", []]),
    "drop_thinking": (("chat",), [True, False], [1, "true"]),
    "request_id": (("chat",), ["a", "A-1_2.3:4", "x" * 128], ["", "a b", "a/b", "é", "x" * 129, 5, "a\n", []]),
    **{
        name: (BOTH, ["x", 5, {"a": [1]}, True], [])
        for name in ("user", "store", "metadata", "service_tier", "model", "prompt_cache_key", "safety_identifier", "verbosity", "prediction")
    },
}
# fields whose values differ between the endpoints
SPLIT: dict[tuple[str, Endpoint], tuple[list[Any], list[Any]]] = {
    ("logprobs", "chat"): ([False], [True, 0, 1, "false"]),
    ("logprobs", "completions"): ([], [0, 5, 21, True, False, -1, 1.5, "1"]),
    ("top_logprobs", "chat"): ([0, 0.0], [1, 21, -1, True, "1", 1.5]),
    ("top_logprobs", "completions"): ([], [0, 1, "a", False]),
}


def base(endpoint: Endpoint) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]} if endpoint == "chat" else {"max_tokens": 1, "prompt": "Hi"}


def table() -> list[tuple[str, Endpoint, list[Any], list[Any]]]:
    rows = [(name, endpoint, good, bad) for name, (endpoints, good, bad) in CASES.items() for endpoint in endpoints]
    return rows + [(name, endpoint, good, bad) for (name, endpoint), (good, bad) in SPLIT.items()]


def post_all(bodies: list[tuple[Endpoint, dict[str, Any]]]) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with in_process() as client:
            return [await client.post(PATHS[endpoint], content=json.dumps(body).encode()) for endpoint, body in bodies]

    return asyncio.run(run())


@pytest.mark.parametrize(("name", "endpoint", "good", "bad"), table(), ids=lambda value: value if isinstance(value, str) else "")
def test_field(name: str, endpoint: Endpoint, good: list[Any], bad: list[Any]) -> None:
    values = [*good, None, *bad]
    responses = post_all([(endpoint, {**base(endpoint), name: value}) for value in values])
    for value, response in zip(values, responses, strict=True):
        if value is None or any(value is one for one in good):
            assert response.status_code == 200, (value, response.text)
            continue
        assert response.status_code == 400, (value, response.text)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error"
        assert error["code"] is None
        assert error["param"].partition(".")[0] == name
        assert error["message"].startswith(f'"{error["param"]}" = ')
        assert " is not supported by this server: " in error["message"]
        assert "\n" not in error["message"]
        assert error["message"].count(". ") >= 1
        assert error["message"].endswith(".")


def test_every_field_and_rule_is_covered_here() -> None:
    covered = set(CASES) | {name for name, _ in SPLIT} | {"messages", "prompt"}
    assert {field.name for field in FIELDS} == covered
    assert {rule.field.partition(".")[0] for rule in RULES} <= covered
    ruled = {(rule.field.partition(".")[0], endpoint) for rule in RULES for endpoint in rule.endpoints}
    for field in FIELDS:
        for endpoint in field.endpoints:
            assert ((field.name, endpoint) in ruled) == (field.group != "inert" and field.name != "messages"), field.name


def test_guides_example_is_answered_to_the_letter() -> None:
    (response,) = post_all([("chat", {**base("chat"), "stop": 5})])
    assert response.json() == {
        "error": {
            "message": '"stop" = 5 is not supported by this server: a stop sequence is a string, or a list of strings, and this value is neither. '
            'Send "stop" as a string or an array of strings.',
            "type": "invalid_request_error",
            "param": "stop",
            "code": None,
        }
    }


@pytest.mark.parametrize(
    ("endpoint", "field"),
    [("chat", "prompt"), ("completions", "messages"), ("chat", "foo"), ("completions", "request_id"), ("completions", "tools"), ("chat", "echo")],
)
def test_unknown_field_is_named(endpoint: Endpoint, field: str) -> None:
    (response,) = post_all([(endpoint, {**base(endpoint), field: "x"})])
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


def test_a_name_of_any_form_stays_on_one_short_line() -> None:
    for response in post_all([("chat", {**base("chat"), name: 1}) for name in ("a\nb", 'a"b', "x" * 5000, "", "\ud800")]):
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        assert "\n" not in message
        assert len(message) < 400


def test_first_failing_field_is_the_tables_whatever_order_they_are_sent_in() -> None:
    shared = [("n", 2), ("stop", 5), ("logprobs", "x"), ("top_logprobs", 99)]
    later = [("frequency_penalty", 1), ("presence_penalty", 1), ("logit_bias", {"1": 1})]
    tails: dict[Endpoint, list[tuple[str, Any]]] = {
        "chat": [("response_format", {"type": "json_object"}), ("tool_choice", "required"), ("parallel_tool_calls", False)],
        "completions": [("best_of", 2), ("suffix", "x"), ("echo", True)],
    }
    bodies: list[tuple[Endpoint, dict[str, Any]]] = []
    names: list[str] = []
    for endpoint, tail in tails.items():
        order = [*shared, ("stream_options", {"include_usage": 1}), *later, *tail, ("unknown", 1)]
        for index, (name, _) in enumerate(order):
            bodies.append((endpoint, {**dict(reversed(order[index:])), **base(endpoint)}))
            names.append("stream_options.include_usage" if name == "stream_options" else name)
    for name, response in zip(names, post_all(bodies), strict=True):
        assert response.json()["error"]["param"] == name


def test_capability_decides_on_sampling() -> None:
    greedy = Capabilities("fake", "none", 1, 100, 256, per_request_sampling=False, per_request_top_k=False)
    for passing in ({}, {"temperature": 0}, {"temperature": 0, "top_p": 0.5, "top_k": 5}, {"top_p": 1, "top_k": 0}):
        check_fields(passing, "chat", greedy)

    async def run() -> None:
        async with in_process(fake(capabilities=greedy)) as client:
            for name, value in (("temperature", 1), ("top_p", 0.5), ("top_k", 5)):
                response = await client.post(PATHS["chat"], json=chat_body(**{name: value}))
                assert response.status_code == 400
                assert response.json()["error"]["param"] == name

    asyncio.run(run())


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1.5, "1.5"),
        ("a" * 100, '"' + "a" * 60 + '…"'),
        ({"type": "json_schema", "json_schema": {"a": 1}}, '{"type": "json_schema", "json_schema": {…}}'),
        ([[1], {}, "a", 1], '[[…], {}, "a", …]'),
        (10**400, "a very large number"),
        (object(), "a object"),
    ],
)
def test_values_are_shown_on_one_short_line(value: Any, text: str) -> None:
    assert summary(value) == text
