"""Health, models and metrics."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake_serving import call, chat_body, eventually, fake, in_process

CHAT = "/v1/chat/completions"


def samples(text: str) -> dict[str, float]:
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = "".join(f"{{{key}={value}}}" for key, value in sample.labels.items())
            found[sample.name + labels] = sample.value
    return found


@pytest.mark.parametrize(("path", "status"), [("/health", "ready"), ("/ready", "ready"), ("/alive", "alive")])
def test_health(path: str, status: str) -> None:
    response = call("GET", path)
    assert response.status_code == 200
    assert response.json()["status"] == status


def test_health_names_what_is_served() -> None:
    body = call("GET", "/health", fake(max_slots=3, context_length=99)).json()
    assert (body["model"], body["backend"], body["max_batch_size"], body["max_model_len"]) == ("fake-1", "fake", 3, 99)


def test_models() -> None:
    async def run() -> None:
        async with in_process(served_model_name="owner/name") as client:
            (listed,) = (await client.get("/v1/models")).json()["data"]
            assert listed["id"] == "owner/name"
            assert listed["object"] == "model"
            assert (await client.get("/v1/models/owner/name")).json() == listed
            missing = await client.get("/v1/models/other")
            assert missing.status_code == 404
            assert missing.json()["error"]["code"] == "model_not_found"
            assert (await client.post(CHAT, json=chat_body(model="anything"))).json()["model"] == "owner/name"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_callers_request_id_comes_back_on_every_answer(stream: bool) -> None:
    mine = {"X-Request-Id": "mine:1"}
    assert call("GET", "/health", headers=mine).headers["x-request-id"] == "mine:1"
    assert call("GET", "/no/such/path", headers=mine).headers.get_list("x-request-id") == ["mine:1"]
    assert call("POST", CHAT, json=chat_body(n=0), headers=mine).headers["x-request-id"] == "mine:1"
    assert call("POST", CHAT, json=chat_body(stream=stream, request_id="b"), headers=mine).headers.get_list("x-request-id") == ["mine:1"]
    for unusable in ("", "a b", "x" * 129):
        answer = call("POST", CHAT, json=chat_body(stream=stream, request_id="b"), headers={"X-Request-Id": unusable})
        assert answer.headers.get_list("x-request-id") == ["b"]


def test_metrics_are_there_at_zero() -> None:
    response = call("GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = samples(response.text)
    for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"):
        assert found[f"pocketllm_{name}_count"] == 0
        assert f"pocketllm_{name}_bucket{{le=+Inf}}" in found
    for outcome in ("stop", "length", "cancelled", "timeout", "error", "refused", "rejected"):
        assert found[f"pocketllm_requests_total{{outcome={outcome}}}"] == 0
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "generation_tokens_total", "prompt_tokens_total", "preemptions_total"):
        assert found[f"pocketllm_{name}"] == 0
    assert all(name.startswith("pocketllm_") for name in found)


def test_metrics_count_what_happened() -> None:
    async def run() -> dict[str, float]:
        async with in_process(fake(eos_after=5)) as client:
            await client.post(CHAT, json=chat_body(max_tokens=3))
            await client.post(CHAT, json=chat_body(max_tokens=9, stream=True))
            await client.post(CHAT, json=chat_body(n=0, user="\U0001f600"))
            await client.post(CHAT, content=b"{")
            return samples((await client.get("/metrics")).text)

    found = asyncio.run(run())
    assert found["pocketllm_requests_total{outcome=length}"] == 1
    assert found["pocketllm_requests_total{outcome=stop}"] == 1
    assert found["pocketllm_requests_total{outcome=refused}"] == 2
    assert found["pocketllm_generation_tokens_total"] == 3 + 6
    assert found["pocketllm_time_to_first_token_seconds_count"] == 2
    assert found["pocketllm_inter_token_latency_seconds_count"] == 2 + 4
    assert found["pocketllm_e2e_request_latency_seconds_count"] == 2


def test_gauges_show_running_and_waiting() -> None:
    async def run() -> dict[str, float]:
        backend = fake(max_slots=2, tokens_per_second=50)
        async with in_process(backend) as client:
            tasks = [asyncio.ensure_future(client.post(CHAT, json=chat_body(max_tokens=40))) for _ in range(3)]
            await eventually(lambda: backend.stats().running == 2 and backend.stats().waiting == 1)
            found = samples((await client.get("/metrics")).text)
            await asyncio.gather(*tasks)
            return found

    found = asyncio.run(run())
    assert found["pocketllm_num_requests_running"] == 2
    assert found["pocketllm_num_requests_waiting"] == 1
    assert found["pocketllm_kv_cache_usage_ratio"] == 1


def test_series_do_not_grow_with_what_clients_send() -> None:
    async def run() -> tuple[set[str], set[str]]:
        async with in_process() as client:
            before = set(samples((await client.get("/metrics")).text))
            for number in range(50):
                await client.get(f"/no/such/{number}")
                await client.post(CHAT, json=chat_body(model=f"model-{number}", request_id=f"id-{number}", max_tokens=1))
                await client.delete(f"/v1/requests/id-{number}")
            return before, set(samples((await client.get("/metrics")).text))

    before, after = asyncio.run(run())
    assert before == after


def test_documented_metrics_are_all_there_are() -> None:
    documented = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
    table = documented.partition("| Metric | Kind | Meaning |")[2].partition("\n\n")[0]
    kinds = {name: row.split(" | ")[1] for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split(" | ")[0])}
    found = {}
    for line in call("GET", "/metrics").text.splitlines():
        if line.startswith("# TYPE ") and "_created " not in line:
            _, _, name, kind = line.split()
            found[name.removeprefix("pocketllm_")] = kind
    assert found == kinds
