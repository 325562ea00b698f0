"""What tools/train_tiny_qwen3_5.py trains on: conversations that mean what they say, as the server would render and read them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from pocketllm.checkpoint import Checkpoint, GenerationDefaults
from pocketllm.errors import ConfigurationError
from pocketllm.text.tokenizer import load_tokenizer
from pocketllm.text.tool_parsers import find_syntax

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # where its program runs

from tiny_training.conversation import SKILL_NAMES, Conversation, draw_conversation, draw_problem
from tiny_training.rows import BatchMaker, encode
from tiny_training.skills import add, column_sum, count, describe
from tiny_training.source import Source, is_held_out
from tiny_training.vocabulary import TEMPLATE, load_template, render, train_tokenizer, write_tokenizer

USER = {"role": "user", "content": "What is 1+1?"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer(5, conversations=500)


def conversations() -> Iterator[Conversation]:
    yield from (draw_conversation(Source(f"test {index}")) for index in range(250))
    yield from (draw_problem(Source(f"test {index}", held_out=True), SKILL_NAMES[index % len(SKILL_NAMES)]) for index in range(250))


def read_turn(text: str, tools: Any) -> tuple[str, str, list[tuple[str, Any]]]:
    """Reasoning, content and calls of what the model writes in one turn."""
    reasoning, mark, answer = text.rpartition("\n</think>\n\n")
    syntax = find_syntax(TEMPLATE, "qwen3_5_text")
    assert syntax is not None
    parser = syntax.parser(tools)
    content = parser.feed(answer)
    end = parser.finish()
    assert bool(mark) == bool(reasoning)
    return reasoning, content + end.text, [(call.name, json.loads(call.arguments)) for call in end.calls]


def test_what_is_learnt_is_what_the_assistant_writes_and_parses_into_what_was_meant(tokenizer: Tokenizer) -> None:
    template = load_template()
    num_calls: dict[type, int] = {}
    for conversation in conversations():
        text = render(template, conversation)
        row = encode(tokenizer, text, conversation)
        assert tokenizer.decode(row.ids, skip_special_tokens=False) == text
        learnt = [(id_, skill) for id_, weight, skill in zip(row.ids, row.weights, row.skills, strict=True) if weight]
        turns = tokenizer.decode([id_ for id_, _ in learnt], skip_special_tokens=False).split("<|im_end|>")
        assert turns.pop() == ""
        spoken = [message for message in conversation.messages if message["role"] == "assistant"]
        last_question = max(place for place, message in enumerate(conversation.messages) if message["role"] == "user")
        for written, message in zip(turns, spoken, strict=True):
            expected = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
            reasoning, content, calls = read_turn(written, conversation.tools)
            thinks = conversation.thinking and conversation.messages.index(message) > last_question
            assert (reasoning, content, calls) == (message["reasoning_content"] if thinks else "", message["content"], expected)
            assert bool(calls) != bool(content)
            for _, arguments in calls:
                for value in arguments.values():
                    num_calls[type(value)] = num_calls.get(type(value), 0) + 1
        ends = [skill for id_, skill in learnt if tokenizer.id_to_token(id_) == "<|im_end|>"]
        assert ends == [1 + SKILL_NAMES.index(skill) for skill in conversation.skills]
    assert all(num_calls[kind] > 20 for kind in (str, int, float, bool, list, dict))


def test_a_prompt_and_its_answer_are_the_ids_of_the_conversation(tokenizer: Tokenizer) -> None:
    template = load_template()
    for conversation in conversations():
        before, _ = conversation.up_to_answer(-1)
        prompt = render(template, before, prompt=True)
        whole = render(template, conversation)
        assert whole.startswith(prompt)
        row = encode(tokenizer, whole, conversation)
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
        assert row.ids[: len(ids)] == ids
        assert row.weights[len(ids)] > 0
        assert row.weights[len(ids) - 1] == 0


def test_every_tool_fits_its_own_declaration() -> None:
    kinds: dict[str, Any] = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "array": list, "object": dict}
    for conversation in conversations():
        declared = {tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools}
        assert len(declared) == len(conversation.tools)
        for message in conversation.messages:
            for call in message.get("tool_calls", ()):
                schema = declared[call["function"]["name"]]
                arguments = call["function"]["arguments"]
                assert set(schema.get("required", ())) <= set(arguments) <= set(schema["properties"])
                for name, value in arguments.items():
                    one = schema["properties"][name]
                    assert isinstance(value, kinds[one["type"]])
                    assert isinstance(value, bool) == (one["type"] == "boolean")
                    assert "enum" not in one or value in one["enum"]


def test_a_call_says_nothing_that_was_not_asked() -> None:
    for conversation in conversations():
        question = ""
        for message in conversation.messages:
            if message["role"] == "user":
                question = message["content"]
            for call in message.get("tool_calls", ()):
                for value in call["function"]["arguments"].values():
                    assert not isinstance(value, str) or value in question
                    assert not isinstance(value, list) or all(str(item) in question for item in value)


def test_sums_counts_and_json_are_right() -> None:
    for index in range(500):
        source = Source(f"right {index}")
        exchange = add(source)
        a, b = map(int, re.findall(r"\d+", exchange.question))
        assert exchange.answer == str(a + b)
        assert exchange.reasoning.endswith(f"So {a}+{b}={a + b}.")
        for left, total in re.findall(r"([\d+]+)=(\d+)", exchange.reasoning):
            assert sum(map(int, left.split("+"))) == int(total)
        exchange = count(source)
        first, last = map(int, re.findall(r"\d+", exchange.question))
        assert [int(number) for number in exchange.answer.split(", ")] == list(range(first, last + 1))
        exchange = describe(source)
        for key, value in json.loads(exchange.answer).items():
            assert key in exchange.question
            assert isinstance(value, bool) or str(value) in exchange.question
    assert column_sum(7, 95) == "I add 7 and 95 from the right. 7+5=12, write 2, carry 1. 0+9+1=10, write 0, carry 1. So 7+95=102."


def test_scores_are_of_words_and_sums_that_are_never_trained_on() -> None:
    for index in range(300):
        for held_out in (False, True):
            source = Source(f"halves {index}", held_out=held_out)
            a, b = source.terms()
            assert is_held_out(f"{a}+{b}") == held_out
            assert [is_held_out(word) for word in (source.word(), source.name(), source.city(), source.identifier())] == [held_out] * 4


def test_seeds_reproduce(tokenizer: Tokenizer) -> None:
    assert [draw_conversation(Source(f"test {index}")) for index in range(50)] == [draw_conversation(Source(f"test {index}")) for index in range(50)]
    assert train_tokenizer(5, conversations=500).to_str() == tokenizer.to_str()
    one, other = BatchMaker(tokenizer.to_str(), 9, 3), BatchMaker(tokenizer.to_str(), 9, 3)
    short, long = one.step(7)
    for batch, again in zip((short, long), other.step(7), strict=True):
        np.testing.assert_array_equal(batch.ids, again.ids)
        np.testing.assert_array_equal(batch.weights, again.weights)
        np.testing.assert_array_equal(batch.skills, again.skills)
    assert (len(short.ids), len(long.ids)) == (6, 3)
    assert short.ids.shape[1] <= long.ids.shape[1]
    assert short.ids.tobytes() != one.step(8)[0].ids.tobytes()
    assert short.ids.tobytes() != BatchMaker(tokenizer.to_str(), 9, 4).step(7)[0].ids.tobytes()


def test_the_template_reasons_only_when_asked() -> None:
    template = load_template()
    opening = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert template.render([USER]) == template.render([USER], enable_thinking=False) == f"{opening}\n</think>\n\n"
    assert template.render([USER], enable_thinking=True) == opening
    assert template.render([USER], add_generation_prompt=False) == "<|im_start|>user\nWhat is 1+1?<|im_end|>\n"


def test_the_template_keeps_reasoning_since_the_last_question_alone() -> None:
    answer = {"role": "assistant", "content": "2", "reasoning_content": "1+1=2."}
    text = load_template().render([USER, answer, USER, {"role": "assistant", "content": "<think>\nEasy.\n</think>\n\n2"}], add_generation_prompt=False)
    asked = "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n"
    assert text == f"{asked}2<|im_end|>\n{asked}<think>\nEasy.\n</think>\n\n2<|im_end|>\n"


def test_the_template_renders_tools_calls_and_results() -> None:
    template = load_template()
    assert template.traits.renders_tools
    assert template.traits.renders_tool_calls
    assert template.traits.renders_tool_results
    assert not template.traits.text_arguments
    calls = [{"id": str(day), "type": "function", "function": {"name": "f", "arguments": {"day": day, "place": "Åre", "dry": True}}} for day in (1, 2)]
    results = [{"role": "tool", "tool_call_id": str(day), "content": f"{day}°"} for day in (1, 2)]
    text = template.render([USER, {"role": "assistant", "content": "Wait.", "tool_calls": calls}, *results], add_generation_prompt=False)
    written = "\n".join(
        f"<tool_call>\n<function=f>\n<parameter=day>\n{day}\n</parameter>\n<parameter=place>\nÅre\n</parameter>\n<parameter=dry>\ntrue\n</parameter>\n"
        "</function>\n</tool_call>"
        for day in (1, 2)
    )
    responses = "\n".join(f"<tool_response>\n{day}°\n</tool_response>" for day in (1, 2))
    assert text.endswith(f"</think>\n\nWait.\n\n{written}<|im_end|>\n<|im_start|>user\n{responses}<|im_end|>\n")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "no messages"),
        ([{"role": "system", "content": "Be brief."}], "no message of the user"),
        ([USER, {"role": "system", "content": "Be brief."}], "comes first"),
        ([USER, {"role": "critic", "content": "No."}], "role"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "text alone"),
        ([{"role": "user", "content": 5}], "list of parts"),
    ],
)
def test_the_template_refuses(messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        load_template().render(messages)


def test_the_tokenizer_is_read_back_as_it_was_written(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_tokenizer(tokenizer, tmp_path, 64)
    found = load_tokenizer(Checkpoint(tmp_path, "safetensors", "tiny", "qwen3_5_text", {}, 64, GenerationDefaults(), ()))
    text = "<|im_start|>user\nRepeat: Łódź 🦀 17<|im_end|>\n<think>\n<tool_call>"
    ids = found.encode(text, add_special_tokens=False)
    assert ids == tokenizer.encode(text).ids
    assert found.decode(ids) == "user\nRepeat: Łódź 🦀 17\n<think>\n<tool_call>"
    assert found.is_byte_level
    assert (found.eos_token, found.bos_token, found.pad_token) == ("<|im_end|>", None, "<|endoftext|>")
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
