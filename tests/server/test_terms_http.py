"""Sampler terms over HTTP, on the real torch plane: what each does to an answer, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from pocketllm import EngineArgs
from pocketllm.generation import GenerationService
from tests.fake_serving import LiveServer, StartServer
from tests.server.tiny_model import CONTEXT, write_tiny_chat_model

A, B, C = (ord(letter) for letter in "ABC")


def complete(server: LiveServer, status: int = 200, **fields: Any) -> dict[str, Any]:
    response = httpx.post(server.url + "/v1/completions", json={"prompt": "Hello", "max_tokens": 8, "temperature": 0, **fields}, timeout=60)
    assert response.status_code == status, response.text
    answer: dict[str, Any] = response.json()
    return answer


def test_terms_act_and_are_refused_by_name(tmp_path: Path, start_server: StartServer) -> None:
    write_tiny_chat_model(tmp_path)
    args = EngineArgs(model=str(tmp_path), backend="torch", device="cpu", dtype="float32", max_model_len=CONTEXT, backend_options={"num_threads": 1})
    server = start_server(load=lambda progress: GenerationService.open(args, progress))

    def text(**fields: Any) -> str:
        return str(complete(server, **fields)["choices"][0]["text"])

    assert len(text(repetition_penalty=1e-40, temperature=1, seed=2)) > 0, "no logit is beyond a float32"
    only_a = {"logit_bias": {str(A): 100}}
    assert text(**only_a) == "A" * 8
    assert "A" not in text(**only_a, bad_words=["A"])
    assert "AA" not in text(**only_a, bad_words=["AA"])
    assert set(text(allowed_token_ids=[B, C], temperature=1.5, seed=1)) == {"B", "C"}
    assert set(text(allowed_token_ids=[B, C], frequency_penalty=2, max_tokens=64)) == {"B", "C"}
    assert text(temperature=1.5, min_p=1.0, seed=3) == text(), "the likeliest alone"
    ended = complete(server, **only_a, stop_token_ids=[A])
    assert (ended["choices"][0]["text"], ended["choices"][0]["finish_reason"]) == ("", "stop")
    late = complete(server, **only_a, stop_token_ids=[A], min_tokens=4)
    assert "A" not in late["choices"][0]["text"]
    assert (late["choices"][0]["finish_reason"], late["usage"]["completion_tokens"]) == ("stop", 5)
    eos = {str(json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"]): 100}
    assert complete(server, logit_bias=eos)["choices"][0]["finish_reason"] == "stop"
    assert complete(server, logit_bias=eos, ignore_eos=True)["choices"][0]["finish_reason"] == "length"
    assert text(priority=-7) == text(priority=7) == text()

    for fields, param in (
        ({"allowed_token_ids": [A], "bad_words": ["A"]}, "allowed_token_ids"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"stop_token_ids": [99999]}, "stop_token_ids"),
        ({"frequency_penalty": 2.5}, "frequency_penalty"),
        ({"min_p": -0.1}, "min_p"),
        ({"priority": 2**31}, "priority"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"65": 1, "065": 2}}, "logit_bias"),
        ({"bad_words": ["x" * 40_000]}, "bad_words"),
    ):
        error = complete(server, 400, **fields)["error"]
        assert error["param"] == param
        assert error["type"] == "invalid_request_error"
