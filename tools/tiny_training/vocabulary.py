"""The model's own tokenizer, byte-level BPE, learnt from generated conversations; and its chat template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pocketllm.text.chat_template import ChatTemplate

from .conversation import Conversation, draw_conversation
from .source import Source

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
_CONTROL = (END_OF_TEXT, TURN_START, TURN_END)
_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")  # text that an answer keeps, as in Qwen's files
_ADDED = re.compile("|".join(re.escape(token) for token in (*_CONTROL, *_TAGS)))
_LEARNT = 1500  # bytes and merges
# How a text is cut before merging. Digits stand alone, as in Qwen's vocabularies. A word does not take the blank, the quote or the `=` before it along, as
# it would there: a small model copies best what is spelled alike wherever it stands.
_PIECES = r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+"
TEMPLATE = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")


def load_template() -> ChatTemplate:
    """The model's chat template as the server renders it."""
    return ChatTemplate(TEMPLATE, {"eos_token": TURN_END, "pad_token": END_OF_TEXT})


def train_tokenizer(seed: int, conversations: int = 6000) -> Tokenizer:
    """The tokenizer of a seed and a number of conversations that it is learnt from, always the same."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=_LEARNT, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    template = load_template()
    texts = (render(template, draw_conversation(Source(f"vocabulary {seed} {index}"))) for index in range(conversations))
    tokenizer.train_from_iterator(_between_added(texts), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in _TAGS])
    return tokenizer


def _between_added(texts: Iterable[str]) -> Iterable[str]:
    """The pieces that merges are learnt from: an added token is never merged with what stands beside it."""
    for text in texts:
        yield from filter(None, _ADDED.split(text))


def render(template: ChatTemplate, conversation: Conversation, *, prompt: bool = False) -> str:
    """The conversation's text; with `prompt` the opening of the assistant's turn follows."""
    return template.render(conversation.messages, add_generation_prompt=prompt, tools=conversation.tools or None, enable_thinking=conversation.thinking)


def write_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json, which holds the chat template too."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    added = {
        str(id_): {
            "content": token.content,
            "lstrip": token.lstrip,
            "normalized": token.normalized,
            "rstrip": token.rstrip,
            "single_word": token.single_word,
            "special": token.special,
        }
        for id_, token in sorted(tokenizer.get_added_tokens_decoder().items())
    }
    config = {
        "added_tokens_decoder": added,
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": TURN_END,
        "model_max_length": max_length,
        "pad_token": END_OF_TEXT,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
