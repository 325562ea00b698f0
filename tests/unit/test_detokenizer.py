"""Streamed text is the one-shot decode, however the ids are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.detokenizer import Detokenizer
from pocketllm.text.special_tokens import SpecialTokens
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer

CUTS = st.lists(st.integers(0, 4), min_size=1, max_size=20)


@pytest.fixture(scope="module")
def smollm(default_model):
    return load_tokenizer(open_checkpoint(default_model))


@pytest.fixture(scope="module")
def bytes_and_words():
    """A vocabulary as SentencePiece models have it: bytes as <0xNN>, words that begin with a mark for the space."""
    words = ["<unk>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b", "▁▁", "é", "�", "<tag>"]
    backend = Backend(models.BPE(vocab={word: id_ for id_, word in enumerate(words)}, merges=[], byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    backend.add_tokens([AddedToken("<tag>", special=False)])
    return Tokenizer(backend, SpecialTokens(), "test")


def stream(tokenizer, ids, cuts):
    detokenizer, texts, start, turn = Detokenizer(tokenizer), [], 0, 0
    while start < len(ids):
        size = cuts[turn % len(cuts)] if any(cuts) else 1
        texts.append(detokenizer.step(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return texts, detokenizer.finish()


def byte_heavy_ids(tokenizer):
    """Ids of text outside ASCII, cut and shuffled, so that broken UTF-8 is common."""
    ids = tokenizer.encode("🦀é漢字🇫🇷\u200d ñ ق " + "".join(map(chr, range(0x80, 0x180))), add_special_tokens=False)
    return sorted(set(ids))


@settings(max_examples=300, deadline=None)
@given(data=st.data(), cuts=CUTS)
def test_random_ids_of_the_default_model(smollm, data, cuts):
    some = st.one_of(st.integers(0, smollm.vocab_size + 50), st.sampled_from(byte_heavy_ids(smollm)), st.sampled_from([0, 1, 2, 3]))
    ids = data.draw(st.lists(some, max_size=40))
    texts, tail = stream(smollm, ids, cuts)
    assert "".join(texts) + tail == smollm.decode(ids, skip_special_tokens=True)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=40), cuts=CUTS)
def test_any_text_streams_whole(smollm, text, cuts):
    ids = smollm.encode(text, add_special_tokens=False)
    texts, tail = stream(smollm, ids, cuts)
    assert "".join(texts) + tail == smollm.decode(ids)


@settings(max_examples=500, deadline=None)
@given(ids=st.lists(st.one_of(st.integers(0, 270), st.integers(256, 266), st.integers(0x80 + 2, 0xFF + 2)), max_size=30), cuts=CUTS)
def test_random_ids_of_a_byte_fallback_vocabulary(bytes_and_words, ids, cuts):
    texts, tail = stream(bytes_and_words, ids, cuts)
    assert "".join(texts) + tail == bytes_and_words.decode(ids)


def test_an_incomplete_character_is_held_and_a_complete_one_is_not(smollm):
    ids = smollm.encode("a🦀", add_special_tokens=False)
    assert len(ids) == 4
    detokenizer = Detokenizer(smollm)
    assert [detokenizer.step([id_]) for id_ in ids] == ["a", "", "", "🦀"]
    assert detokenizer.finish() == ""


def test_an_answer_that_ends_inside_a_character_ends_with_a_replacement(smollm):
    ids = smollm.encode("a🦀", add_special_tokens=False)[:-1]
    detokenizer = Detokenizer(smollm)
    assert detokenizer.step(ids) == "a"
    assert detokenizer.finish() == "�"
    assert smollm.decode(ids) == "a�"


def test_spaces_between_words_survive_single_steps(bytes_and_words):
    a, b = bytes_and_words.backend.token_to_id("▁a"), bytes_and_words.backend.token_to_id("b")
    texts, tail = stream(bytes_and_words, [a, a, b, a], [1])
    assert ([*texts], tail) == (["a", " a", "b", " a"], "")
