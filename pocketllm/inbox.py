"""The way of steps from the engine's thread to the readers on an event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque

from pocketllm.answer_reader import Item

_SLICE = 4  # readers woken in one turn of the loop
_PAUSE = 0.001  # seconds, between two turns, while a request waits for its first token
_PAUSES = 3  # most of them in one delivery
_REST = 1.5  # of the CPU time that the delivery took; waiting for a core, as on a machine that does more than this, earns none
_LEAST_REST, _MOST_REST = 0.0005, 0.01  # seconds; less is not worth a timer, and one reader's heavy work must not stop the others for long


class Inbox:
    """Takes the steps of all requests to one event loop, waking it once for all that came meanwhile.

    A delivery wakes its readers a few at a time, and pauses while a submitted request waits for its first token; a loop that it kept busy
    leaves further steps lying for a while. So requests, whose first tokens never wait, and everything else get their turn, and readers find
    several steps at once, which cost little more than one.

    Args:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._firsts: deque[tuple[Mailbox, Item]] = deque()
        self._items: deque[tuple[Mailbox, Item]] = deque()
        self._is_called = False  # set by the engine's thread, cleared by the loop's
        self._is_resting = False
        self._expected: set[Mailbox] = set()

    def expect(self, mailbox: Mailbox) -> None:
        """A request is being submitted, and its first step is to come. Called on the loop's thread."""
        self._expected.add(mailbox)

    def forget(self, mailbox: Mailbox) -> None:
        """It was not submitted after all."""
        self._expected.discard(mailbox)

    def put(self, mailbox: Mailbox, item: Item) -> None:
        """Deliver `item`. Called on the engine's thread.

        Raises:
            RuntimeError: the loop is closed, so nobody reads.
        """
        if not mailbox.has_post:
            mailbox.has_post = True
            self._firsts.append((mailbox, item))
            self._loop.call_soon_threadsafe(self._deliver_firsts)
            return
        self._items.append((mailbox, item))
        if not self._is_called:  # after the append, and cleared before the items are counted: so none is left lying
            self._is_called = True
            self._loop.call_soon_threadsafe(self._answer_call)

    def _deliver_firsts(self) -> None:
        while self._firsts:
            mailbox, item = self._firsts.popleft()
            self._expected.discard(mailbox)
            mailbox.put(item)

    def _answer_call(self) -> None:
        if not self._is_resting:  # else the end of the rest does
            self._deliver()

    def _deliver(self) -> None:
        began = time.thread_time()
        self._is_called = False
        count = len(self._items)  # a row's first step was sent before any of these, so it is among the firsts by now
        self._deliver_firsts()
        readers: dict[Mailbox, None] = {}
        for _ in range(count):
            mailbox, item = self._items.popleft()
            mailbox.items.append(item)
            readers[mailbox] = None
        self._wake(deque(readers), _PAUSES, began)

    def _wake(self, readers: deque[Mailbox], pauses: int, began: float) -> None:
        """Wake some of `readers`, and the others after a turn of the loop, or, while a new request waits, after a pause that leaves the processor to it."""
        for _ in range(min(_SLICE, len(readers))):
            readers.popleft().wake()
        if not readers:
            self._loop.call_soon(self._rest, began)  # which comes after the readers that have been woken
        elif self._expected and pauses:
            self._loop.call_later(_PAUSE, self._wake, readers, pauses - 1, began)
        else:
            self._loop.call_soon(self._wake, readers, pauses, began)

    def _rest(self, began: float) -> None:
        rest = min(_REST * (time.thread_time() - began), _MOST_REST)
        if rest >= _LEAST_REST:
            self._is_resting = True
            self._loop.call_later(rest, self._end_rest)

    def _end_rest(self) -> None:
        self._is_resting = False
        if self._items:
            self._deliver()


class Mailbox:
    """Steps for one reader on an event loop."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.has_post = False  # since anything was sent, be it still on its way
        self._loop: asyncio.AbstractEventLoop | None = None  # of the reader; asking for it costs a system call
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def put(self, item: Item) -> None:
        """One more step. Called on the loop's thread."""
        self.items.append(item)
        self.wake()

    async def wait(self, until: float | None) -> None:
        """Return once there is an item, or at time `until` of the loop; sometimes before, with neither."""
        loop = self._loop = self._loop or asyncio.get_running_loop()
        self._waiter = loop.create_future()
        # A timer a token would cost more than the token: one that is set, for an earlier time, is left to wake the reader for nothing.
        if until is not None and (self._timer is None or until < self._timer.when()):
            self.stop_timer()
            self._timer = loop.call_at(until, self._ring)
        try:
            await self._waiter
        finally:
            self._waiter = None

    def take(self) -> list[Item]:
        """What has come and was not taken."""
        items, self.items = self.items, []
        return items

    def stop_timer(self) -> None:
        """Nobody will wait any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def wake(self) -> None:
        """There is something to read."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _ring(self) -> None:
        self._timer = None
        self.wake()
