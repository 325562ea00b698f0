"""Random texts that a grammar allows, as a model without any sense would write them, and the validators that judge them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pocketllm.backends.base import TokenConstraint
from pocketllm.text.special_tokens import SpecialTokens
from pocketllm.text.tokenizer import Tokenizer
from tests.conftest import byte_alphabet

EOS = 2
CLOSING = (b'"', b"}", b"]", b",")


@dataclass(frozen=True)
class Sample:
    """A text, and whether it may end there; if not, it was cut off."""

    text: bytes
    token_ids: tuple[int, ...]
    is_ended: bool


def allowed(constraint: TokenConstraint, vocab_size: int) -> np.ndarray:
    """The ids that the constraint allows next."""
    mask = np.full(-(-vocab_size // 32), 0xFFFFFFFF, np.uint32)
    constraint.fill(mask)
    return np.nonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0]


def sample(constraint: TokenConstraint, tokenizer: Tokenizer, vocab_size: int, seed: int, *, max_tokens: int = 96, eos: int = EOS) -> Sample:
    """Draw allowed ids, with a leaning to close what is open, until the text may end."""
    random = np.random.default_rng(seed)
    ids: list[int] = []
    while not constraint.is_complete:
        choices = allowed(constraint, vocab_size)
        assert len(choices), f"nothing may come after {tokenizer.decode(ids)!r}"
        if eos in choices:
            break
        if len(ids) == max_tokens:
            return Sample(b"".join(map(tokenizer.token_bytes, ids)), tuple(ids), False)
        low = choices[:300]
        closing = [id_ for id_ in low if tokenizer.token_bytes(int(id_)).strip() in CLOSING]
        pool = closing if closing and random.random() < 0.3 else low if random.random() < 0.5 else choices
        ids.append(int(pool[random.integers(len(pool))]))
        constraint.accept(ids[-1])
    return Sample(b"".join(map(tokenizer.token_bytes, ids)), tuple(ids), True)


def validate(schema: Any, text: bytes | str) -> None:
    """Assert that `text` is JSON that `schema` accepts, formats included."""
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    jsonschema.Draft202012Validator(schema, format_checker=checker).validate(json.loads(text))


def byte_tokenizer() -> Tokenizer:
    """Bytes, a few words, control tokens, and an added token that is none. Ids 0 to 2 are control tokens, 2 the EOS; 3 to 258 are the bytes."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll", "hell"]
    backend = tokenizers.Tokenizer(models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=[("h", "e"), ("l", "l"), ("he", "ll")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens[:3]])
    backend.add_tokens([tokenizers.AddedToken("<think>", special=False, normalized=False), tokenizers.AddedToken("</think>", special=False, normalized=False)])
    return Tokenizer(backend, SpecialTokens(eos_token="<|im_end|>"), "bytes")
