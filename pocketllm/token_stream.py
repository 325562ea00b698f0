"""The events of one request, for a blocking loop and for an event loop. Detokenizing happens here, on the reader's side."""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pocketllm.active_request import ActiveRequest, Prepared
from pocketllm.answer_reader import AnswerReader, Item, unfinished
from pocketllm.backends.base import StepOutput
from pocketllm.errors import PocketLLMError
from pocketllm.inbox import Inbox, Mailbox
from pocketllm.outputs import GenerationOutput, TokenEvent
from pocketllm.protocol.request import GenerationRequest

if TYPE_CHECKING:
    from pocketllm.generation import GenerationService

INLINE_CHARACTERS = 8192  # texts of so many, or as many ids, are prepared in less time than a thread takes to be woken


class TokenStream(Iterator[TokenEvent]):
    """The events of one request, read by a blocking loop. Closing it early cancels the request."""

    def __init__(self, service: GenerationService, requests: Sequence[GenerationRequest]) -> None:
        self.request_id = requests[0].request_id
        self._active: ActiveRequest | None = None  # until submitted: a refused request must not cancel an active one of the same id
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._is_over = True
        active = service.activate(self.request_id)
        try:
            prepared = service.prepare(requests)
            self._reader = AnswerReader(prepared, active.cancel_row)
        except BaseException:
            active.drop()
            raise
        items = self._items
        active.submit(prepared, lambda index, step: items.put((index, step)))
        self._events: deque[TokenEvent] = deque()
        self._active = active
        self._is_over = False

    def __next__(self) -> TokenEvent:
        """The next event. The choices that do not fail come to their end before a failure is raised.

        Raises:
            RequestCancelledError: the request was cancelled.
            PocketLLMError: a choice failed in the engine.
        """
        while not self._is_over:
            if self._events:
                return self._events.popleft()
            if self._reader.is_done:
                self._is_over = True
                if self._reader.failure is not None:
                    raise self._reader.failure
                break
            items = [self._items.get()]
            while not self._items.empty():
                items.append(self._items.get())
            self._events.extend(event for event in self._reader.read(items) if _says_something(event, self._reader))
        raise StopIteration

    def result(self) -> GenerationOutput:
        """Read to the end and return the finished choices. Raises as `__next__` does where there is none, and RequestCancelledError after `close`."""
        try:
            for _ in self:
                pass
        except PocketLLMError:
            pass  # `output` raises it, unless other choices have finished
        if not self._reader.is_done:
            raise unfinished(self.request_id)
        return self._reader.output()

    def close(self) -> None:
        """Cancel the request unless it has finished."""
        self._is_over = True
        if self._active is not None:
            self._active.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncTokenStream(AsyncIterator[TokenEvent]):
    """The events of one request, read by an event loop. Closing it early, or cancelling the task that reads it, cancels the request."""

    def __init__(self, service: GenerationService, requests: Sequence[GenerationRequest]) -> None:
        self.request_id = requests[0].request_id
        self._service = service
        self._requests = requests
        self._active: ActiveRequest | None = None
        self._reader: AnswerReader | None = None
        self._mailbox = Mailbox()
        self._events: deque[TokenEvent] = deque()
        self._is_over = False

    async def start(self) -> None:
        """Prepare and submit the request, once; later calls do nothing. Raises what `prepare` and `Backend.submit` raise."""
        if self._active is not None or self._is_over:
            return
        self._active = active = self._service.activate(self.request_id)
        try:
            try:
                prepared = await self._prepare()
                reader = AnswerReader(prepared, active.cancel_row)
            except BaseException:
                active.drop()
                raise
            if self._is_over:  # closed meanwhile
                active.drop()
                return
            self._reader = reader
            inbox = self._service.inbox()
            inbox.expect(self._mailbox)
            try:
                active.submit(prepared, _put_on(inbox, self._mailbox, active))
            except BaseException:
                inbox.forget(self._mailbox)
                raise
        except BaseException:
            self._is_over = True
            raise

    async def _prepare(self) -> Prepared:
        requests, sampling = self._requests, self._requests[0].sampling  # which they share
        characters = sum(len(request.prompt) + len(request.suffix) for request in requests) + sum(map(len, sampling.bad_words))
        num_ids = len(sampling.logit_bias or ()) + len(sampling.allowed_token_ids or ()) + len(sampling.stop_token_ids)
        if characters + num_ids <= INLINE_CHARACTERS and not any(request.form or request.tools for request in requests):
            return self._service.prepare(requests)
        return await asyncio.to_thread(self._service.prepare, requests)

    @property
    def is_done(self) -> bool:
        """Whether every event has been read, and a failure raised, or the stream was closed."""
        return self._is_over or (self._reader is not None and self._reader.is_done and self._reader.failure is None and not self._events)

    async def next_events(self, until: float | None = None) -> list[TokenEvent]:
        """What has come, one event a choice; empty at time `until` of the event loop, at the end, and sometimes for no reason. Raises as `__anext__` does."""
        if self._active is None:
            await self.start()
        if self._is_over or self._reader is None:
            return []
        if self._events:
            events = list(self._events)
            self._events.clear()
            return events
        if self._reader.is_done:
            self._is_over = True
            if self._reader.failure is not None:
                raise self._reader.failure
            return []
        if not self._mailbox.items:
            try:
                await self._mailbox.wait(until)
            except asyncio.CancelledError:
                self._close()
                raise
        items = self._mailbox.take()
        if self._reader.prepared.reading.is_streamed and any(step.prompt_logprobs for _, step in items):
            found = await asyncio.to_thread(self._reader.read, items)  # it spells the prompt, which may be long
        else:
            found = self._reader.read(items)
        return [event for event in found if event.token_ids or _says_something(event, self._reader)]

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises as TokenStream does."""
        while not self._events:
            events = await self.next_events()
            if not events and (self._is_over or self._reader is None):
                raise StopAsyncIteration
            self._events.extend(events)
        return self._events.popleft()

    async def result(self) -> GenerationOutput:
        """Read to the end and return the finished choices. Raises as TokenStream does."""
        try:
            async for _ in self:
                pass
        except PocketLLMError:
            if self._reader is None or not self._reader.is_done:
                raise
        if self._reader is None or not self._reader.is_done:
            raise unfinished(self.request_id)
        return await self._output(self._reader)

    async def finished(self) -> GenerationOutput | None:
        """The choices that have finished so far, or None: what a request that ran out of time has to show."""
        try:
            return None if self._reader is None else await self._output(self._reader)
        except PocketLLMError:
            return None

    async def _output(self, reader: AnswerReader) -> GenerationOutput:
        if not reader.has_logprobs:
            return reader.output()
        return await asyncio.to_thread(reader.output)  # 4,000 tokens with 20 alternatives each take 0.3 s to spell

    async def aclose(self) -> None:
        """Cancel the request unless it has finished."""
        self._close()

    def __del__(self) -> None:
        # A loop that was left with `break` has nobody else to close the stream.
        self._close()

    def _close(self) -> None:
        self._is_over = True
        self._mailbox.stop_timer()
        if self._active is not None:
            self._active.cancel()


def _put_on(inbox: Inbox, mailbox: Mailbox, active: ActiveRequest) -> Callable[[int, StepOutput], None]:
    loop = asyncio.get_running_loop()

    def put(index: int, step: StepOutput) -> None:
        if loop.is_closed():  # nobody reads on
            active.cancel()
            return
        try:
            inbox.put(mailbox, (index, step))
        except RuntimeError:  # it was closed in this moment
            active.cancel()

    return put


def _says_something(event: TokenEvent, reader: AnswerReader) -> bool:
    """Whether a reader is told of `event`: not of the end of a choice that has failed, whose failure is raised."""
    return bool(event.token_ids) or event.finish_reason is not None or reader.failure is None
