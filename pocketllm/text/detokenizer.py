"""Token ids to text, step by step."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from pocketllm.text.tokenizer import BYTE_TOKEN, Tokenizer


class Detokenizer:
    """The text of one answer, as its ids arrive.

    However the ids are cut into steps, the texts of all steps and of `finish`, joined, are
    `tokenizer.decode(ids, skip_special_tokens=True)`. Text is handed out as soon as later ids can no longer change it.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._stream: _ByteLevelStream | _GeneralStream
        self._stream = _ByteLevelStream(tokenizer) if tokenizer.is_byte_level else _GeneralStream(tokenizer)

    def step(self, ids: Sequence[int]) -> str:
        """Text that `ids` completes; "" while a character is still missing bytes."""
        return self._stream.step(ids)

    def finish(self) -> str:
        """What was still held back when the answer ended: U+FFFD for the bytes of an incomplete character, as the one-shot decode has it."""
        return self._stream.finish()


class _ByteLevelStream:
    """For byte-level BPE: each token is a run of bytes, so the text is a UTF-8 stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes, ids)))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _GeneralStream:
    """For any other decoder: decode the held ids after one settled token, which keeps rules for the start of a text out of the middle.

    A run of byte tokens is held until it ends, because one bad byte turns all of its run into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._settled: list[int] = []  # the last token whose text is out
        self._held: list[int] = []

    def step(self, ids: Sequence[int]) -> str:
        self._held += [id_ for id_ in ids if self._tokenizer.token(id_) is not None and not self._tokenizer.is_special(id_)]
        if not self._held or BYTE_TOKEN.fullmatch(self._tokenizer.token(self._held[-1]) or ""):
            return ""
        return self.finish()

    def finish(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._settled)
        text = self._tokenizer.decode(self._settled + self._held)[len(before) :]
        self._settled, self._held = self._held[-1:], []
        return text
