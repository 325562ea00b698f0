"""Every field of the table, on each endpoint, at values that are acted on, that change nothing, and that are refused."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from pocketllm.backends.base import Capabilities
from pocketllm.backends.fake import FakeBackend
from pocketllm.errors import ConfigurationError, PocketLLMError, UnsupportedFeatureError
from pocketllm.protocol.features import GUIDE_FLAGS, SURFACES, VOCABULARY_FEATURES, Surface, features
from pocketllm.protocol.field import BOTH, PATHS, Endpoint
from pocketllm.protocol.fields import FIELDS, check_fields
from pocketllm.protocol.refusals import summary
from pocketllm.protocol.rules import RULES
from pocketllm.server.body import parse_json
from tests.fake_serving import chat_body, fake, in_process, qwen_like

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object", "properties": {"a": {"type": "boolean"}}}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def schema(**inner: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"schema": {"type": "object"}, **inner}}


@dataclass(frozen=True)
class With:
    """A value that means something only beside other fields."""

    value: Any
    others: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """Values of one field.

    Args:
        passing: pass on every server, on both surfaces: they name what any server does.
        needing: by feature, the values that pass only where it is there.
        refused: pass nowhere.
    """

    endpoints: tuple[Endpoint, ...]
    passing: list[Any]
    refused: list[Any]
    needing: dict[str, list[Any]] = field(default_factory=dict)


CHAT: tuple[Endpoint, ...] = ("chat",)
COMPLETIONS: tuple[Endpoint, ...] = ("completions",)
STREAM = {"stream": True}
CONTINUED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hel"}]
ROWS: list[tuple[str, Row]] = [
    (
        "n",
        Row(
            BOTH,
            [1, 1.0, With(2, {"temperature": 0}), With(128, {"temperature": 0.0, "max_tokens": 1})],
            [0, -1, 1.5, True, "1", [1], 129],
            {"per_request_sampling": [2, With(3.0, {"temperature": 1})]},
        ),
    ),
    ("stop", Row(BOTH, ["", [], [""], ["", ""], "a", ["a"], ["", "a", "é"]], [5, True, {}, [5], [None], [["a"]]])),
    ("logprobs", Row(CHAT, [False], [0, 1, "false", []], {"logprobs": [True], "streamed_logprobs": [With(True, STREAM)]})),
    ("logprobs", Row(COMPLETIONS, [], [21, True, False, -1, 1.5, "1"], {"logprobs": [0, 5, 20, 2.0], "streamed_logprobs": [With(0, STREAM)]})),
    (
        "top_logprobs",
        Row(
            CHAT,
            [0, 0.0, With(0, {"logprobs": False})],
            [1, 21, -1, True, "1", 1.5, With(2, {"logprobs": False})],
            {"logprobs": [With(20, {"logprobs": True})]},
        ),
    ),
    ("top_logprobs", Row(COMPLETIONS, [], [0, 1, "a", False])),
    (
        "stream_options",
        Row(
            BOTH,
            [
                {},
                {"include_usage": False},
                {"include_usage": True},
                {"include_usage": None, "other": None},
                {"include_obfuscation": False, "continuous_usage_stats": False},
                With({"include_usage": False}, STREAM),
            ],
            [5, True, [], "a", {"include_usage": 1}, {"include_usage": "yes"}, {"include_obfuscation": True}, {"continuous_usage_stats": True}, {"other": 1}],
            {"include_usage": [With({"include_usage": True}, STREAM)]},
        ),
    ),
    ("frequency_penalty", Row(BOTH, [0, 0.0, -0.0], [False, "0", [], 2.1], {"penalties": [0.1, -2]})),
    ("presence_penalty", Row(BOTH, [0, 0.0], [False, "0", -3], {"penalties": [2]})),
    ("repetition_penalty", Row(BOTH, [1, 1.0], [0, True, "1", 2.5], {"repetition_penalty": [1.1, 0.5]})),
    ("min_p", Row(BOTH, [0, 0.0], ["0", 1.1, False], {"min_p": [0.1]})),
    (
        "logit_bias",
        Row(
            BOTH,
            [{}],
            [5, "a", [1], [], {"AI": -100}, {"-1": 1}, {"1.5": 1}, {"": 1}, {"5": 1e9}, {"5": "1"}, {"5": True}, {"9" * 30: 1}],
            {"logit_bias": [{"5": 1}, {"5": -100, "6": 0.5}]},
        ),
    ),
    ("min_tokens", Row(BOTH, [0, 0.0], [False, -1, 1.5, "1"], {"min_tokens": [1]})),
    ("ignore_eos", Row(BOTH, [False], [0, 1, "true"], {"ignore_eos": [True]})),
    ("stop_token_ids", Row(BOTH, [[]], [1, [True], [1.5], [-1], ["1"], {}, ""], {"stop_token_ids": [[1], [2.0, 3]]})),
    ("allowed_token_ids", Row(BOTH, [], [1, [], [True], [1.5], [-1], ["1"], {}, ""], {"allowed_token_ids": [[1], [2.0, 3]]})),
    ("bad_words", Row(BOTH, [[]], [1, "a", [""], ["a", ""], [5], [["a"]], {}, ["a"] * 1001], {"bad_words": [["a"], ["a b", "é"]]})),
    ("priority", Row(BOTH, [0, 0.0], [True, "1", 1.5, [], 2**31, -(2**31) - 1], {"priority": [1, -5, 2**31 - 1, -(2**31)]})),
    ("max_tokens", Row(BOTH, [1, 2.0], [0, -1, 1.5, True, "1", [1], 1e300, 10**4300 - 1])),
    ("max_completion_tokens", Row(BOTH, [1, 2.0], [0, -1, 1.5, False, "1"])),
    ("temperature", Row(BOTH, [0, 0.0], [-0.1, True, "1", [], 2.1, 99, 10**400], {"per_request_sampling": [1, 0.5, 2]})),
    ("top_p", Row(BOTH, [1, 1.0, With(0.5, {"temperature": 0})], [0, 1.1, -1, True, "1"], {"per_request_sampling": [0.5]})),
    ("top_k", Row(BOTH, [-1, 0, With(5, {"temperature": 0})], [-2, 1.5, True, "1", 10**30, 2**31], {"per_request_top_k": [1, 40, 40.0]})),
    ("seed", Row(BOTH, [0, 1, 2.0, 2**63 - 1], [-1, 1.5, True, "1", 2**63])),
    ("stream", Row(BOTH, [True, False], [1, "true", 0, []])),
    (
        "response_format",
        Row(
            CHAT,
            [{"type": "text"}, {"type": "text", "json_schema": None}],
            [
                {},
                "text",
                5,
                [],
                {"type": []},
                {"type": "xml"},
                {"type": "text", "schema": {}},
                {"type": "json_object", "json_schema": {}},
                {"type": "json_schema"},
                {"type": "json_schema", "json_schema": None},
                {"type": "json_schema", "json_schema": {}},
                {"type": "json_schema", "json_schema": {"name": "n"}},
                {"type": "json_schema", "schema": {}},
                {"type": "json_schema", "json_schema": {"type": "object"}},
                schema(schema=True),
                schema(name=5),
                schema(strict="yes"),
                schema(description=[]),
                schema(extra=1),
            ],
            {"structured_outputs": [{"type": "json_object"}, SCHEMA, schema(strict=True, description="d", name=None)]},
        ),
    ),
    (
        "best_of",
        Row(
            COMPLETIONS,
            [1, 1.0],
            [0, True, "1", 1.5, 129, With(2, STREAM), With(1, {"n": 2, "temperature": 0})],
            {"best_of": [2, With(2, {"n": 2, "temperature": 0})]},
        ),
    ),
    (
        "structured_outputs",
        Row(
            BOTH,
            [],
            [
                5,
                "a",
                [],
                {},
                {"regex": 5},
                {"regex": "a", "choice": ["b"]},
                {"choice": []},
                {"choice": "ab"},
                {"choice": [5]},
                {"grammar": {}},
                {"json": 5},
                {"json_object": 1},
                {"json_object": False},
                {"structural_tag": "{}"},
                {"regex": "a", "whitespace_pattern": " "},
            ],
            {"answer_forms": [{"regex": "a|b"}, {"choice": ["a", "b"]}, {"json": {}}, {"json": "{}"}, {"json_object": True}, {"grammar": 'start: "a"'}]},
        ),
    ),
    ("suffix", Row(COMPLETIONS, [""], [5, [], With("a", {"echo": True})], {"suffix": ["a"]})),
    ("echo", Row(COMPLETIONS, [False], [0, "a", 1], {"prompt_logprobs": [True]})),
    ("prompt_logprobs", Row(BOTH, [], [21, True, False, -1, 1.5, "1", With(1, STREAM)], {"prompt_logprobs": [0, 5, 20, 2.0, With(1, {"max_tokens": 0})]})),
    (
        "tools",
        Row(
            CHAT,
            [[], [TOOL], [tool(description="d", parameters=None, strict=None), tool(name="A-1_b.c", strict=False)]],
            [
                5,
                "a",
                {},
                [5],
                [{}],
                [{"type": "function"}],
                [{"type": "custom", "custom": {"name": "f"}}],
                [{**TOOL, "cache": 1}],
                [tool(name="")],
                [tool(name="a b")],
                [tool(name="x" * 65)],
                [tool(name=None)],
                [tool(description=5)],
                [tool(parameters=[])],
                [tool(strict="yes")],
                [tool(extra=1)],
                [TOOL, TOOL],
                [tool(name=f"f{index}") for index in range(129)],
            ],
            {"strict_tools": [[tool(strict=True)]]},
        ),
    ),
    (
        "tool_choice",
        Row(
            CHAT,
            ["auto", With("auto", {"tools": [TOOL]})],
            [
                5,
                "",
                "any",
                [],
                "required",
                {"type": "function", "function": {"name": "f"}},
                With("required", {"tools": []}),
                With({"type": "function", "function": {"name": "g"}}, {"tools": [TOOL]}),
                With({"type": "function", "function": {}}, {"tools": [TOOL]}),
                With({"type": "function", "name": "f"}, {"tools": [TOOL]}),
                With({"type": "function", "function": {"name": "f", "x": 1}}, {"tools": [TOOL]}),
                With({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, {"tools": [TOOL]}),
                With({"type": "custom", "custom": {"name": "f"}}, {"tools": [TOOL]}),
            ],
            {
                "tool_choice": [
                    "none",
                    With("none", {"tools": [TOOL]}),
                    With("required", {"tools": [TOOL]}),
                    With({"type": "function", "function": {"name": "f"}}, {"tools": [TOOL]}),
                ]
            },
        ),
    ),
    ("parallel_tool_calls", Row(CHAT, [True], [1, 0, "true"], {"single_tool_call": [False, With(False, {"tools": [TOOL]})]})),
    (
        "prompt",
        Row(
            COMPLETIONS,
            ["a", ["a"], ["a", "b"], ["a"] * 128, With(["a", "b"], {"n": 64, "temperature": 0})],
            [
                [],
                {},
                5,
                True,
                ["a", 5],
                ["a", [5]],
                [[5], "a"],
                [[]],
                [[5], []],
                [-1],
                [1.5],
                [True],
                ["a"] * 129,
                [[1]] * 129,
                With(["a", "b"], {"n": 65, "temperature": 0}),
            ],
            {"token_id_prompts": [[5], [5.0, 6], [[5]], [[5, 6], [7]]]},
        ),
    ),
    ("thinking_mode", Row(CHAT, ["thinking", "chat"], ["on", True, 5, {}])),
    ("reasoning_effort", Row(CHAT, ["none", "minimal", "low", "medium", "high", "xhigh", "max"], ["lowest", 5, True, [], {}])),
    (
        "reasoning",
        Row(CHAT, [True, False, {}, {"effort": "low"}, {"effort": None}], ["low", 5, {"effort": "lowest"}, {"effort": []}, {"summary": "auto"}]),
    ),
    ("add_generation_prompt", Row(CHAT, [True, False], [1, "true", []])),
    (
        "chat_template_kwargs",
        Row(
            CHAT,
            [{}],
            [5, "a", [], {"a b": 1}, {"": 1}, {"_a": 1}, {"messages": []}, {"tools": None}, {"self": 1}, {"reasoning_effort": []}],
            {"template_options": [{"enable_thinking": False}, {"x": {"y": [1, None]}}, {"reasoning_effort": "low"}]},
        ),
    ),
    (
        "continue_final_message",
        Row(CHAT, [False], [0, "a", With(True, {"add_generation_prompt": True})], {"template_options": [With(True, {"messages": CONTINUED})]}),
    ),
    ("thinking_token_budget", Row(CHAT, [], [-1, 1.5, True, "1"], {"thinking_budget": [0, 5, 2.0]})),
    ("drop_thinking", Row(CHAT, [True, False], [1, "true"])),
    ("request_id", Row(CHAT, ["a", "A-1_2.3:4", "x" * 128], ["", "a b", "a/b", "é", "x" * 129, 5, "a\n", []])),
    *(
        (name, Row(BOTH, ["x", 5, {"a": [1]}, True], []))
        for name in ("user", "store", "metadata", "service_tier", "model", "prompt_cache_key", "safety_identifier", "verbosity", "prediction")
    ),
]
CASES = [(name, endpoint, row) for name, row in ROWS for endpoint in row.endpoints]

FLAGS = [option.name for option in dataclasses.fields(Capabilities) if option.type == "bool"]
EVERY_FLAG = Capabilities("fake", "none", 4, 1024, 256, **dict.fromkeys(FLAGS, True))
EVERYTHING = features(EVERY_FLAG, "full") | {rule.feature for rule in RULES if rule.feature is not None}


def base(endpoint: Endpoint) -> dict[str, Any]:
    return {"max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]} if endpoint == "chat" else {"max_tokens": 1, "prompt": "Hi"}


def body_of(name: str, value: Any, endpoint: Endpoint) -> dict[str, Any]:
    if isinstance(value, With):
        return {**base(endpoint), **value.others, name: value.value}
    return {**base(endpoint), name: value}


def post_all(bodies: list[tuple[Endpoint, dict[str, Any]]], surface: Surface = "full", backend: FakeBackend | None = None) -> list[httpx.Response]:
    async def run() -> list[httpx.Response]:
        async with in_process(backend, surface=surface) as client:
            return [await client.post(PATHS[endpoint], content=json.dumps(body).encode()) for endpoint, body in bodies]

    return asyncio.run(run())


def check_refusal(error: PocketLLMError, name: str) -> None:
    """The four parts, on one line: the field, its value, what happens instead, the remedy."""
    assert error.param is not None
    assert re.split(r"[.\[]", error.param)[0] == name
    assert error.message.startswith(f'"{error.param}" = ')
    assert " is not supported by this server: " in error.message
    assert "\n" not in error.message
    assert len(error.message) < 600
    assert ". " in error.message.partition(" is not supported by this server: ")[2]
    assert error.message.endswith(".")


@pytest.mark.parametrize(("name", "endpoint", "row"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_values_and_features(name: str, endpoint: Endpoint, row: Row) -> None:
    for value in [*row.passing, None]:
        for acted_on in (EVERYTHING, frozenset(), features(EVERY_FLAG, "guide"), None):
            check_fields(body_of(name, value, endpoint), endpoint, acted_on)
    for value in row.refused:
        for acted_on in (EVERYTHING, frozenset(), features(EVERY_FLAG, "guide"), None):
            with pytest.raises((ConfigurationError, UnsupportedFeatureError)) as caught:
                check_fields(body_of(name, value, endpoint), endpoint, acted_on)
            check_refusal(caught.value, name)
    for feature, values in row.needing.items():
        for value in values:
            body = body_of(name, value, endpoint)
            check_fields(body, endpoint, EVERYTHING)
            check_fields(body, endpoint, None)
            with pytest.raises(UnsupportedFeatureError) as refused:
                check_fields(body, endpoint, EVERYTHING - {feature})
            assert re.split(r"[.\[]", refused.value.param or "")[0] in (name, "logprobs")  # top_logprobs needs what logprobs needs
            check_refusal(refused.value, "logprobs" if name == "top_logprobs" else name)
            if feature not in GUIDE_FLAGS:
                with pytest.raises(UnsupportedFeatureError):
                    check_fields(body, endpoint, features(EVERY_FLAG, "guide"))
            else:
                check_fields(body, endpoint, features(EVERY_FLAG, "guide"))


@pytest.mark.parametrize("surface", SURFACES)
@pytest.mark.parametrize(("name", "endpoint", "row"), CASES, ids=lambda value: value if isinstance(value, str) else "")
def test_over_http(name: str, endpoint: Endpoint, row: Row, surface: Surface) -> None:
    backend = qwen_like() if name == "thinking_token_budget" else fake()
    acted_on = features(backend.capabilities, surface)
    values = [(value, True) for value in [*row.passing, None]] + [(value, False) for value in row.refused]
    values += [(value, feature in acted_on) for feature, several in row.needing.items() for value in several]
    if name == "prompt":
        values = [(value, passes) for value, passes in values if value is not None]
    responses = post_all([(endpoint, body_of(name, value, endpoint)) for value, _ in values], surface, backend)
    for (value, passes), response in zip(values, responses, strict=True):
        assert response.status_code == (200 if passes else 400), (value, response.text)
        if not passes:
            error = response.json()["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["type"] == "invalid_request_error"
            assert error["code"] is None
            assert re.split(r"[.\[]", error["param"])[0] in (name, "logprobs")


def test_every_field_rule_and_feature_is_covered_here() -> None:
    assert {(f.name, endpoint) for f in FIELDS for endpoint in f.endpoints} == {(name, endpoint) for name, endpoint, _ in CASES} | {("messages", "chat")}
    assert len({(f.name, endpoint) for f in FIELDS for endpoint in f.endpoints}) == sum(len(f.endpoints) for f in FIELDS)
    ruled = {(rule.field.partition(".")[0], endpoint) for rule in RULES for endpoint in rule.endpoints}
    for f in FIELDS:
        for endpoint in f.endpoints:
            assert ((f.name, endpoint) in ruled) == (f.group != "inert" and f.name != "messages"), f.name
    needed = {(rule.field.partition(".")[0], endpoint, rule.feature) for rule in RULES for endpoint in rule.endpoints if rule.feature is not None}
    shown = {(name, endpoint, feature) for name, endpoint, row in CASES for feature in row.needing}
    assert needed <= shown


def test_refused_fields_are_those_that_no_server_of_today_acts_on() -> None:
    today = features(EVERY_FLAG, "full", frozenset(VOCABULARY_FEATURES))
    for f in FIELDS:
        for endpoint in f.endpoints:
            lifts = {rule.feature for rule in RULES if rule.field == f.name and endpoint in rule.endpoints and rule.feature is not None}
            if f.group == "refused" and lifts:
                assert not lifts & today, f.name
            elif f.group == "implemented":
                assert lifts <= today, f.name


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


@pytest.mark.parametrize("surface", SURFACES)
def test_first_failing_field_is_the_tables_whatever_order_they_are_sent_in(surface: Surface) -> None:
    shared = [("n", 200), ("stop", 5), ("logprobs", "x"), ("top_logprobs", 99)]
    later = [("stream_options", {"include_usage": 1}), ("frequency_penalty", 1), ("presence_penalty", 1), ("logit_bias", {"1": 1}), ("response_format", 5)]
    tails: dict[Endpoint, list[tuple[str, Any]]] = {
        "chat": [("tool_choice", 5), ("parallel_tool_calls", 5)],
        "completions": [("best_of", 0), ("suffix", 5), ("echo", 5)],
    }
    bodies: list[tuple[Endpoint, dict[str, Any]]] = []
    names: list[str] = []
    for endpoint, tail in tails.items():
        order = [*shared, *(later if endpoint == "chat" else later[:-1]), *tail, ("unknown", 1)]
        for index, (name, _) in enumerate(order):
            bodies.append((endpoint, {**dict(reversed(order[index:])), **base(endpoint)}))
            names.append("stream_options.include_usage" if name == "stream_options" else name)
    for name, response in zip(names, post_all(bodies, surface), strict=True):
        assert response.json()["error"]["param"] == name


def test_shape_comes_before_capability_and_logprobs_before_their_stream() -> None:
    greedy = features(dataclasses.replace(EVERY_FLAG, per_request_sampling=False, logprobs=False), "full")
    for body, param, words in (
        ({"n": 2, "stop": 5}, "n", "no sampling of a choice's own"),
        ({"n": 200}, "n", "from 1 to 128"),
        ({"logprobs": True, "top_logprobs": 21, "stream": True}, "top_logprobs", "from 0 to 20"),
        ({"logprobs": True, "stream": True}, "logprobs", "this engine returns no log probabilities"),
        ({"stream_options": {"include_usage": 5}, "frequency_penalty": 9}, "stream_options.include_usage", "counts"),
        ({"frequency_penalty": 9, "logit_bias": {"a": 1}}, "frequency_penalty", "from -2 to 2"),
    ):
        with pytest.raises(PocketLLMError, match=words) as caught:
            check_fields(body, "chat", greedy)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [TOOL, tool(name="no name")], "tools[1].function.name"),
        ("tools", [TOOL, TOOL], "tools[1].function.name"),
        ("tools", [tool(parameters="{}")], "tools[0].function.parameters"),
        ("tools", [{"type": "custom"}], "tools[0].type"),
        ("logit_bias", {"5": 101}, "logit_bias.5"),
        ("stream_options", {"chunk": 1}, "stream_options.chunk"),
        ("response_format", schema(name=5), "response_format"),
    ],
)
def test_the_part_at_fault_is_named(field: str, value: Any, param: str) -> None:
    (response,) = post_all([("chat", {**base("chat"), field: value})])
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(("endpoint", "name"), [("chat", "messages"), ("completions", "prompt")])
def test_what_is_missing_is_called_missing(endpoint: Endpoint, name: str) -> None:
    for response in post_all([(endpoint, {"max_tokens": 1}), (endpoint, {"max_tokens": 1, name: None})]):
        assert response.status_code == 400
        assert response.json()["error"]["param"] == name
        assert response.json()["error"]["message"].startswith(f'"{name}" is missing: ')


def test_a_field_sent_twice_is_named() -> None:
    async def run() -> httpx.Response:
        async with in_process() as client:
            return await client.post(PATHS["completions"], content=b'{"prompt": "a", "n": 1, "n": 2}')

    response = asyncio.run(run())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "n"


def test_a_field_sent_twice_is_found_in_no_time_among_many() -> None:
    names = ", ".join(f'"k{number}": 0' for number in range(400_000))
    start = time.process_time()
    with pytest.raises(ConfigurationError, match='"k399999" is sent twice'):
        parse_json(f'{{{names}, "k399999": 1}}'.encode())
    assert time.process_time() - start < 10  # once hours, in which nothing else was answered


def test_a_large_body_is_understood_while_others_are_served() -> None:
    """The most that a body of 8 MiB can ask for: so many messages that each is little more than its own check."""

    async def run() -> None:
        body = json.dumps({"messages": [{"role": "user", "content": ""}] * 200_000, "n": 0}).encode()
        async with in_process() as client:
            request = asyncio.ensure_future(client.post(PATHS["chat"], content=body))
            turns = 0
            while not request.done():
                assert (await client.get("/alive")).status_code == 200
                turns += 1
                await asyncio.sleep(0.001)  # the client answers without a pause
            assert (await request).json()["error"]["param"] == "n"
            assert turns >= 3

    asyncio.run(run())


def test_capability_decides_on_sampling() -> None:
    greedy = Capabilities("fake", "none", 1, 100, 256, per_request_sampling=False, per_request_top_k=False)
    for passing in ({}, {"temperature": 0}, {"temperature": 0, "top_p": 0.5, "top_k": 5, "n": 3}, {"top_p": 1, "top_k": 0}):
        check_fields(passing, "chat", features(greedy, "full"))

    async def run() -> None:
        async with in_process(fake(capabilities=greedy)) as client:
            for name, value in (("temperature", 1), ("top_p", 0.5), ("top_k", 5), ("n", 2)):
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
