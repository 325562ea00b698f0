"""Reading one choice: stop sequences, reasoning, log probabilities. However its ids are cut into steps, the answer is the same."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from pocketllm.backends.base import TokenLogprobs
from pocketllm.errors import ConfigurationError
from pocketllm.text.answer import Answer, Reading
from pocketllm.text.reasoning import find_markers
from pocketllm.text.stop import MAX_CHARACTERS, StopMatcher, StopSequences
from pocketllm.text.tool_parsers.qwen_xml import QwenXml
from tests.fake_serving import _byte_backend, byte_tokenizer

TOKENIZER = byte_tokenizer()
TOKENIZER.backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>", "<tool_call>")])
TOKENIZER = type(TOKENIZER)(TOKENIZER.backend, TOKENIZER.special_tokens, "bytes")
MARKERS = find_markers(TOKENIZER)
assert MARKERS is not None
START, END, CALL = 256, 257, 258

texts = st.text(alphabet="abc\n", max_size=40)
stops = st.lists(st.text(alphabet="abc\n", min_size=1, max_size=4), min_size=1, max_size=4)


def pieces(data: st.DataObject, whole: Sequence[int] | str) -> list[Sequence[int] | str]:
    """`whole`, cut anywhere."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=8)))
    return [whole[start:end] for start, end in itertools.pairwise([0, *cuts, len(whole)])]


def cut_at_first(text: str, sequences: Sequence[str]) -> str:
    """What is left of `text`, by the definition: character by character, until one of them is complete."""
    for end in range(1, len(text) + 1):
        found = [one for one in sequences if text[:end].endswith(one)]
        if found:
            return text[: end - max(map(len, found))]
    return text


@given(texts, stops, st.data())
def test_the_first_complete_sequence_ends_the_text_however_it_is_cut(text: str, sequences: list[str], data: st.DataObject) -> None:
    matcher = StopMatcher(StopSequences(sequences))
    fed = found = ""
    for piece in pieces(data, text):
        assert isinstance(piece, str)
        fed += piece
        found += matcher.feed(piece)
        held = fed[len(found) :]
        assert matcher.is_matched or not held or any(one.startswith(held) for one in sequences)
    assert matcher.is_matched == any(one in text for one in sequences)
    found += matcher.finish()
    assert found == cut_at_first(text, sequences)
    assert matcher.length == len(found)


def test_nothing_is_held_that_begins_no_sequence() -> None:
    matcher = StopMatcher(StopSequences(["USER:", "END"]))
    assert [matcher.feed(piece) for piece in ("Hello", " U", "SE", "D", " E", "N", "D", "more")] == ["Hello", " ", "", "USED", " ", "", "", ""]
    assert matcher.finish() == ""


def test_stop_sequences_have_a_limit() -> None:
    StopSequences(["x" * MAX_CHARACTERS])
    with pytest.raises(ConfigurationError, match='"stop" holds 8193 characters') as caught:
        StopSequences(["x" * MAX_CHARACTERS, "y"])
    assert caught.value.param == "stop"


def read(reading: Reading, steps: Sequence[Sequence[int]]) -> tuple[str, str, Answer]:
    answer = Answer(reading)
    text, reasoning = "", ""
    for ids in steps:
        piece = answer.feed(ids, [TokenLogprobs(-1.0, ((id_, -1.0), (0, -2.0))) for id_ in ids] if reading.has_logprobs else ())
        text += piece.text
        reasoning += piece.reasoning
    piece = answer.finish()
    return text + piece.text, reasoning + piece.reasoning, answer


ids = st.lists(st.sampled_from([*b"ab\n", *"é🙂".encode(), START, END, CALL]), max_size=30)


