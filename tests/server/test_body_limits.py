"""Bodies that are within every limit of size and still hostile."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from tests.fake_serving import call, in_process, qwen_like

CHAT = "/v1/chat/completions"


def test_key_that_is_sent_twice_among_very_many_is_found_at_once() -> None:
    keys = ", ".join(f'"k{number}": 0' for number in range(200_000))
    began = time.process_time()
    response = call("POST", CHAT, content=f'{{{keys}, "k199999": 1}}'.encode())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "k199999"
    assert time.process_time() - began < 10  # a search that is quadratic takes minutes


@pytest.mark.parametrize("number", ["1e400", "-1e400", "1" + "0" * 400 + ".5"])
def test_number_beyond_a_double_is_no_failure_wherever_it_stands(number: str) -> None:
    """Python reads it as an infinity."""
    schemas = [f'{{"{key}": {number}}}' for key in ("maxLength", "minLength", "minimum", "maximum", "multipleOf", "const", "maxItems", "default")]
    schemas += [f'{{"type": "string", "{key}": {number}}}' for key in ("maxLength", "minLength")] + [f'{{"enum": [{number}]}}']
    fields = [f'"temperature": {number}', f'"seed": {number}', f'"metadata": {{"a": [{number}]}}', f'"logit_bias": {{"1": {number}}}']
    for schema in schemas:
        parameters = f'{{"type": "object", "properties": {{"a": {schema}}}, "minProperties": {number}}}'
        fields.append(f'"tools": [{{"type": "function", "function": {{"name": "f", "strict": true, "parameters": {parameters}}}}}], "tool_choice": "required"')
        fields.append(f'"response_format": {{"type": "json_schema", "json_schema": {{"name": "a", "schema": {schema}}}}}')

    async def run() -> None:
        async with in_process(qwen_like()) as client:
            for field in fields:
                response = await client.post(CHAT, content=f'{{"messages": [{{"role": "user", "content": "Hi"}}], "max_tokens": 4, {field}}}'.encode())
                assert response.status_code in (200, 400), field
                json.loads(response.content, parse_constant=pytest.fail)

    asyncio.run(run())
