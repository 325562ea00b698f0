"""A `tokenizers` tokenizer built from the vocabulary in a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.gguf_file import GGUFFile
from pocketllm.text.gguf_pre_tokenizer import PRE_TOKENIZERS

# values of tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
_SPACE = "▁"


def build_gguf_tokenizer(file: GGUFFile) -> tuple[Tokenizer, str]:
    """The tokenizer of `file` and its kind, such as "gpt2/smollm" or "llama".

    Raises:
        ConfigurationError: a key is missing or corrupt, or names a pre-tokenizer that is not known. It is never guessed: a wrong one
            gives other ids, and worse answers, without any error.
        UnsupportedFeatureError: the vocabulary is neither byte-level BPE nor SentencePiece BPE.
    """
    model = file.metadata.get("tokenizer.ggml.model")
    if model is None:
        raise ConfigurationError(
            f"{file.path} has no tokenizer (tokenizer.ggml.model is missing): give a directory with tokenizer.json as --tokenizer.", param="model"
        )
    if model == "gpt2":
        return _byte_level(file)
    if model == "llama":
        return _sentencepiece(file), model
    raise UnsupportedFeatureError(
        f"{file.path} has a tokenizer of the kind {model!r}, and PocketLLM reads byte-level BPE ('gpt2') and SentencePiece BPE ('llama') from a GGUF: "
        "give a directory with the model's tokenizer.json as --tokenizer.",
        param="model",
    )


def _byte_level(file: GGUFFile) -> tuple[Tokenizer, str]:
    name = file.metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise ConfigurationError(
            f"{file.path} lacks the key tokenizer.ggml.pre: convert it again, or give a directory with tokenizer.json as --tokenizer.", param="model"
        )
    pre = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if pre is None:
        raise ConfigurationError(
            f"{file.path} has the pre-tokenizer {name!r}, and PocketLLM knows {', '.join(PRE_TOKENIZERS)}: "
            "give a directory with the model's tokenizer.json as --tokenizer.",
            param="model",
        )
    tokens = _tokens(file)
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(file, "tokenizer.ggml.merges")]
    if any(len(merge) != 2 for merge in merges):
        raise ConfigurationError(f"{file.path} has a merge of one part in tokenizer.ggml.merges: download or convert it again.", param="model")
    tokenizer = Tokenizer(_bpe(file, tokens, merges, ignore_merges=pre.whole_pieces))
    if pre.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    _add_marked_tokens(tokenizer, tokens, _token_types(file, tokens))
    _add_post_processor(file, tokenizer, tokens, add_bos=pre.add_bos)
    return tokenizer, f"gpt2/{name}"


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """SentencePiece BPE: no merges are stored, the pair whose union has the best score is merged first."""
    if _flag(file, "remove_extra_whitespaces", False):
        raise UnsupportedFeatureError(
            f"{file.path} has tokenizer.ggml.remove_extra_whitespaces = true, which is not supported: "
            "give a directory with the model's tokenizer.json as --tokenizer.",
            param="model",
        )
    tokens = _tokens(file)
    types = _token_types(file, tokens)
    scores = file.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens) or not all(isinstance(score, (int, float)) for score in scores):
        raise ConfigurationError(f"{file.path} lacks usable tokenizer.ggml.scores, one for each token: download or convert it again.", param="model")
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id", 0)
    if type(unknown) is not int or not 0 <= unknown < len(tokens):
        raise ConfigurationError(
            f"{file.path} has tokenizer.ggml.unknown_token_id = {unknown!r} for {len(tokens)} tokens: download or convert it again.", param="model"
        )
    merges = _merges_by_score(tokens, scores, types)
    tokenizer = Tokenizer(_bpe(file, tokens, merges, unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True))
    add_prefix = _flag(file, "add_space_prefix", True)
    spaces = normalizers.Replace(" ", _SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if add_prefix else spaces
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_prefix:
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    _add_marked_tokens(tokenizer, tokens, types)
    _add_post_processor(file, tokenizer, tokens, add_bos=True)
    return tokenizer


def _merges_by_score(tokens: list[str], scores: list[float], types: list[int]) -> list[tuple[str, str]]:
    """Each way to cut a piece into two, the pieces by falling score.

    SentencePiece merges the leftmost of several pairs with the same score. Where the score of runs of spaces is the same, as in
    Llama 2, the order that comes to the same is that of falling length of the left part: the run at the left grows first.
    """
    # Other kinds are never made by merging: they are cut out of the text before, or stand for a byte.
    pieces = {token: score for token, score, kind in zip(tokens, scores, types, strict=True) if kind in (_NORMAL, _UNUSED)}
    found = [
        (-score, -cut, piece[:cut], piece[cut:])
        for piece, score in pieces.items()
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    found.sort(key=itemgetter(0, 1))
    return [(left, right) for _, _, left, right in found]


def _bpe(file: GGUFFile, tokens: list[str], merges: Sequence[tuple[str, ...]], **options: Any) -> models.BPE:
    try:
        return models.BPE(vocab={token: id_ for id_, token in enumerate(tokens)}, merges=merges, **options)  # type: ignore[arg-type]
    except Exception as error:  # the library raises Exception itself, for a merge whose parts are not in the vocabulary
        raise ConfigurationError(f"{file.path} has an unusable tokenizer ({error}): download or convert it again.", param="model") from None


def _tokens(file: GGUFFile) -> list[str]:
    tokens = _strings(file, "tokenizer.ggml.tokens")
    if twice := len(tokens) - len(set(tokens)):
        raise ConfigurationError(f"{file.path} has {twice} tokens twice in tokenizer.ggml.tokens: download or convert it again.", param="model")
    return tokens


def _token_types(file: GGUFFile, tokens: list[str]) -> list[int]:
    types = file.metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ConfigurationError(f"{file.path} has a tokenizer.ggml.token_type that does not match its tokens: download or convert it again.", param="model")
    return types


def _add_marked_tokens(tokenizer: Tokenizer, tokens: list[str], types: list[int]) -> None:
    marked = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, special=kind != _USER_DEFINED, normalized=False) for token, kind in marked])


def _add_post_processor(file: GGUFFile, tokenizer: Tokenizer, tokens: list[str], *, add_bos: bool) -> None:
    """Surround a text with BOS or EOS where the file asks for it; without the keys, as llama.cpp does for this kind of vocabulary."""
    before, after, used = "", "", []
    for key, wanted in (("bos", add_bos), ("eos", False)):
        if not _flag(file, f"add_{key}_token", wanted):
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


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise ConfigurationError(f"{file.path} has tokenizer.ggml.{name} = {value!r}, which should be true or false: convert it again.", param="model")
    return value


def _strings(file: GGUFFile, key: str) -> list[str]:
    value = file.metadata.get(key)
    if not isinstance(value, list) or not value or not all(isinstance(item, str) for item in value):
        raise ConfigurationError(f"{file.path} lacks a usable {key}: download or convert it again.", param="model")
    return value
