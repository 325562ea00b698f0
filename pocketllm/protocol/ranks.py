"""Log probabilities in the JSON of answers: OpenAI's `content`, its older arrays of /v1/completions, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from pocketllm.outputs import Alternative, PromptToken, TokenLogprob


class TextOffsets:
    """Where in the text of one choice its tokens begin, in characters, as they come. An echoed prompt is part of that text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._length = 0

    def of_prompt(self, tokens: Sequence[PromptToken], text: str) -> list[int]:
        """Of the tokens of a prompt that is echoed as `text`, which need not spell all of them: a tokenizer may add tokens, and drop or add a space."""
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            piece = self._decoder.decode(token.bytes) if token.bytes else token.token
            if text.startswith(piece, self._length):
                self._length += len(piece)
            elif text.startswith(piece[1:], self._length) and piece.startswith(" "):
                self._length += len(piece) - 1
        self._decoder.reset()
        self._length = len(text)
        return offsets

    def of_answer(self, tokens: Sequence[TokenLogprob]) -> list[int]:
        """Of the next generated tokens."""
        offsets = []
        for token in tokens:
            offsets.append(self._length)
            self._length += len(self._decoder.decode(token.bytes))
        return offsets


def content_ranks(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """`logprobs.content` of generated tokens."""
    return [{**_ranked(one), "top_logprobs": [_ranked(other) for other in one.top]} for one in logprobs]


def legacy_ranks(logprobs: Sequence[TokenLogprob], prompt: Sequence[PromptToken], echo: str, offsets: TextOffsets) -> dict[str, Any]:
    """OpenAI's arrays of /v1/completions. As documented there, a token that was drawn is among the ranked ones even where its rank is lower.

    Args:
        logprobs: of generated tokens.
        prompt: tokens of an echoed prompt, which come first; none otherwise. The first token of a prompt is ranked by nothing, and has nulls.
        echo: the prompt's text.
        offsets: of the choice.
    """
    starts = offsets.of_prompt(prompt, echo) if prompt else []
    found: Sequence[PromptToken | TokenLogprob] = (*prompt, *logprobs)
    return {
        "tokens": [one.token for one in found],
        "token_logprobs": [one.logprob for one in found],
        "top_logprobs": [_likeliest(one) for one in found],
        "text_offset": starts + offsets.of_answer(logprobs),
    }


def prompt_ranks(tokens: Sequence[PromptToken], num_top: int) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's `prompt_logprobs`: for each token of the prompt what was likely there, by id, and null for the first. `rank` is null beyond the alternatives."""
    return [None if token.logprob is None else _by_id(token, token.top[:num_top], token.logprob) for token in tokens]


def _by_id(token: PromptToken, top: Sequence[Alternative], logprob: float) -> dict[str, dict[str, Any]]:
    places = {other.token_id: place for place, other in enumerate(top, 1)}
    found = {str(token.token_id): {"logprob": logprob, "rank": places.get(token.token_id), "decoded_token": token.token}}
    return found | {str(other.token_id): {"logprob": other.logprob, "rank": places[other.token_id], "decoded_token": other.token} for other in top}


def _likeliest(one: PromptToken | TokenLogprob) -> dict[str, float] | None:
    if one.logprob is None:
        return None
    likeliest: dict[str, float] = {}
    for token, logprob in (*((other.token, other.logprob) for other in one.top), (one.token, one.logprob)):
        likeliest.setdefault(token, logprob)  # of tokens that look alike, the likeliest
    return likeliest


def _ranked(one: Alternative) -> dict[str, Any]:
    return {"token": one.token, "logprob": one.logprob, "bytes": list(one.bytes)}
