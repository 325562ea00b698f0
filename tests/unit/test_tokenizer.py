"""Tokenizers from a GGUF's vocabulary and from tokenizer.json."""

from __future__ import annotations

import json
import re
import threading
import time

import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.text.tokenizer import load_tokenizer


def tokenizer_of(path, override=None):
    return load_tokenizer(open_checkpoint(path), override)


def test_known_ids_of_the_default_model(default_model):
    tokenizer = tokenizer_of(default_model)
    ids = [504, 3575, 282, 4649, 314, 7042, 30]
    assert tokenizer.encode("The capital of France is Paris.", add_special_tokens=True) == ids
    assert tokenizer.decode([*ids, 2]) == "The capital of France is Paris."
    assert tokenizer.decode([*ids, 2], skip_special_tokens=False).endswith("<|im_end|>")
    assert tokenizer.encode("<|im_start|>12", add_special_tokens=False) == [1, 33, 34]
    assert (tokenizer.vocab_size, tokenizer.kind) == (49152, "gpt2/smollm")
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token, tokenizer.pad_token) == ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_end|>")


@pytest.mark.parametrize("text", ["", " ", "héllo\r\n\t 123 …", "🦀🇫🇷 e\u0301", "\0\x7f", "<|im_end|>x"])
def test_text_survives_a_round_trip(write_gguf, text):
    for pre in ("smollm", "llama-bpe", "default"):
        tokenizer = tokenizer_of(write_gguf(tokenizer__ggml__pre=pre))
        assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False), skip_special_tokens=False) == text


def test_qwen2_composes_characters(write_gguf):
    tokenizer = tokenizer_of(write_gguf(tokenizer__ggml__pre="qwen2"))
    assert tokenizer.decode(tokenizer.encode("e\u0301", add_special_tokens=False)) == "é"


def pieces(tokenizer, text):
    return [text[start:end] for _, (start, end) in tokenizer.backend.pre_tokenizer.pre_tokenize_str(text)]


def test_each_pre_tokenizer_cuts_as_its_models_were_trained(write_gguf):
    text = "I'm 12345 x!!\n\nDon't"
    cut = {pre: pieces(tokenizer_of(write_gguf(tokenizer__ggml__pre=pre)), text) for pre in ("smollm", "qwen2", "llama-bpe", "default")}
    assert cut["smollm"] == ["I", "'m", " ", "1", "2", "3", "4", "5", " x", "!!", "\n", "\n", "Don", "'t"]
    assert cut["qwen2"] == ["I", "'m", " ", "1", "2", "3", "4", "5", " x", "!!\n\n", "Don", "'t"]
    assert cut["llama-bpe"] == ["I", "'m", " ", "123", "45", " x", "!!\n\n", "Don", "'t"]
    assert cut["default"] == ["I", "'", "m", " ", "123", "45", " x", "!!", "\n", "\n", "Don", "'", "t"]


@pytest.mark.parametrize(
    ("pre", "text", "expected"),
    [
        ("qwen35", "न\u093eम 12", ["न\u093eम", " ", "1", "2"]),  # a vowel sign belongs to its letter
        ("qwen2", "न\u093eम 12", ["न", "\u093eम", " ", "1", "2"]),
        ("deepseek-v3", "a 1234 日本語です x=(y)", ["a", " ", "123", "4", " ", "日本語です", " x", "=(", "y", ")"]),
        ("deepseek-coder", "a b\n12", ["a", " b", "\n", "1", "2"]),
        ("glm4", "I'M 12345", ["I", "'M", " ", "123", "45"]),
        ("minimax-m2", "HTTPServer's 12345//\n", ["HTTPServer's", " ", "123", "45", "//\n"]),
        ("gpt-4o", "camelCase DON'T", ["camel", "Case", " DON'T"]),
        ("tekken", "camelCase it's 12", ["camel", "Case", " it", "'s", " ", "1", "2"]),
        ("gpt-2", "it's 123!!", ["it", "'s", " 123", "!!"]),
        ("command-r", "it's 12", ["it", "'s", " ", "1", "2"]),
    ],
)
def test_pieces_of_each_family(write_gguf, pre, text, expected):
    assert pieces(tokenizer_of(write_gguf(tokenizer__ggml__pre=pre)), text) == expected


