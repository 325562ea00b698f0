"""The real model held to sixty schemas: an answer that ends by itself parses and satisfies its schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pocketllm import LLM, EngineArgs, SamplingParams
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.outputs import GenerationOutput
from tests.conformance.json_schemas import SCHEMAS, response_format
from tests.grammar_sampling import validate

MAX_TOKENS = 96
LEAST_ENDED = 0.7  # of the answers; the others were cut off by their budget, as a small model's long strings are


@pytest.fixture(scope="module")
def llm(default_model: Path) -> Iterator[LLM]:
    model = LLM(EngineArgs(model=str(default_model), max_model_len=512, max_batch_size=8, backend_options={"num_threads": 1}))
    try:
        yield model
    finally:
        model.close()


def question(name: str) -> list[dict[str, str]]:
    return [
        {
            "role": "user",
            "content": f"Answer with one JSON value, as short as possible: {name}. Its JSON schema is {json.dumps(SCHEMAS[name], ensure_ascii=False)[:300]}",
        }
    ]


def answers(llm: LLM, temperature: float) -> dict[str, GenerationOutput]:
    """The answers to all schemas, which run together."""
    streams = {}
    for name, schema in SCHEMAS.items():
        sampling = SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=len(streams))
        streams[name] = llm.chat_stream(question(name), sampling, response_format=response_format(schema))
    return {name: stream.result() for name, stream in streams.items()}


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_satisfy_their_schemas(llm: LLM, temperature: float) -> None:
    ended = 0
    for name, output in answers(llm, temperature).items():
        assert output.finish_reason in ("stop", "length")
        if output.finish_reason == "stop":
            ended += 1
            validate(SCHEMAS[name], output.text)
    assert ended >= LEAST_ENDED * len(SCHEMAS)


def test_json_object(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "A JSON object with one key."}],
        SamplingParams(max_tokens=MAX_TOKENS, temperature=0),
        response_format={"type": "json_object"},
    )
    if output.finish_reason == "stop":
        assert isinstance(json.loads(output.text), dict)
    else:
        assert output.text.startswith("{")


@pytest.mark.parametrize("schema", [{"type": "string", "pattern": "foo**"}, {"not": {}}, {"type": "strin"}, {"allOf": [{"type": "string"}, {"type": "null"}]}])
def test_a_schema_that_is_refused_disturbs_no_other_answer(llm: LLM, schema: dict[str, object]) -> None:
    sampling = SamplingParams(max_tokens=24, temperature=0)
    alone = llm.generate("Once upon a time", sampling)[0].token_ids
    stream = llm.generate_stream("Once upon a time", sampling)
    with pytest.raises((ConfigurationError, UnsupportedFeatureError)) as raised:
        llm.chat([{"role": "user", "content": "Hi"}], sampling, response_format=response_format(schema))
    assert raised.value.param == "response_format"
    assert stream.result().token_ids == alone
