"""A tool's round trip with DeepSeek-V4's encoding through /v1/chat/completions: scripted text, then a small real model."""

# ruff: noqa: RUF001 (the bars of the control tokens are full-width ones)

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
from tiny_deepseek_v4 import write_tiny

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.fake import FakeBackend
from pocketllm.checkpoint import GenerationDefaults
from pocketllm.config import EngineArgs, ServerArgs
from pocketllm.generation import GenerationService
from pocketllm.server.app import create_app
from pocketllm.text.deepseek_v4 import DeepseekV4Prompt
from tests.fake_serving import byte_tokenizer, qwen_tokenizer

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}, "days": {"type": "integer", "enum": [3, 12]}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CALL = (
    '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="get_weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
)
Post = Callable[[dict[str, Any]], Any]


def conversation(load: Callable[[Any], GenerationService], talk: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def run() -> Any:
        app = create_app(ServerArgs(), load)
        async with app.router.lifespan_context(app), httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test", timeout=120) as client:
            await asyncio.wait_for(app.state.server.loaded.wait(), 60)
            return await talk(client)

    return asyncio.run(run())


async def chat(client: httpx.AsyncClient, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    answer = await client.post("/v1/chat/completions", json={"messages": messages, "tools": [TOOL], "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


async def round_trip(client: httpx.AsyncClient, max_tokens: int = 8, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice with a call, and the one after its result, of at most `max_tokens`."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    first = await chat(client, messages, max_tokens=600, **fields)
    (call,) = first["message"]["tool_calls"]
    messages += [first["message"], {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    return first, await chat(client, messages, max_tokens=max_tokens)


def test_with_scripted_text() -> None:
    prompts: list[str] = []

    def answer(request: EngineRequest) -> list[int]:
        prompts.append(bytes(request.prompt_token_ids).decode())
        return list((CALL if len(prompts) == 1 else "It is sunny in Paris.").encode())

    def load(progress: Any) -> GenerationService:
        backend = FakeBackend(context_length=8192, answers=answer)
        backend.load(progress)
        return GenerationService(backend, byte_tokenizer(), DeepseekV4Prompt(), GenerationDefaults(), model_name="v4", model_type="deepseek_v4")

    first, second = conversation(load, lambda client: round_trip(client, max_tokens=600))
    (call,) = first["message"]["tool_calls"]
    assert first["finish_reason"] == "tool_calls"
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_weather", {"city": "Paris", "days": 3})
    assert (second["message"]["content"], second["finish_reason"]) == ("It is sunny in Paris.", "stop")
    assert "tool_calls" not in second["message"] or not second["message"]["tool_calls"]
    # What was asked stands in the second prompt as the first one had it, then the call as it was made, and its result.
    assert prompts[1].startswith(prompts[0])
    assert prompts[1][len(prompts[0]) :].endswith(f"{CALL}<｜end▁of▁sentence｜><｜User｜><tool_result>sunny</tool_result><｜Assistant｜></think>")


def test_with_a_real_model(tmp_path: Path) -> None:
    """Random weights say nothing by themselves: a call is demanded, so that the grammar of the syntax holds the answer."""
    tokenizer = qwen_tokenizer()
    write_tiny(tmp_path, vocab_size=tokenizer.vocab_size, max_position_embeddings=4096)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": tokenizer.vocab_size - 1}), encoding="utf-8")
    args = EngineArgs(model=str(tmp_path), backend="torch", device="cpu", dtype="float32", backend_options={"num_threads": 1})
    first, second = conversation(
        lambda progress: GenerationService.open(args, progress),
        lambda client: round_trip(client, tool_choice="required", parallel_tool_calls=False),
    )
    (call,) = first["message"]["tool_calls"]
    assert first["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    arguments = json.loads(call["function"]["arguments"])
    assert arguments["city"] in ("Paris", "Rome")
    assert arguments["days"] in (3, 12)
    assert second["finish_reason"] in ("stop", "length")