SENTENCEPIECE = {
    "tokenizer__ggml__model": "llama",
    "tokenizer__ggml__merges": None,
    "tokenizer__ggml__tokens": ["<unk>", "<s>", "</s>", "<0xC3>", "<0xA9>", "▁", "▁▁", "a", "b", "c", "ab", "bc", "▁a", "<u>", "▁▁▁", "un"],
    "tokenizer__ggml__token_type": [2, 3, 3, 6, 6, 1, 1, 1, 1, 1, 1, 1, 1, 4, 1, 1],
    "tokenizer__ggml__scores": [0.0, 0.0, 0.0, 0.0, 0.0, -1e9, -1e9, -20.0, -21.0, -22.0, -5.0, -4.0, -6.0, 0.0, -1e9, -7.0],
    "tokenizer__ggml__unknown_token_id": 0,
}


def test_sentencepiece_merges_the_best_pair_first(write_gguf):
    tokenizer = tokenizer_of(write_gguf(**SENTENCEPIECE))
    assert (tokenizer.kind, tokenizer.vocab_size) == ("llama", 16)

    def spelled(text, special=False):
        return [tokenizer.token(id_) for id_ in tokenizer.encode(text, add_special_tokens=special)]

    assert spelled("abc") == ["▁a", "bc"]  # bc before ab
    assert spelled("abc", special=True) == ["<s>", "▁a", "bc"]
    assert spelled("   ") == ["▁▁▁", "▁"]  # the leftmost grows first where scores are equal
    assert spelled("aé") == ["▁a", "<0xC3>", "<0xA9>"]
    assert spelled("a<u>a</s>") == ["▁a", "<u>", "▁a", "</s>"]
    assert spelled("") == []
    assert tokenizer.decode(tokenizer.encode("a <u>é  b", add_special_tokens=True)) == "a <u> é  b"
    assert tokenizer.is_special(0)
    assert not tokenizer.is_special(13)
    assert [tokenizer.token_bytes(id_) for id_ in (3, 12, 2)] == [b"\xc3", b" a", b""]


def test_sentencepiece_without_a_space_prefix(write_gguf):
    path = write_gguf(**SENTENCEPIECE, tokenizer__ggml__add_space_prefix=False, tokenizer__ggml__add_bos_token=False, tokenizer__ggml__add_eos_token=True)
    tokenizer = tokenizer_of(path)
    ids = tokenizer.encode("ab a", add_special_tokens=True)
    assert [tokenizer.token(id_) for id_ in ids] == ["ab", "▁a", "</s>"]
    assert tokenizer.decode(tokenizer.encode(" a", add_special_tokens=False)) == " a"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer__ggml__scores": None}, "tokenizer.ggml.scores"),
        ({"tokenizer__ggml__scores": [0.0]}, "tokenizer.ggml.scores"),
        ({"tokenizer__ggml__unknown_token_id": 99}, "unknown_token_id = 99"),
        ({"tokenizer__ggml__add_space_prefix": "yes"}, "add_space_prefix = 'yes'"),
        ({"tokenizer__ggml__token_type": [1]}, "token_type"),
    ],
)
def test_an_unusable_sentencepiece_vocabulary_is_refused_and_named(write_gguf, changes, words):
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        tokenizer_of(write_gguf(**{**SENTENCEPIECE, **changes}))


def test_sentencepiece_that_drops_spaces_is_unsupported(write_gguf):
    with pytest.raises(UnsupportedFeatureError, match="remove_extra_whitespaces"):
        tokenizer_of(write_gguf(**SENTENCEPIECE, tokenizer__ggml__remove_extra_whitespaces=True))


def test_user_defined_tokens_are_added_and_not_special(write_gguf):
    path = write_gguf(tokenizer__ggml__token_type=[3, 3, 4] + [1] * 259)
    tokenizer = tokenizer_of(path)
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False) == [2]
    assert tokenizer.decode([2, 1]) == "<|im_end|>"
    assert not tokenizer.is_special(2)
    assert tokenizer.is_special(1)


def test_bos_and_eos_are_added_where_the_file_asks_for_them(write_gguf):
    h = tokenizer_of(write_gguf()).encode("h", add_special_tokens=True)
    assert len(h) == 1
    both = tokenizer_of(write_gguf(tokenizer__ggml__add_bos_token=True, tokenizer__ggml__add_eos_token=True))
    assert both.encode("h", add_special_tokens=True) == [1, *h, 2]
    assert both.encode("h", add_special_tokens=False) == h
    llama = write_gguf(tokenizer__ggml__pre="llama-bpe")
    assert tokenizer_of(llama).encode("h", add_special_tokens=True) == [1, *h]
    llama = write_gguf(tokenizer__ggml__pre="llama-bpe", tokenizer__ggml__add_bos_token=False)
    assert tokenizer_of(llama).encode("h", add_special_tokens=True) == h