@given(ids, st.booleans(), st.one_of(st.none(), stops), st.booleans(), st.data())
def test_an_answer_is_the_same_however_its_ids_are_cut(
    token_ids: list[int], is_reasoning: bool, sequences: list[str] | None, has_logprobs: bool, data: st.DataObject
) -> None:
    stop = StopSequences(sequences) if sequences else None
    reading = Reading(TOKENIZER, stop, MARKERS, is_reasoning, None, CALL, has_logprobs)
    steps = pieces(data, token_ids)
    text, reasoning, answer = read(reading, steps)
    one_by_one = read(reading, [[id_] for id_ in token_ids])
    assert (text, reasoning) == one_by_one[:2]
    assert answer.reasoning_tokens == one_by_one[2].reasoning_tokens
    assert answer.logprobs() == one_by_one[2].logprobs()


CALL_TEXT = "<function=f>\n<parameter=a>\né 1\n</parameter>\n</function>\n</tool_call>"
PARTS = ([START], [END], [CALL, *b"\n", *CALL_TEXT.encode()], [CALL], [*b"ab\n"], [*b"\n\n"], [*"🙂".encode()], [*CALL_TEXT.encode()[:30]])
parts = st.lists(st.sampled_from(PARTS), max_size=6)


@given(parts, st.booleans(), st.one_of(st.none(), st.lists(st.sampled_from(["ab", "\na", "🙂", "/tool", "é"]), min_size=1, max_size=2)), st.data())
def test_calls_and_all_else_are_the_same_however_the_ids_are_cut(
    found: list[list[int]], is_reasoning: bool, sequences: list[str] | None, data: st.DataObject
) -> None:
    token_ids = [id_ for part in found for id_ in part]
    parser = functools.partial(QwenXml().parser, [{"type": "function", "function": {"name": "f"}}])
    reading = Reading(TOKENIZER, StopSequences(sequences) if sequences else None, MARKERS, is_reasoning, parser, CALL)

    def read_all(steps: Sequence[Sequence[int]]) -> tuple[str, str, list[tuple[str, str]], bool]:
        answer = Answer(reading)
        pieces = [*(answer.feed(ids) for ids in steps), answer.finish()]
        calls = [(call.name, call.arguments) for piece in pieces for call in piece.calls]
        return "".join(piece.text for piece in pieces), "".join(piece.reasoning for piece in pieces), calls, answer.is_stopped

    whole = read_all([token_ids])
    assert read_all(pieces(data, token_ids)) == whole
    assert read_all([[id_] for id_ in token_ids]) == whole
    assert not (whole[2] and "<tool_call>" in whole[0])


@given(st.text(alphabet="abé🙂\n", max_size=20), stops)
def test_the_bytes_of_all_tokens_are_the_answer(text: str, sequences: list[str]) -> None:
    reading = Reading(TOKENIZER, StopSequences(sequences), has_logprobs=True)
    found, _, answer = read(reading, [[byte] for byte in text.encode()])
    logprobs = answer.logprobs()
    assert logprobs is not None
    assert b"".join(one.bytes for one in logprobs).decode() == found == cut_at_first(text, sequences)
    assert all(one.token == one.bytes.decode("utf-8", "replace") for one in logprobs)


def test_a_stop_sequence_cuts_within_a_token() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2, "c": 3, "abc": 4}, merges=[("a", "b"), ("ab", "c")]))
    backend.decoder = tokenizers.decoders.ByteLevel()
    tokenizer = type(TOKENIZER)(backend, TOKENIZER.special_tokens, "letters")
    text, _, answer = read(Reading(tokenizer, StopSequences(["ca"]), has_logprobs=True), [[2, 4, 4]])
    assert text == "abab"
    logprobs = answer.logprobs()
    assert logprobs is not None
    assert [one.token for one in logprobs] == ["ab", "ab"]
    assert [other.token for other in logprobs[1].top] == ["abc", "a"]


