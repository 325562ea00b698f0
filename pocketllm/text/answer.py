"""One choice, from token ids to what a caller reads: reasoning, text cut at stop sequences, tool calls, log probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from pocketllm.backends.base import TokenLogprobs
from pocketllm.outputs import Alternative, PromptToken, TokenLogprob, ToolCall
from pocketllm.text.detokenizer import Detokenizer
from pocketllm.text.reasoning import ReasoningMarkers
from pocketllm.text.stop import StopMatcher, StopSequences
from pocketllm.text.tokenizer import Tokenizer
from pocketllm.text.tool_parsers.base import ToolParser


@dataclass(frozen=True, slots=True)
class Reading:
    """How the choices of one request are read.

    Args:
        tokenizer: of the checkpoint.
        stop: the request's stop sequences, matched against the answer and not against reasoning.
        reasoning: markers of a model that reasons, in a chat.
        is_reasoning: whether the prompt ends within the reasoning.
        parser: makes the parser of one choice's tool calls.
        call_id: token with which a call begins; within the reasoning it ends that.
        has_logprobs: whether log probabilities were asked for.
        is_streamed: whether they are handed out as the answer goes on.
        echoes: for each prompt the text with which its answers begin; none without echo.
        skips_newlines: whether newlines before the answer are no part of it even where no reasoning comes before them.
    """

    tokenizer: Tokenizer
    stop: StopSequences | None = None
    reasoning: ReasoningMarkers | None = None
    is_reasoning: bool = False
    parser: Callable[[], ToolParser] | None = None
    call_id: int | None = None
    has_logprobs: bool = False
    is_streamed: bool = False
    echoes: tuple[str, ...] = ()
    skips_newlines: bool = False


class Piece(NamedTuple):
    """What some tokens add to a choice."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()


