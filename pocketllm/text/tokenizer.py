"""Text to token ids and back, from the checkpoint's own vocabulary."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError
from pocketllm.text.gguf_vocabulary import build_gguf_tokenizer
from pocketllm.text.special_tokens import SpecialTokens, directory_special_tokens, gguf_special_tokens


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