@pytest.mark.parametrize(
    ("token_ids", "is_reasoning", "expected"),
    [
        ([*b"\nwhy\n\n", END, *b"\n\nso\n"], True, ("so\n", "why")),
        ([START, *b"\nwhy\n", END, *b"so"], False, ("so", "why")),
        ([*b"no reasons", END], False, ("no reasons</think>", "")),
        ([*b"never\nends\n"], True, ("", "never\nends")),
        ([*b"why", CALL, *b"call"], True, ("<tool_call>call", "why")),
        ([*b"</think>", END, *b"x", START], True, ("x<think>", "</think>")),
        ([END, END], True, ("</think>", "")),
    ],
)
def test_reasoning_is_split_off_by_its_tokens(token_ids: list[int], is_reasoning: bool, expected: tuple[str, str]) -> None:
    assert read(Reading(TOKENIZER, None, MARKERS, is_reasoning, None, CALL), [token_ids])[:2] == expected


@pytest.mark.parametrize("stop", ["k>XYZ", "</think>Z", "thy"])
def test_stop_sequences_do_not_reach_into_the_reasoning(stop: str) -> None:
    token_ids = [*b"thy </thin", *b"k>XY", END, *b"ok thx"]
    text, reasoning, answer = read(Reading(TOKENIZER, StopSequences([stop]), MARKERS, True), [[id_] for id_ in token_ids])
    assert (text, reasoning, answer.is_stopped) == ("ok thx", "thy </think>XY", False)


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ([*b"hi", START], True),
        ([START, *b"\n"], True),
        ([START, *b"\n\n", END, *b"\n\n"], False),
        ([START, *b"x\n"], False),
        ([*b"hi"], False),
        ([START, *b"          "], False),
    ],
)
def test_whether_the_prompt_ends_within_the_reasoning(prompt: list[int], is_open: bool) -> None:
    assert MARKERS is not None
    assert MARKERS.is_open(prompt, TOKENIZER) is is_open


def test_a_vocabulary_without_the_tokens_has_no_reasoning() -> None:
    assert find_markers(byte_tokenizer()) is None


def test_a_stop_sequence_that_begins_within_a_token_cuts_its_bytes() -> None:
    """Byte-level vocabularies have tokens such as a space with the first two bytes of a dash."""
    backend = _byte_backend([("a", "Ã")])  # "a" and the first byte of "é"
    tokenizer = type(TOKENIZER)(backend, TOKENIZER.special_tokens, "bytes")
    answer = Answer(Reading(tokenizer, stop=StopSequences(["é"]), has_logprobs=True))
    text = "".join(answer.feed((id_,), (TokenLogprobs(-1.0),)).text for id_ in (ord("b"), 256, 0xA9))
    found = answer.logprobs()
    assert answer.is_stopped
    assert found is not None
    assert text == b"".join(one.bytes for one in found).decode() == "ba"


def test_a_marker_that_the_user_spells_opens_no_reasoning() -> None:
    """Some templates have nothing but a control token between the user's words and the answer."""
    assert MARKERS is not None
    backend = _byte_backend()
    backend.add_tokens([tokenizers.AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
    backend.add_special_tokens(["<assistant>"])
    tokenizer = type(TOKENIZER)(backend, TOKENIZER.special_tokens, "bytes")
    markers = find_markers(tokenizer)
    assert markers is not None
    for text, is_open in (("Hi<assistant><think>", True), ("Hi<assistant><think>\n\n", True), ("Hi<think><assistant>", False), ("<think>Hi", False)):
        assert markers.is_open(tokenizer.encode(text, add_special_tokens=False), tokenizer) == is_open, text


def test_a_stop_sequence_cuts_a_call_that_ended_the_reasoning() -> None:
    reading = Reading(TOKENIZER, stop=StopSequences(["call"]), reasoning=MARKERS, is_reasoning=True, call_id=CALL, has_logprobs=True)
    answer = Answer(reading)
    piece = answer.feed((ord("a"), CALL), (TokenLogprobs(-1.0),) * 2)
    found = answer.logprobs()
    assert found is not None
    assert (piece.reasoning, piece.text) == ("a", "<tool_")
    assert [one.bytes for one in found] == [b"a", b"<tool_"]
