"""From the steps of an engine to the events and the finished answer of one request, all its choices together."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from pocketllm.active_request import Prepared, cancelled
from pocketllm.backends.base import EngineRequest, StepOutput, TokenLogprobs
from pocketllm.errors import PocketLLMError, RequestCancelledError
from pocketllm.outputs import ChoiceOutput, FinishReason, GenerationOutput, PromptToken, TokenEvent, ToolCall, ToolCallDelta, Usage
from pocketllm.text.answer import Answer, Reading, prompt_tokens

Item = tuple[int, StepOutput]  # of which choice


class _Choice:
    """One choice: its answer so far, and how it ended."""

    def __init__(self, index: int, row: EngineRequest, reading: Reading, echo: str) -> None:
        self.index = index
        self.answer = Answer(reading)
        self.echo = echo
        self._row = row
        self._reading = reading
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self.has_begun = False
        self.sum_logprobs = 0.0
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.token_ids: list[int] = []
        self.calls: tuple[ToolCall, ...] = ()
        self.finish_reason: FinishReason | None = None
        self.num_generated = 0
        self.cached_tokens = 0
        self.has_ended = False  # with a finish_reason, or in failure

    def output(self) -> ChoiceOutput:
        assert self.finish_reason is not None
        reasoning = "".join(self.reasoning) if self.answer.has_reasoning else None
        return ChoiceOutput(
            self.index,
            "".join(self.text),
            tuple(self.token_ids),
            self.finish_reason,
            reasoning,
            self.calls,
            self.answer.logprobs(),
            self.prompt_logprobs(),
            self.echo,
        )

    @property
    def tells_of_prompt(self) -> bool:
        return bool(self.echo) or self._row.prompt_logprobs is not None

    @property
    def mean_logprob(self) -> float:
        """Of the generated tokens; an answer without any has none, and comes behind all others."""
        return self.sum_logprobs / len(self.token_ids) if self.token_ids else -math.inf

    def begin(self, step: StepOutput) -> None:
        """The first step, which has what is told of the prompt."""
        self.has_begun, self._prompt_logprobs = True, step.prompt_logprobs

    def prompt_logprobs(self) -> tuple[PromptToken, ...] | None:
        if self._row.prompt_logprobs is None:
            return None
        return prompt_tokens(self._reading.tokenizer, self._row.prompt_token_ids, self._prompt_logprobs)


class AnswerReader:
    """Makes events and the finished output of the steps of all choices.

    Args:
        prepared: the request.
        cancel_row: ends a row in the engine, whose answer a stop sequence has ended.
    """

    def __init__(self, prepared: Prepared, cancel_row: Callable[[int], None]) -> None:
        self.prepared = prepared
        self.failure: PocketLLMError | None = None
        self._cancel_row = cancel_row
        echoes = prepared.reading.echoes
        self._choices = [
            _Choice(index, row, prepared.reading, echoes[index // prepared.rows_per_prompt] if echoes else "") for index, row in enumerate(prepared.rows)
        ]
        self._left = len(self._choices)

    @property
    def is_done(self) -> bool:
        """Whether every choice has ended."""
        return self._left == 0

    @property
    def has_logprobs(self) -> bool:
        """Whether the output spells tokens, of which there may be many."""
        return self.prepared.reading.has_logprobs or self.prepared.rows[0].prompt_logprobs is not None

    def read(self, items: Sequence[Item]) -> list[TokenEvent]:
        """What `items` say, one event a choice: steps that have waited are read as one."""
        if len(items) == 1:
            index, step = items[0]
            return self._event(self._choices[index], step)
        steps: dict[int, list[StepOutput]] = {}
        for index, step in items:
            steps.setdefault(index, []).append(step)
        return [event for index, found in steps.items() for event in self._event(self._choices[index], _joined(found))]

    def output(self) -> GenerationOutput:
        """The choices that have finished.

        Raises:
            The first failure, where no choice has finished or the request was cancelled.
        """
        finished = [choice.output() for choice in self._best() if choice.finish_reason is not None]
        if not finished or isinstance(self.failure, RequestCancelledError):
            raise self.failure or unfinished(self.prepared.request_id)
        if self.prepared.num_best is not None:
            finished = [replace(choice, index=index) for index, choice in enumerate(finished)]
        return GenerationOutput(self.prepared.request_id, tuple(finished), self.usage())

    def _best(self) -> list[_Choice]:
        """All candidates, or of each prompt's the best that have finished, best first."""
        wanted, size = self.prepared.num_best, self.prepared.rows_per_prompt
        if wanted is None:
            return self._choices
        best: list[_Choice] = []
        for first in range(0, len(self._choices), size):
            finished = [choice for choice in self._choices[first : first + size] if choice.finish_reason is not None]
            best += sorted(finished, key=lambda choice: -choice.mean_logprob)[:wanted]
        return best

    def usage(self) -> Usage:
        """Token counts of all choices so far."""
        choices = self._choices
        return Usage(
            self.prepared.prompt_tokens,
            sum(choice.num_generated for choice in choices),
            sum(choice.cached_tokens for choice in choices[:: self.prepared.rows_per_prompt]),
            sum(choice.answer.reasoning_tokens for choice in choices),
        )

    def _event(self, choice: _Choice, step: StepOutput) -> list[TokenEvent]:
        if choice.has_ended:
            return []
        answer, token_ids, begins = choice.answer, step.token_ids, not choice.has_begun
        if begins:
            choice.begin(step)
        choice.num_generated = step.num_generated
        choice.cached_tokens = max(choice.cached_tokens, step.cached_tokens)
        choice.token_ids += token_ids
        if self.prepared.num_best is not None:
            choice.sum_logprobs += sum(ranks.logprob for ranks in step.logprobs)
        text = reasoning = ""
        if token_ids and not answer.is_stopped:
            piece = answer.feed(token_ids, step.logprobs)
            text, reasoning = piece.text, piece.reasoning
            if answer.is_stopped and step.finish_reason is None:
                self._cancel_row(choice.index)  # its last step then says how many tokens were generated
        calls: tuple[ToolCallDelta, ...] = ()
        usage = None
        if step.finish_reason is not None:
            choice.has_ended = True
            self._left -= 1
            if (failure := self._failure(step, answer)) is not None:
                self.failure = self.failure or failure
            else:
                piece = answer.finish()
                text += piece.text
                reasoning += piece.reasoning
                choice.calls = piece.calls
                calls = _deltas(piece.calls)
                choice.finish_reason = "tool_calls" if piece.calls else "length" if step.finish_reason == "length" and not answer.is_stopped else "stop"
            if self._left == 0 and self.failure is None:
                usage = self.usage()
        if text:
            choice.text.append(text)
        if reasoning:
            choice.reasoning.append(reasoning)
        logprobs = answer.take_logprobs(is_over=choice.has_ended)
        event = TokenEvent(step.request_id, text, token_ids, choice.finish_reason, usage, choice.index, reasoning, calls, logprobs)
        if not begins or not choice.tells_of_prompt or (choice.has_ended and choice.finish_reason is None):
            return [event]
        reading = self.prepared.reading
        shows_ranks = reading.is_streamed and (reading.has_logprobs or not reading.echoes)  # an echo that is ranked because nothing is generated shows none
        return [replace(event, echo=choice.echo, prompt_logprobs=choice.prompt_logprobs() if shows_ranks else None)]

    def _failure(self, step: StepOutput, answer: Answer) -> PocketLLMError | None:
        if answer.is_stopped:  # and so complete, whatever became of its row since
            return None
        if step.finish_reason == "cancelled":
            return cancelled(self.prepared.request_id)
        if step.finish_reason != "error":
            return None
        if isinstance(step.error, PocketLLMError):
            return step.error
        reason = next(iter(str(step.error).splitlines()), type(step.error).__name__)  # torch adds lines of stack to its own
        failure = PocketLLMError(f"Request {self.prepared.request_id} failed in the engine: {reason}")
        failure.__cause__ = step.error
        return failure


def _joined(steps: Sequence[StepOutput]) -> StepOutput:
    """Several steps of one row as one."""
    if len(steps) == 1:
        return steps[0]
    return replace(
        steps[-1],
        token_ids=tuple(token_id for step in steps for token_id in step.token_ids),
        cached_tokens=max(step.cached_tokens for step in steps),
        logprobs=tuple(ranks for step in steps for ranks in step.logprobs),
        prompt_logprobs=steps[0].prompt_logprobs,
    )


def _deltas(calls: Sequence[ToolCall]) -> tuple[ToolCallDelta, ...]:
    """A finished answer's calls as a stream has them. They come at its end, since any of what follows a call may undo it."""
    return tuple(delta for index, call in enumerate(calls) for delta in (ToolCallDelta(index, "", call.id, call.name), ToolCallDelta(index, call.arguments)))


def unfinished(request_id: str) -> RequestCancelledError:
    """The error of a request whose answer is asked for and has no end."""
    return RequestCancelledError(f"Request {request_id} was closed, or had failed, before its answer was finished.")
