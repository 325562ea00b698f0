"""Text to token ids and back, from the checkpoint's own vocabulary."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError
from pocketllm.text.gguf_vocabulary import build_gguf_tokenizer
from pocketllm.text.special_tokens import SpecialTokens, directory_special_tokens, gguf_special_tokens

BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to use from several threads.

    Args:
        backend: the tokenizer of the `tokenizers` library that does the work.
        special_tokens: the strings that the chat template knows as bos_token, eos_token, unk_token and pad_token.
        kind: what it was made of, for people, such as "gpt2/smollm" or "tokenizer.json".
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: SpecialTokens, kind: str) -> None:
        self.special_tokens = special_tokens
        self.kind = kind
        self._backend = backend
        self._added = backend.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {}

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The `tokenizers.Tokenizer` underneath."""
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included; a model's embedding may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.bos_token

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.eos_token

    @property
    def unk_token(self) -> str | None:
        return self.special_tokens.unk_token

    @property
    def pad_token(self) -> str | None:
        return self.special_tokens.pad_token

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`. Control tokens spelled out in the text become their ids.

        Args:
            text: any text.
            add_special_tokens: add BOS or EOS where the checkpoint asks for it. A rendered chat template has its own.

        Raises:
            ConfigurationError: the text holds a lone surrogate, which no UTF-8 text can.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ConfigurationError(
                f'"prompt" holds the lone surrogate U+{ord(text[error.start]):04X} at character {error.start}, which is not text: remove it.', param="prompt"
            ) from None
        # encode() would keep the GIL, and a prompt of megabytes the whole server, for seconds; the batch call gives it free.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`. An id outside the vocabulary adds nothing; bytes that are no UTF-8 become U+FFFD."""
        known = [id_ for id_ in ids if 0 <= id_ < 2**32]
        return self._backend.decode(known, skip_special_tokens=skip_special_tokens)

    def token(self, id_: int) -> str | None:
        """The vocabulary's own spelling of an id, or None outside the vocabulary."""
        return self._backend.id_to_token(id_) if 0 <= id_ < 2**32 else None

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether each token is a run of bytes, as in GPT-2's vocabulary, and nothing else happens when they are joined."""
        backend_decoder = self._backend.decoder
        decoder: Any = {} if backend_decoder is None else json.loads(backend_decoder.__getstate__())
        return [step.get("type") for step in decoder.get("decoders", [decoder])] == ["ByteLevel"]

    def token_bytes(self, id_: int) -> bytes:
        """UTF-8 bytes that an id adds to the middle of a text; none for a control token or an id outside the vocabulary."""
        found = self._bytes.get(id_)
        if found is None:
            found = self._bytes[id_] = self._spell(id_)
        return found

    def _spell(self, id_: int) -> bytes:
        token = self.token(id_)
        if token is None or self.is_special(id_):
            return b""
        if not self.is_byte_level:
            return bytes([int(token[3:5], 16)]) if BYTE_TOKEN.fullmatch(token) else token.replace("▁", " ").encode()
        try:
            return bytes(_BYTE_OF[character] for character in token)
        except KeyError:  # an added token, spelled as its own text
            return token.encode()

    def is_special(self, id_: int) -> bool:
        """Whether the id is a control token, which answers leave out."""
        added = self._added.get(id_)
        return added is not None and added.special


def load_tokenizer(checkpoint: Checkpoint, override: str | None = None) -> Tokenizer:
    """The checkpoint's tokenizer, or that of `override`: a tokenizer.json or a directory that holds one.

    Raises:
        ConfigurationError: a file or a key is missing or corrupt, or the GGUF names a pre-tokenizer that PocketLLM does not know.
        UnsupportedFeatureError: the GGUF's tokenizer is of a kind that PocketLLM does not build.
    """
    if override is not None:
        return _load_directory(Path(os.path.expanduser(override)), param="tokenizer")
    if checkpoint.gguf is None:
        return _load_directory(checkpoint.path, param="model")
    backend, kind = build_gguf_tokenizer(checkpoint.gguf)
    return Tokenizer(backend, gguf_special_tokens(checkpoint.gguf), kind)


def _load_directory(path: Path, param: str) -> Tokenizer:
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            if path.is_dir():
                raise ConfigurationError(f"{path} has no tokenizer.json: give a directory that has one with --tokenizer.", param=param)
            raise ConfigurationError(f"{path} does not exist: give a tokenizer.json, or a directory that has one.", param=param)
    except OSError as error:  # such as a name that is too long
        raise ConfigurationError(f"{str(path)[:200]} can't be read ({error.strerror}): check the path of the tokenizer.", param=param) from None
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{file} can't be read ({error.strerror or error}): check its permissions.", param=param) from None
    except Exception as error:  # the library raises Exception itself for every fault in the file
        raise ConfigurationError(f"{file} is not a valid tokenizer.json ({' '.join(str(error).split())}): download it again.", param=param) from None
    backend.no_truncation()
    backend.no_padding()
    return Tokenizer(backend, directory_special_tokens(file.parent), file.name)


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character that GPT-2's vocabulary spells bytes with: printable Latin-1 stands for itself, the rest for 256, 257 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()
