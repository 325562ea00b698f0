"""From what a caller asks of the logits to the terms of a row: bad words as token ids, and ids held to the model's vocabulary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pocketllm.backends.logit_terms import NO_TERMS, LogitTerms
from pocketllm.errors import ConfigurationError
from pocketllm.protocol.refusals import checked_text
from pocketllm.sampling_params import SamplingParams
from pocketllm.text.tokenizer import Tokenizer

_LEAST_PENALTY = 1e-6  # a logit that is divided by it is beyond all others, and still a number of float32


def row_terms(sampling: SamplingParams, tokenizer: Tokenizer, vocab_size: int) -> LogitTerms | None:
    """The terms of each row of a request, or None where nothing changes its logits.

    Raises:
        ConfigurationError: an id is no token of the model, or a bad word no text; `param` names the field.
    """
    bias = sampling.logit_bias or {}
    allowed = sampling.allowed_token_ids
    _check_ids(bias, "logit_bias", vocab_size)
    _check_ids(allowed or (), "allowed_token_ids", vocab_size)
    terms = LogitTerms(
        repetition_penalty=max(sampling.repetition_penalty, _LEAST_PENALTY),
        frequency_penalty=sampling.frequency_penalty,
        presence_penalty=sampling.presence_penalty,
        logit_bias=tuple(sorted((token_id, value) for token_id, value in bias.items() if value != 0)),
        min_p=sampling.min_p,
        min_tokens=sampling.min_tokens,
        allowed_token_ids=None if allowed is None else tuple(sorted(set(allowed))),
        bad_words=_bad_words(sampling.bad_words, tokenizer),
    )
    return None if terms == NO_TERMS else terms


def stop_token_ids(sampling: SamplingParams, vocab_size: int) -> frozenset[int]:
    """The ids that end the request's rows beside the checkpoint's.

    Raises:
        ConfigurationError: one is no token of the model; `param` is "stop_token_ids".
    """
    _check_ids(sampling.stop_token_ids, "stop_token_ids", vocab_size)
    return frozenset(sampling.stop_token_ids)


def check_min_tokens(sampling: SamplingParams, max_tokens: int) -> None:
    """Raises:
    ConfigurationError: the answer's budget of `max_tokens` has no room for so many; `param` is "min_tokens".
    """
    if sampling.min_tokens > max_tokens:
        raise ConfigurationError(
            f'"min_tokens" = {sampling.min_tokens} is more than the {max_tokens} tokens that this answer may have: send less, or a larger "max_tokens".',
            param="min_tokens",
        )


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ids of each word at the beginning of a text and after a space; one that ends with another's ids is left out, since that one is kept out anyway.

    Raises:
        ConfigurationError: a word holds half of a surrogate pair; `param` names it.
    """
    texts = [checked_text(word, f"bad_words[{index}]") for index, word in enumerate(words)]
    spelled = {tuple(tokenizer.encode(text, add_special_tokens=False)) for word in texts for text in (word, " " + word.lstrip(" "))}
    spelled.discard(())
    lengths = sorted({len(ids) for ids in spelled})
    return tuple(sorted(ids for ids in spelled if not any(ids[-length:] in spelled for length in lengths if length < len(ids))))


def _check_ids(ids: Iterable[int], name: str, vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise ConfigurationError(
                f'"{name}" holds {token_id}, which is no token id of this model: ids are whole numbers from 0 to {vocab_size - 1}.', param=name
            )
