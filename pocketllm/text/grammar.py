"""Grammars of answers, and the token masks that hold a row to one.

A grammar is text in llguidance's dialect of Lark. A `GrammarCompiler` knows the vocabulary of one checkpoint; a constraint is one
row's place in one grammar.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from pocketllm.backends.base import TokenConstraint
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.protocol.response_format import answer_schema
from pocketllm.text.schema_pattern import byte_vocabulary
from pocketllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import numpy.typing as npt
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# Between the parts of a JSON text a model may write nothing, a space, or a line break with an indent, so that both the compact and
# the indented style are open to it, and it can't write white space for ever.
ANY_STYLE = {"whitespace_pattern": r" |\n {0,24}"}
# No white space is the model's to choose: small models, which get lost in it, write calls so.
ONE_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_CACHED_GRAMMARS = 64
_LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 30_000,
    "max_items_in_row": 2_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}


def response_format_grammar(response_format: Mapping[str, Any], *, leading_newlines: bool = False) -> str:
    """The grammar of an answer in `response_format`, whose type is "json_object" or "json_schema".

    Args:
        response_format: one that `check_fields` passed.
        leading_newlines: whether up to two line breaks may come first, as reasoning models write after their reasoning.

    Raises:
        ConfigurationError, UnsupportedFeatureError: as `answer_schema` does.
    """
    schema = answer_schema(response_format)
    if schema is None:
        raise ValueError("free text has no grammar")
    lead = "lines? " if leading_newlines else ""
    return f"start: {lead}answer\nanswer: {json_rule(schema)}\n" + ("lines: /\\n{1,2}/\n" if leading_newlines else "")


def json_rule(schema: Mapping[str, Any], style: Mapping[str, Any] = ANY_STYLE) -> str:
    """The body of a Lark rule for the JSON texts of `schema`, which `enforceable_schema` has written.

    Args:
        schema: the whole document.
        style: of the texts, ANY_STYLE or ONE_STYLE.
    """
    return "%json " + json.dumps({**schema, "x-guidance": style})


class GrammarCompiler:
    """Compiles grammars over one vocabulary. Safe to use from several threads.

    Args:
        tokenizer: of the checkpoint.
        vocab_size: of the model, which may be padded beyond the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._limits: LLParserLimits | None = None
        self._stop_id = 0
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()

    def prepare(self) -> None:
        """Build what depends on the vocabulary alone, unless it is built: seconds for a large one, during which no other Python thread runs.

        Raises:
            UnsupportedFeatureError: the tokenizer is of a kind whose tokens can't be told as bytes.
        """
        with self._lock:
            self._prepared()

    def constraint(self, grammar: str, eos_token_ids: frozenset[int], *, param: str) -> TokenConstraint:
        """A constraint at the start of `grammar`.

        Args:
            grammar: in llguidance's Lark or JSON form.
            eos_token_ids: ids that end the row; allowed wherever the grammar may end, and nowhere else.
            param: request field to name in errors.

        Raises:
            ConfigurationError: the grammar needs more work than the limits allow, or no text satisfies it.
            UnsupportedFeatureError: as `prepare` does, or the grammar asks for what llguidance can't enforce.
        """
        with self._lock:
            vocabulary = self._prepared()
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
                matcher = matcher.deep_copy()
        if matcher is None:
            matcher = self._compile(vocabulary, grammar, param)
        return _GrammarConstraint(matcher, self._vocab_size, self._stop_id, eos_token_ids, param)

    def _compile(self, vocabulary: LLTokenizer, grammar: str, param: str) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=self._limits)  # other threads run meanwhile
        if matcher.is_error():
            raise _compile_error(matcher.get_error(), param)
        first = np.zeros(-(-self._vocab_size // 32), np.uint32)
        _GrammarConstraint(matcher.deep_copy(), self._vocab_size, self._stop_id, frozenset(), param).fill(first)
        with self._lock:
            self._compiled[grammar] = matcher.deep_copy()
            while len(self._compiled) > _CACHED_GRAMMARS:
                self._compiled.popitem(last=False)
        return matcher

    def _prepared(self) -> LLTokenizer:
        if self._vocabulary is None:
            from llguidance import LLParserLimits, LLTokenizer

            tokens, special = _spelled(self._tokenizer, self._vocab_size)
            # One id stands for every end: which ids end a row is the request's matter, and a vocabulary is expensive to build.
            self._stop_id = _stop_id(self._tokenizer, special, self._vocab_size)
            self._limits = LLParserLimits(**_LIMITS)  # type: ignore[arg-type]
            self._vocabulary = LLTokenizer(_Vocabulary(self._tokenizer, tokens, special, self._stop_id), n_vocab=self._vocab_size)  # type: ignore[arg-type]
        return self._vocabulary


def _spelled(tokenizer: Tokenizer, vocab_size: int) -> tuple[list[bytes], list[int]]:
    """What each id stands for, and which ids are control tokens. An added token that is none, such as Qwen's `<tool_call>`, is text like any other."""
    if not tokenizer.is_byte_level and tokenizer.backend.token_to_id("<0x00>") is None:
        raise UnsupportedFeatureError(
            f"The tokens of {tokenizer.kind} can't be told as bytes, so answers can't be held to a grammar: use a byte-level tokenizer."
        )
    special = [id_ for id_ in range(vocab_size) if tokenizer.is_special(id_)]
    tokens = [tokenizer.token_bytes(id_) for id_ in range(vocab_size)]
    for id_ in special:
        tokens[id_] = (tokenizer.token(id_) or "").encode()
    return tokens, special


def _stop_id(tokenizer: Tokenizer, special: list[int], vocab_size: int) -> int:
    id_ = None if tokenizer.eos_token is None else tokenizer.backend.token_to_id(tokenizer.eos_token)
    if id_ is not None and id_ < vocab_size:
        return id_
    return special[0] if special else vocab_size - 1


class _Vocabulary:
    """A vocabulary in the shape that LLTokenizer reads: bytes by id, and a way to split text into ids."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, tokens: list[bytes], special: list[int], eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.tokens = tokens
        self.special_token_ids = special
        self.eos_token_id = eos_token_id

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode(), add_special_tokens=False)


class _GrammarConstraint:
    def __init__(self, matcher: LLMatcher, vocab_size: int, stop_id: int, eos_token_ids: frozenset[int], param: str) -> None:
        self._matcher = matcher
        self._words = -(-vocab_size // 32)
        self._stop = bit_of(stop_id)
        self._eos = [bit_of(id_) for id_ in eos_token_ids if id_ < vocab_size]
        self._param = param
        self._is_complete = False

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        row = mask if mask.flags.c_contiguous else np.empty(mask.shape, np.uint32)
        self._matcher.unsafe_compute_mask_ptr(row.ctypes.data, self._words * 4)
        if self._matcher.is_error():
            raise _step_error(self._matcher.get_error(), self._param)
        row[self._words :] = 0
        word, bit = self._stop
        may_end = bool(row[word] & bit)
        row[word] &= ~bit
        for word, bit in self._eos:
            row[word] = row[word] | bit if may_end else row[word] & ~bit
        if row is not mask:
            mask[:] = row

    def accept(self, token_id: int) -> None:
        if not self._matcher.consume_token(token_id):
            raise _step_error(self._matcher.get_error(), self._param)
        self._is_complete = self._matcher.is_stopped()

    @property
    def is_complete(self) -> bool:
        return self._is_complete


def bit_of(id_: int) -> tuple[int, np.uint32]:
    return id_ // 32, np.uint32(1 << (id_ % 32))


_TOO_MUCH = re.compile(r"too (many|large|complex|big|deep)|limit|fuel|exceed|max(imum)? ", re.IGNORECASE)
# What llguidance's errors mean, where they show its own regexes or name no keyword.
_REASONS = {
    "Unable to determine if regex is empty": 'a "pattern" with its lengths is too large',
    "Regex is empty": '"pattern", "format" and the lengths leave no string',
    "NoExtensionBias": '"pattern", "format" and the lengths leave no string',
    "circular references": 'a "$ref" that recurs has other keywords beside it',
    "patternProperty": 'the patterns of "patternProperties" may match the same name',
    "Properties only supported": '"minProperties" or "maxProperties" meets optional properties',
}


def grammar_fault(grammar: str) -> str:
    """Why no row can be held to a grammar, with whatever vocabulary, in words for the second half of a sentence; or nothing."""
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(byte_vocabulary(), grammar, log_level=0, limits=LLParserLimits(**_LIMITS))  # type: ignore[arg-type]
    if not matcher.is_error():
        matcher.compute_bitmask()  # that no text begins shows here
    return _reason(matcher.get_error()) if matcher.is_error() else ""


def _reason(error: str) -> str:
    reason = _first_line(error)
    if unsatisfiable := re.fullmatch(r"Unsatisfiable schema: (.+) is unsatisfiable", reason):
        return f"no value for a {unsatisfiable[1]}"
    return next((words for sign, words in _REASONS.items() if sign in reason), reason)


def _compile_error(error: str, param: str) -> ConfigurationError | UnsupportedFeatureError:
    reason, noun = _reason(error), _noun(param)
    if _TOO_MUCH.search(reason):
        return ConfigurationError(f'"{param}" needs more work than the limits of grammars allow ({reason}): send a smaller {noun}.', param=param)
    if "nsatisfiable" in error:
        return ConfigurationError(f'"{param}" describes no value at all ({reason}): send a {noun} that some value satisfies.', param=param)
    return UnsupportedFeatureError(f'"{param}" can\'t be enforced while text is generated ({reason}): send a simpler {noun}.', param=param)


def _step_error(error: str, param: str) -> ConfigurationError:
    reason, noun = _first_line(error) or "no text can follow", _noun(param)
    if _TOO_MUCH.search(reason):
        return ConfigurationError(f'"{param}" needs more work for one token than the limits of grammars allow ({reason}): send a smaller {noun}.', param=param)
    return ConfigurationError(f'"{param}" leaves no text that may come next ({reason}): send a {noun} that some value satisfies.', param=param)


def _noun(param: str) -> str:
    return "form" if param == "structured_outputs" else "schema"


def _first_line(error: str) -> str:
    """What an error of llguidance says, without where in the grammar it is and the state that may follow, which would show the grammar."""
    line = next((line.strip() for line in error.splitlines() if line.strip()), "")
    line = re.sub(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: )?", "", line)
    return line if len(line) <= 160 else line[:160] + "…"
