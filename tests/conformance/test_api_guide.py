"""The code of the API guide as it is written there; only model, sizes and threads are adapted."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pocketllm import LLM, AsyncLLM, EngineArgs, SamplingParams
from pocketllm.errors import ConfigurationError, PocketLLMError, RequestCancelledError, UnsupportedFeatureError

tensor_parallel_size = 1
max_model_len = 512
backend_options = {"num_threads": 1}


@pytest.fixture(scope="module")
def llm(default_model: Path) -> Iterator[LLM]:
    llm = LLM(
        EngineArgs(
            model=str(default_model),
            backend="auto",  # or "torch" / "cpp"
            tensor_parallel_size=tensor_parallel_size,
            max_model_len=max_model_len,
            backend_options=backend_options,
        )
    )
    yield llm
    llm.close()


def test_generate(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    outputs = llm.generate(
        ["Explain speculative decoding.", "Explain continuous batching."],
        SamplingParams(max_tokens=128, temperature=0.0),
    )
    for output in outputs:
        print(output.text, output.usage.as_dict())

    assert len(outputs) == 2
    printed = capsys.readouterr().out
    for output in outputs:
        assert output.text
        assert 0 < output.usage.completion_tokens <= 128
        assert output.finish_reason == ("length" if output.usage.completion_tokens == 128 else "stop")
        assert output.usage.as_dict() == {
            "prompt_tokens": output.usage.prompt_tokens,
            "completion_tokens": output.usage.completion_tokens,
            "total_tokens": output.usage.prompt_tokens + output.usage.completion_tokens,
        }
        assert f"{output.text} {output.usage.as_dict()}" in printed


def test_token_ids(llm: LLM) -> None:
    outputs = llm.generate([[1, 42, 17]], SamplingParams(max_tokens=16))
    assert len(outputs) == 1
    assert outputs[0].usage.prompt_tokens == 3
    assert 0 < outputs[0].usage.completion_tokens <= 16


def test_chat(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": "Answer concisely."},
        {"role": "user", "content": "What is 2+2?"},
    ]
    before = copy.deepcopy(messages)
    outputs = llm.chat(
        messages,
        SamplingParams(max_tokens=32, temperature=0.0),
        reasoning_effort="low",
    )
    print(outputs[0].text)
    assert len(outputs) == 1
    assert "4" in outputs[0].text
    assert messages == before


def test_streams_join_to_the_answer(llm: LLM) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.0)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for events, whole in (
        (list(llm.generate_stream("Two and two make", params)), llm.generate("Two and two make", params)[0]),
        (list(llm.chat_stream(messages, params)), llm.chat(messages, params)[0]),
    ):
        assert "".join(event.text for event in events) == whole.text
        assert tuple(id_ for event in events for id_ in event.token_ids) == whole.token_ids
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1].finish_reason == whole.finish_reason
        assert events[-1].usage is not None
        assert events[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_cancel(llm: LLM) -> None:
    stream = llm.chat_stream([{"role": "user", "content": "Tell me a very long story about a river."}], SamplingParams(temperature=0.0), request_id="story")
    next(stream)
    assert llm.cancel("story")
    with pytest.raises(RequestCancelledError):
        list(stream)
    assert not llm.cancel("story")
    assert not llm.cancel("unknown")


def test_async(default_model: Path, llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    async def main() -> tuple[Any, Any]:
        async with AsyncLLM(EngineArgs(model=str(default_model), max_model_len=128, backend_options=backend_options)) as llm:
            result = (await llm.generate("Hello", SamplingParams(max_tokens=32)))[0]
            async for event in llm.generate_stream("Stream this"):
                print(event.text, end="", flush=True)

            chat_result = (
                await llm.chat(
                    [{"role": "user", "content": "Explain KV caching."}],
                    SamplingParams(max_tokens=32),
                )
            )[0]
            print(chat_result.text)
            async for event in llm.chat_stream(
                [{"role": "user", "content": "Stream a short answer."}],
            ):
                print(event.text, end="", flush=True)
            return result, chat_result

    result, chat_result = asyncio.run(main())
    assert 0 < result.usage.completion_tokens <= 32
    assert chat_result.text
    assert chat_result.text in capsys.readouterr().out


def test_from_env(default_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_MODEL", str(default_model))
    monkeypatch.setenv("POCKETLLM_MAX_MODEL_LEN", "64")
    monkeypatch.setenv("POCKETLLM_BACKEND_OPTIONS", '{"num_threads": 1}')
    with LLM(EngineArgs.from_env()) as llm:
        assert llm.capabilities.context_length == 64
        assert llm.generate("Hello", SamplingParams(max_tokens=2, temperature=0.0))[0].usage.completion_tokens <= 2


@pytest.mark.parametrize(
    ("options", "param", "error"),
    [
        ({"max_model_length": 64}, "max_model_length", ConfigurationError),
        ({"max_model_len": 10**6}, "max_model_len", ConfigurationError),
        ({"backend_options": {"threads": 1}}, "backend_options", ConfigurationError),
        ({"backend": "cuda"}, "backend", ConfigurationError),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size", ConfigurationError),
        ({"backend": "cpp"}, "backend", UnsupportedFeatureError),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size", UnsupportedFeatureError),
        ({"speculative_method": "mtp"}, "speculative_method", UnsupportedFeatureError),
        ({"device": "npu"}, "device", UnsupportedFeatureError),
    ],
)
def test_wrong_options_are_named_before_anything_loads(default_model: Path, options: dict[str, Any], param: str, error: type[PocketLLMError]) -> None:
    with pytest.raises(error) as caught:
        LLM(EngineArgs(model=str(default_model), **options))
    assert caught.value.param == param
    assert "\n" not in caught.value.message


def test_wrong_requests_leave_the_engine_well(llm: LLM) -> None:
    with pytest.raises(ConfigurationError, match="max_tokens"):
        llm.generate("Hello", SamplingParams(max_tokens=max_model_len))
    with pytest.raises(PocketLLMError) as caught:
        llm.chat([{"role": "user", "content": "Hi"}], reasoning_efort="low")
    assert caught.value.param == "reasoning_efort"
    with pytest.raises(ConfigurationError):
        llm.chat([{"role": "nobody", "content": "Hi"}])
    assert llm.generate("Hello", SamplingParams(max_tokens=1))[0].usage.completion_tokens == 1
