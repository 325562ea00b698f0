"""The events of one request, for a blocking loop and for an event loop. Detokenizing happens here, on the reader's side."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pocketllm.backends.base import Backend, EngineRequest, StepOutput
from pocketllm.errors import PocketLLMError, RequestCancelledError
from pocketllm.outputs import ChoiceOutput, FinishReason, GenerationOutput, TokenEvent, Usage
from pocketllm.protocol.request import GenerationRequest
from pocketllm.text.detokenizer import Detokenizer
from pocketllm.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from pocketllm.generation import GenerationService


class _Answer:
    """Builds one request's events and its finished output from StepOutputs."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self._detokenizer = Detokenizer(tokenizer)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self.last: TokenEvent | None = None

    def event(self, step: StepOutput) -> TokenEvent:
        if step.finish_reason == "cancelled":
            raise _cancelled(step.request_id)
        if step.finish_reason == "error":
            if isinstance(step.error, PocketLLMError):
                raise step.error
            reason = next(iter(str(step.error).splitlines()), type(step.error).__name__)  # torch adds lines of stack to its own
            raise PocketLLMError(f"Request {step.request_id} failed in the engine: {reason}") from step.error
        self._cached_tokens = max(self._cached_tokens, step.cached_tokens)
        text = self._detokenizer.step(step.token_ids)
        usage = None
        if step.finish_reason is not None:
            text += self._detokenizer.finish()
            usage = Usage(len(self.request.prompt_token_ids), step.num_generated, self._cached_tokens)
        self._text.append(text)
        self._token_ids.extend(step.token_ids)
        self.last = TokenEvent(step.request_id, text, step.token_ids, step.finish_reason, usage)
        return self.last

    def output(self) -> GenerationOutput:
        if self.last is None or self.last.finish_reason is None or self.last.usage is None:
            raise _unfinished(self.request.request_id)
        reason: FinishReason = self.last.finish_reason
        choice = ChoiceOutput(0, "".join(self._text), tuple(self._token_ids), reason)
        return GenerationOutput(self.request.request_id, (choice,), self.last.usage)


class _Delivery:
    """Takes one request's steps on the engine's thread. It does not know the stream, which can so be collected while the request is active.

    Args:
        put: hands a step to the stream's reader.
    """

    def __init__(self, put: Callable[[StepOutput], object]) -> None:
        self._put = put
        self.ended = False  # from then on the id may be another request's, which a cancel would hit

    def __call__(self, step: StepOutput) -> None:
        self.ended = step.finish_reason is not None
        self._put(step)


class TokenStream(Iterator[TokenEvent]):
    """The events of one request, read by a blocking loop. Closing it early cancels the request."""

    def __init__(self, service: GenerationService, request: EngineRequest) -> None:
        self._done = True  # until submitted: a refused request must not cancel an active one of the same id
        self.request_id = request.request_id
        self._service = service
        self._answer = _Answer(request, service.tokenizer)
        self._steps: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._delivery = _Delivery(self._steps.put)
        service.backend.submit(request, self._delivery)
        self._done = False

    def __next__(self) -> TokenEvent:
        """The next event.

        Raises:
            RequestCancelledError: the request was cancelled.
            PocketLLMError: the request failed in the engine.
        """
        if self._done:
            raise StopIteration
        step = self._steps.get()
        self._done = step.finish_reason is not None
        return self._answer.event(step)

    def result(self) -> GenerationOutput:
        """Read to the end and return the finished answer. Raises as `__next__` does, and RequestCancelledError after `close`."""
        for _ in self:
            pass
        return self._answer.output()

    def close(self) -> None:
        """Cancel the request unless it has finished."""
        if not self._done:
            self._done = True
            if not self._delivery.ended:
                self._service.cancel(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncTokenStream(AsyncIterator[TokenEvent]):
    """The events of one request, read by an event loop. Closing it early, or cancelling the task that reads it, cancels the request."""

    def __init__(self, service: GenerationService, request: GenerationRequest) -> None:
        self.request_id = request.request_id
        self._service = service
        self._request = request
        self._answer: _Answer | None = None
        self._steps: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._delivery: _Delivery | None = None  # once submitted
        self._done = False
        self.is_cancelled = False  # set while the request is being prepared, when the backend does not know it yet

    async def start(self) -> None:
        """Prepare and submit the request, once; later calls do nothing. Raises what `prepare` and `Backend.submit` raise."""
        if self._answer is not None or self._done:
            return
        self._service._preparing.add(self)
        try:
            prepared = await asyncio.to_thread(self._service.prepare, self._request)
            if self._done:
                return  # closed meanwhile
            if self.is_cancelled:
                raise _cancelled(self.request_id)
            self._answer = _Answer(prepared, self._service.tokenizer)
            delivery = _Delivery(_put_on(asyncio.get_running_loop(), self._steps, self._service.backend))
            self._service.backend.submit(prepared, delivery)
            self._delivery = delivery
        except BaseException:
            self._done = True
            raise
        finally:
            self._service._preparing.discard(self)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; 0 before `start`."""
        return 0 if self._answer is None else len(self._answer.request.prompt_token_ids)

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises as TokenStream does."""
        await self.start()
        if self._done or self._answer is None:
            raise StopAsyncIteration
        try:
            step = await self._steps.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._done = step.finish_reason is not None
        return self._answer.event(step)

    async def result(self) -> GenerationOutput:
        """Read to the end and return the finished answer. Raises as TokenStream does."""
        async for _ in self:
            pass
        if self._answer is None:
            raise _unfinished(self.request_id)
        return self._answer.output()

    async def aclose(self) -> None:
        """Cancel the request unless it has finished."""
        self._close()

    def __del__(self) -> None:
        # A loop that was left with `break` has nobody else to close the stream.
        self._close()

    def _close(self) -> None:
        if not self._done:
            self._done = True
            if self._delivery is not None and not self._delivery.ended:
                self._service.cancel(self.request_id)


def _put_on(loop: asyncio.AbstractEventLoop, steps: asyncio.Queue[StepOutput], backend: Backend) -> Callable[[StepOutput], None]:
    def put(step: StepOutput) -> None:
        try:
            loop.call_soon_threadsafe(steps.put_nowait, step)
        except RuntimeError:  # the loop is closed, so nobody reads on
            backend.cancel(step.request_id)

    return put


def _unfinished(request_id: str) -> RequestCancelledError:
    return RequestCancelledError(f"Request {request_id} was closed, or had failed, before its answer was finished.")


def _cancelled(request_id: str) -> RequestCancelledError:
    return RequestCancelledError(f"Request {request_id} was cancelled.")