def test_llama_takes_a_whole_word_before_merging(write_gguf):
    # "hell" is in the vocabulary, and no merge makes it.
    ids = {}
    for pre in ("qwen2", "llama-bpe"):
        path = write_gguf(tokenizer__ggml__pre=pre, tokenizer__ggml__merges=["h e", "l l"])
        ids[pre] = tokenizer_of(path).encode("hell", add_special_tokens=False)
    assert len(ids["qwen2"]) == 2
    assert len(ids["llama-bpe"]) == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokenizer__ggml__pre": "jais-2"}, "pre-tokenizer 'jais-2'"),
        ({"tokenizer__ggml__pre": None}, "lacks the key tokenizer.ggml.pre"),
        ({"tokenizer__ggml__model": None}, "tokenizer.ggml.model is missing"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges"),
        ({"tokenizer__ggml__merges": ["a"]}, "a merge of one part"),
        ({"tokenizer__ggml__merges": ["zz yy"]}, "unusable tokenizer"),
        ({"tokenizer__ggml__tokens": ["a", "a"], "tokenizer__ggml__token_type": None}, "twice"),
        ({"tokenizer__ggml__token_type": [1, 1]}, "token_type"),
        ({"tokenizer__ggml__add_bos_token": True, "tokenizer__ggml__bos_token_id": 9999}, "bos_token_id"),
        ({"tokenizer__ggml__eos_token_id": 9999}, "eos_token_id"),
    ],
)
def test_an_unusable_vocabulary_is_refused_and_named(write_gguf, changes, words):
    path = write_gguf(**changes)
    with pytest.raises(ConfigurationError, match=re.escape(words)):
        tokenizer_of(path)


def test_another_kind_of_vocabulary_is_unsupported_and_an_override_helps(write_gguf, tmp_path):
    good = tokenizer_of(write_gguf())
    (tmp_path / "tokenizer.json").write_text(good.backend.to_str())
    path = write_gguf(tokenizer__ggml__model="t5")
    with pytest.raises(UnsupportedFeatureError, match=r"kind 't5'.* --tokenizer"):
        tokenizer_of(path)
    for override in (tmp_path, tmp_path / "tokenizer.json"):
        assert tokenizer_of(path, str(override)).encode("hello", add_special_tokens=True) == good.encode("hello", add_special_tokens=True)


def test_special_tokens_of_a_directory(write_gguf, tmp_path):
    path = write_gguf()
    (tmp_path / "tokenizer.json").write_text(tokenizer_of(path).backend.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "other", "unk_token": "<unk>"}))
    tokenizer = tokenizer_of(path, str(tmp_path))
    assert tokenizer.special_tokens.as_dict() == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_missing_and_broken_tokenizer_files(write_gguf, tmp_path):
    path = write_gguf()
    with pytest.raises(ConfigurationError, match=r"has no tokenizer\.json"):
        tokenizer_of(path, str(tmp_path))
    for missing in (str(tmp_path / "nothing"), "~nosuchuser/tokenizer.json"):
        with pytest.raises(ConfigurationError, match="does not exist"):
            tokenizer_of(path, missing)
    with pytest.raises(ConfigurationError, match="can't be read"):
        tokenizer_of(path, "n" * 5000)
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigurationError, match=r"not a valid tokenizer\.json") as caught:
        tokenizer_of(path, str(tmp_path))
    assert caught.value.param == "tokenizer"
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigurationError, match=r"not a valid tokenizer\.json"):
        tokenizer_of(path, str(tmp_path))


def test_lone_surrogates_are_refused(write_gguf):
    tokenizer = tokenizer_of(write_gguf())
    with pytest.raises(ConfigurationError, match=r"U\+D800 at character 2") as caught:
        tokenizer.encode("ab\ud800", add_special_tokens=False)
    assert caught.value.param == "prompt"


def test_ids_outside_the_vocabulary_add_nothing(write_gguf):
    tokenizer = tokenizer_of(write_gguf())
    h = tokenizer.encode("h", add_special_tokens=False)
    assert tokenizer.decode([*h, tokenizer.vocab_size, 2**40, -1, *h]) == "hh"
    assert tokenizer.token(2**40) is None
    assert not tokenizer.is_special(2**40)


def test_a_long_prompt_leaves_other_threads_running(write_gguf):
    tokenizer, text = tokenizer_of(write_gguf()), "hello world " * 80_000
    ticks, done = [], threading.Event()

    def tick():
        while not done.wait(0.002):
            ticks.append(time.perf_counter())

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.perf_counter()
    tokenizer.encode(text, add_special_tokens=False)
    end = time.perf_counter()
    done.set()
    thread.join()
    assert sum(start < moment < end for moment in ticks) >= 10
