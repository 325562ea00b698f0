"""The default model's tokenizer and template against transformers, which reads the same GGUF with code of its own."""

from __future__ import annotations

import pytest
from tokenizers import Regex, pre_tokenizers

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.chat_template import load_chat_template
from pocketllm.text.tokenizer import load_tokenizer

TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "Hello, world!",
    "The capital of France is Paris.",
    "I'll say it's DON'T, we've, they're, he'd",
    "1234567890 3.14159 1,000,000 ½ ² Ⅳ ٣",
    "tabs\tand\nnewlines\r\n\n\n  indented",
    "def f(x):\n    return x ** 2  # square\n",
    '{"key": [1, 2.5, null, true], "nested": {"a": "b"}}',
    "<html><body class='x'>&amp;</body></html>",
    "https://example.org/a/b?c=d&e=f#g",
    "Élan naïve façade Ångström œuvre",
    "e\u0301 combining, \ufb01 ligature, \u212b sign",
    "Привет, как дела?",
    "你好\uff0c世界。今天天气怎么样\uff1f",
    "こんにちは世界 カタカナ",
    "안녕하세요 세계",
    "مرحبا بالعالم",
    "שלום עולם",
    "नमस्ते दुनिया",
    "🦀🇫🇷👨‍👩‍👧‍👦 👍🏽",
    "a\u200bzero\u00a0width\ufeff",
    "\x00\x01\x7f control",
    "CamelCaseIdentifiers snake_case_identifiers kebab-case",
    "!!!???...---***///\\\\\\",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "text<|im_end|>glued <|im_start|> <|not_a_token|> <repo_name>x",
    "word " * 200,
    "∑∫√∞ ≤≥≠ αβγ",
    "x" * 300,
]
CONVERSATIONS = [
    [{"role": "user", "content": "hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " What is 2+2? "}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "🦀 <|im_end|>"}],
]


@pytest.fixture(scope="module")
def oracle(default_model):
    transformers = pytest.importorskip("transformers", reason="the oracle needs the test dependency transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(str(default_model.parent), gguf_file=default_model.name)
    # transformers reads no tokenizer.ggml.pre and cuts as GPT-2 does, so " ½" would stay one piece. The model was trained with each
    # number character apart, which llama.cpp spells as this pattern.
    steps = [pre_tokenizers.Split(Regex(r"\p{N}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    loaded.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return loaded


@pytest.fixture(scope="module")
def checkpoint(default_model):
    return open_checkpoint(default_model)


def test_ids_and_texts_are_equal(oracle, checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == oracle.encode(text, add_special_tokens=False), text
        assert tokenizer.encode(text, add_special_tokens=True) == oracle.encode(text), text
        for skip in (True, False):
            expected = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
            assert tokenizer.decode(ids, skip_special_tokens=skip) == expected, text


def test_every_token_is_equal(oracle, checkpoint):
    tokenizer = load_tokenizer(checkpoint)
    assert [tokenizer.token(id_) for id_ in range(tokenizer.vocab_size)] == oracle.convert_ids_to_tokens(range(tokenizer.vocab_size))
    assert {id_ for id_ in range(tokenizer.vocab_size) if tokenizer.is_special(id_)} >= set(oracle.all_special_ids)


def test_rendered_templates_are_equal(oracle, checkpoint):
    template = load_chat_template(checkpoint)
    assert template is not None
    for conversation in CONVERSATIONS:
        for prompt in (True, False):
            expected = oracle.apply_chat_template(conversation, tokenize=False, add_generation_prompt=prompt)
            assert template.render(conversation, add_generation_prompt=prompt) == expected
