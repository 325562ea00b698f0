"""A `tokenizers` tokenizer built from the vocabulary in a GGUF file."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.gguf_file import GGUFFile

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"


def _words_and_digits(digits: str) -> str:
    """The pattern that Llama 3 and Qwen2 share but for how many digits make one piece."""
    return _CONTRACTIONS + rf"|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _splits(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Split by each pattern in turn, then spell bytes as the vocabulary does."""
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer | None:
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "qwen2":
        return _splits(_words_and_digits(""))
    if name == "llama-bpe":
        return _splits(_words_and_digits("{1,3}"))
    if name == "default":
        return _splits(r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
    return None


_KNOWN = ("smollm", "qwen2", "llama-bpe", "default")


def build_gguf_tokenizer(file: GGUFFile) -> tuple[Tokenizer, str]:
    """The tokenizer of `file` and its kind, such as "gpt2/smollm".

    Raises:
        ConfigurationError: a key is missing or corrupt, or names a pre-tokenizer that is not known. It is never guessed: a wrong one
            gives other ids, and worse answers, without any error.
        UnsupportedFeatureError: the vocabulary is no byte-level BPE.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ConfigurationError(
            f"{file.path} has no tokenizer (tokenizer.ggml.model is missing): give a directory with tokenizer.json as --tokenizer.", param="model"
        )
    if model != "gpt2":
        raise UnsupportedFeatureError(
            f"{file.path} has a tokenizer of the kind {model!r}, and PocketLLM reads byte-level BPE ('gpt2') from a GGUF: "
            "give a directory with the model's tokenizer.json as --tokenizer.",
            param="model",
        )
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise ConfigurationError(
            f"{file.path} lacks the key tokenizer.ggml.pre: convert it again, or give a directory with tokenizer.json as --tokenizer.", param="model"
        )
    pre_tokenizer = _pre_tokenizer(name)
    if pre_tokenizer is None:
        raise ConfigurationError(
            f"{file.path} has the pre-tokenizer {name!r}, and PocketLLM knows {', '.join(_KNOWN)}: "
            "give a directory with the model's tokenizer.json as --tokenizer.",
            param="model",
        )
    tokens = _strings(file, "tokenizer.ggml.tokens")
    tokenizer = Tokenizer(_bpe(file, tokens, ignore_merges=name == "llama-bpe"))
    if name == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(file, tokenizer, tokens)
    _add_post_processor(file, tokenizer, tokens, add_bos=name == "llama-bpe")
    return tokenizer, f"{model}/{name}"


def _bpe(file: GGUFFile, tokens: list[str], *, ignore_merges: bool) -> models.BPE:
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ConfigurationError(
            f"{file.path} has {len(tokens) - len(vocab)} tokens twice in tokenizer.ggml.tokens: download or convert it again.", param="model"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(file, "tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ConfigurationError(f"{file.path} has a merge of one part in tokenizer.ggml.merges: download or convert it again.", param="model")
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges)  # type: ignore[arg-type]
    except Exception as error:  # the library raises Exception itself, for a merge whose parts are not in the vocabulary
        raise ConfigurationError(f"{file.path} has an unusable tokenizer ({error}): download or convert it again.", param="model") from None


def _add_marked_tokens(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    types = file.metadata.get("tokenizer.ggml.token_type", [])
    if not isinstance(types, list) or len(types) not in (0, len(tokens)):
        raise ConfigurationError(f"{file.path} has a tokenizer.ggml.token_type that does not match its tokens: download or convert it again.", param="model")
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=False) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in marked])


def _add_post_processor(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], *, add_bos: bool) -> None:
    """Surround a text with BOS or EOS where the file asks for it; without the keys, as llama.cpp does for this pre-tokenizer."""
    before, after, used = "", "", []
    for key, wanted in (("bos", add_bos), ("eos", False)):
        if not file.metadata.get(f"tokenizer.ggml.add_{key}_token", wanted):
            continue
        id_ = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if type(id_) is not int or not 0 <= id_ < len(tokens):
            raise ConfigurationError(
                f"{file.path} asks for a {key.upper()} token, and tokenizer.ggml.{key}_token_id is {id_!r}: download or convert it again.", param="model"
            )
        used.append((tokens[id_], id_))
        if key == "bos":
            before = f"{tokens[id_]} "
        else:
            after = f" {tokens[id_]}"
    if used:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{before}$A{after}", special_tokens=used)


def _strings(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ConfigurationError(f"{file.path} lacks a usable {key}: download or convert it again.", param="model")
    return value