class Answer:
    """One choice as its ids arrive. However they are cut into steps, the pieces joined are the same.

    Args:
        reading: of the request.
    """

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._detokenizer = Detokenizer(reading.tokenizer)
        self._stop = StopMatcher(reading.stop) if reading.stop is not None else None
        self._parser = reading.parser() if reading.parser is not None else None
        self._reasoning = _Trimmed()
        self._is_reasoning = reading.is_reasoning
        self._may_reason = reading.reasoning is not None  # until the answer has begun
        self._follows_reasoning = reading.skips_newlines  # the newlines that set an answer apart from its reasoning are of neither
        self._num_characters = 0  # of the answer, those newlines and what a stop sequence cuts included
        self._num_trimmed = 0
        self._ranked: list[_Ranked] = []
        self._num_told = 0  # of those, by take_logprobs
        self.reasoning_tokens = 0
        self.has_reasoning = reading.is_reasoning

    @property
    def is_stopped(self) -> bool:
        """Whether a stop sequence has ended the answer: nothing that follows is part of it."""
        return self._stop is not None and self._stop.is_matched

    def feed(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> Piece:
        """What `token_ids` add; `logprobs` has one entry for each of them where they were asked for."""
        if not self._may_reason and not self._reading.has_logprobs:
            return Piece(self._answer(self._detokenizer.step(token_ids)))
        text, reasoning = "", ""
        for index, token_id in enumerate(token_ids):
            if self.is_stopped:
                break
            begins = self._num_characters
            was_reasoning = self._is_reasoning
            more, thought = self._token(token_id)
            text += more
            reasoning += thought
            if self._reading.has_logprobs:
                in_answer = not self._is_reasoning and (not was_reasoning or token_id == self._reading.call_id)
                self._ranked.append(_Ranked(token_id, logprobs[index], begins if in_answer else -1, self._num_characters))
        return Piece(text, reasoning)

    def finish(self) -> Piece:
        """The answer has ended: what was held back, and the calls."""
        text = ""
        if self._is_reasoning:
            return Piece("", self._reasoning.feed(self._detokenizer.finish()))
        if not self.is_stopped:
            text = self._answer(self._detokenizer.finish())
        if self._stop is not None:
            text += self._parse(self._stop.finish())
        if self._parser is None:
            return Piece(text)
        end = self._parser.finish()
        return Piece(text + end.text, "", end.calls)

    def logprobs(self) -> tuple[TokenLogprob, ...] | None:
        """One entry a token of the choice, once it has ended; None where they were not asked for."""
        if not self._reading.has_logprobs:
            return None
        end = self._num_trimmed + self._stop.length if self._stop is not None and self._stop.is_matched else None
        tokenizer = self._reading.tokenizer
        return tuple(ranked.entry(tokenizer, end) for ranked in self._ranked if end is None or ranked.begins < end)

    def take_logprobs(self, *, is_over: bool) -> tuple[TokenLogprob, ...]:
        """Of a stream: those of `logprobs` that nothing can change any more and that were not taken before; all that are left once the answer `is_over`."""
        if not (self._reading.has_logprobs and self._reading.is_streamed):
            return ()
        settled = self._num_characters if self._stop is None else self._num_trimmed + self._stop.length
        end = settled if self.is_stopped else None
        taken = []
        for ranked in self._ranked[self._num_told :]:
            if end is None and not is_over and ranked.begins >= 0 and ranked.ends > settled:
                break
            self._num_told += 1
            if end is None or ranked.begins < end:
                taken.append(ranked.entry(self._reading.tokenizer, end))
        return tuple(taken)

    def _token(self, token_id: int) -> tuple[str, str]:
        """The text and the reasoning that one token adds."""
        markers = self._reading.reasoning
        if self._is_reasoning:
            assert markers is not None
            if token_id not in (markers.end_id, self._reading.call_id):
                self.reasoning_tokens += 1
                return "", self._reasoning.feed(self._detokenizer.step((token_id,)))
            thought = self._reasoning.feed(self._detokenizer.finish())
            self._is_reasoning = self._may_reason = False
            self._follows_reasoning = True
            if token_id == markers.end_id:
                self.reasoning_tokens += 1
                return "", thought
            return self._answer(self._detokenizer.step((token_id,))), thought
        if self._may_reason and markers is not None and token_id == markers.start_id:
            self._is_reasoning = self.has_reasoning = True
            self.reasoning_tokens += 1
            return "", ""
        self._may_reason = False
        return self._answer(self._detokenizer.step((token_id,))), ""

    def _answer(self, text: str) -> str:
        """What `text` adds to the answer, once the newlines before it, the stop sequences and the calls are taken out."""
        self._num_characters += len(text)
        if self._follows_reasoning and text:
            rest = text.lstrip("\n")
            self._num_trimmed += len(text) - len(rest)
            self._follows_reasoning = not rest
            text = rest
        return self._parse(text if self._stop is None else self._stop.feed(text))

    def _parse(self, text: str) -> str:
        return text if self._parser is None else self._parser.feed(text)


class _Trimmed:
    """A text without the newlines around it."""

    def __init__(self) -> None:
        self._has_begun = False
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text if self._has_begun else text.lstrip("\n")
        settled = text.rstrip("\n")
        self._has_begun = self._has_begun or bool(settled)
        self._held = text[len(settled) :]
        return settled


@dataclass(frozen=True, slots=True)
class _Ranked:
    """A token with its log probabilities: characters `begins` to `ends` of the answer, or, with -1, none of it."""

    token_id: int
    logprobs: TokenLogprobs
    begins: int
    ends: int

    def entry(self, tokenizer: Tokenizer, end: int | None) -> TokenLogprob:
        token, spelled = _spelling(tokenizer, self.token_id)
        if end is not None and self.begins >= 0 and end <= self.ends:  # at its end too, where it may hold the first bytes of one character more
            spelled = _first_characters(spelled, end - self.begins)
            token = spelled.decode("utf-8", "replace")
        return TokenLogprob(token, spelled, self.logprobs.logprob, self.token_id, tuple(_alternative(tokenizer, *one) for one in self.logprobs.top))


def prompt_tokens(tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> tuple[PromptToken, ...]:
    """The tokens of a prompt, `logprobs` being those of all but the first."""
    found = []
    for token_id, ranks in zip(token_ids, (None, *logprobs), strict=True):
        token, spelled = _spelling(tokenizer, token_id)
        top = () if ranks is None else tuple(_alternative(tokenizer, *one) for one in ranks.top)
        found.append(PromptToken(token, spelled, token_id, None if ranks is None else ranks.logprob, top))
    return tuple(found)


def _alternative(tokenizer: Tokenizer, token_id: int, logprob: float) -> Alternative:
    token, spelled = _spelling(tokenizer, token_id)
    return Alternative(token, spelled, logprob, token_id)


def _spelling(tokenizer: Tokenizer, token_id: int) -> tuple[str, bytes]:
    spelled = tokenizer.token_bytes(token_id)
    if spelled:
        return spelled.decode("utf-8", "replace"), spelled
    return tokenizer.token(token_id) or f"<{token_id}>", b""  # a control token, or padding of the embedding


def _first_characters(data: bytes, count: int) -> bytes:
    """The bytes of the first `count` characters that end in `data`; the first may have begun before it."""
    position = 0
    for _ in range(count):
        position += 1
        while position < len(data) and data[position] & 0xC0 == 0x80:
            position += 1
    return data[:position]
