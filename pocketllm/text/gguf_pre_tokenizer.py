"""How byte-level vocabularies of a GGUF cut a text before merging, by the name in tokenizer.ggml.pre.

The patterns are part of what a model was trained with: they stand in the tokenizer.json that each name was given for.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, pre_tokenizers

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"  # DeepSeek's
_DEEPSEEK_WORDS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _words_and_digits(digits: str, letter: str = r"\p{L}") -> str:
    """The pattern of Llama 3 and of Qwen, which differ in how many digits make one piece and in what a letter is."""
    return _CONTRACTIONS + rf"|[^\r\n\p{{L}}\p{{N}}]?[{letter}]+|\p{{N}}{digits}| ?[^\s{letter}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased_words(ending: str, digits: str) -> str:
    """The pattern of GPT-4o: a word begins where upper case follows lower case."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}|\p{{N}}{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What comes before the merges.

    Args:
        patterns: a text is split by each in turn; what matches is a piece, and so is what lies between.
        nfc: compose characters first.
        whole_pieces: a piece that is a token is that token, whatever the merges say.
        add_bos: begin with BOS where the file doesn't say.
    """

    patterns: tuple[str, ...]
    nfc: bool = False
    whole_pieces: bool = False
    add_bos: bool = False

    def build(self) -> pre_tokenizers.PreTokenizer:
        """The splits, then the spelling of bytes that byte-level vocabularies have."""
        steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in self.patterns]
        return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_LLAMA3 = PreTokenizer((_words_and_digits("{1,3}"),), whole_pieces=True, add_bos=True)
_GPT2_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_QWEN2 = PreTokenizer((_words_and_digits(""),), nfc=True)
_GLM4 = PreTokenizer((_words_and_digits("{1,3}"),), whole_pieces=True)
_GPT4O = PreTokenizer((_cased_words(f"{_CONTRACTIONS}?", "{1,3}"),))

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    "gpt-2": PreTokenizer((_GPT2,)),
    "smollm": _GPT2_DIGITS,
    "starcoder": _GPT2_DIGITS,
    "refact": _GPT2_DIGITS,
    "command-r": _GPT2_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "qwen35": PreTokenizer((_words_and_digits("", r"\p{L}\p{M}"),), nfc=True),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}")),
    "deepseek-v3": PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK_WORDS)),
    "glm4": _GLM4,
    "glm5": _GLM4,
    "gpt-4o": _GPT4O,
    "llama4": _GPT4O,
    "minimax-m2": _GPT4O,
    "tekken": PreTokenizer((_cased_words("", ""),), whole_pieces=True, add_bos=True),
}
