"""2,000 requests made of the description in openapi.yaml, right and wrong ones: no failure of the server, and every answer as described."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import jsonschema
import pytest
import schemathesis
import yaml
from schemathesis import checks
from schemathesis.specs.openapi import checks as openapi_checks

from pocketllm.protocol.fields import FIELDS
from pocketllm.server.app import ROUTES
from tests.fake_serving import LiveServer
from tests.fuzz.bodies import CHAT, COMPLETIONS, VALID

DESCRIPTION: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "openapi.yaml").read_text(encoding="utf-8"))
SCHEMAS: dict[str, Any] = DESCRIPTION["components"]["schemas"]
CHUNKS = {CHAT: "ChatChunk", COMPLETIONS: "CompletionChunk"}
EXAMPLES = {"chat": 700, "completions": 1200, "model": 60, "cancel": 60}  # with those of one request each, more than 2,000
CHECKS = [
    checks.not_a_server_error,
    openapi_checks.status_code_conformance,
    openapi_checks.content_type_conformance,
    openapi_checks.response_headers_conformance,
    openapi_checks.response_schema_conformance,
    openapi_checks.negative_data_rejection,
]

described = schemathesis.openapi.from_dict(DESCRIPTION)
described.config.generation.update(modes=list(schemathesis.GenerationMode))
described.config.max_stream_events = 1_000_000  # it would close a stream early


def conforms(body: Any, name: str) -> None:
    """`body` is an instance of the schema `name` of the description."""
    jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{name}", **DESCRIPTION}).validate(body)


def check_stream(path: str, text: str) -> None:
    """Every event is a chunk as described, or one error; [DONE] is the last."""
    events = [event for event in text.split("\n\n") if not event.startswith(":")]
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        body = json.loads(event.removeprefix("data: "))
        conforms(body, "Error" if "error" in body else CHUNKS[path])


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_description_has_every_field_of_the_table(endpoint: str) -> None:
    name = {"chat": "ChatRequest", "completions": "CompletionRequest"}[endpoint]
    described_fields = {*SCHEMAS["Sampling"]["properties"], *SCHEMAS[name]["properties"]}
    assert described_fields == {field.name for field in FIELDS if endpoint in field.endpoints}


def test_description_is_the_whole_surface() -> None:
    assert {route.path.replace(":path", "") for route in ROUTES} == set(DESCRIPTION["paths"])


def test_valid_bodies_are_described_and_their_answers_too(server: LiveServer) -> None:
    for path, body in VALID:
        conforms(body, {CHAT: "ChatRequest", COMPLETIONS: "CompletionRequest"}[path])
        response = httpx.post(server.url + path, json=body, timeout=30)
        if response.status_code != 200:
            conforms(response.json(), "Error")
        elif body.get("stream"):
            check_stream(path, response.text)
        else:
            conforms(response.json(), {CHAT: "ChatCompletion", COMPLETIONS: "Completion"}[path])


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("operation", [result.ok() for result in described.get_all_operations()], ids=lambda operation: operation.label)
def test_generated_requests(server: LiveServer, operation: Any) -> None:
    statuses: Counter[int] = Counter()
    wanted = EXAMPLES.get(operation.definition.raw["operationId"], 1)

    @hypothesis.settings(
        max_examples=wanted,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    @hypothesis.given(case=operation.as_strategy())
    def run(case: Any) -> None:
        response = case.call(base_url=server.url)
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.headers["content-type"][0].startswith("text/event-stream"):
            check_stream(operation.path, response.content.decode())

    run()
    print(operation.label, dict(statuses))
    assert sum(statuses.values()) >= wanted
    if wanted > 100:
        assert statuses[200] > wanted / 20
        assert statuses[400] > wanted / 5
    assert httpx.post(server.url + CHAT, json=VALID[0][1]).status_code == 200
    assert server.backend.stats().running == 0


@pytest.fixture(autouse=True)
def no_traceback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.exc_info and record.name.startswith("pocketllm")] == []
