"""Time that passes only while nobody has anything to do: a real server and its real clients in one event loop, with exact times."""

from __future__ import annotations

import asyncio
import selectors
import socket
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from pocketllm.backends.base import EngineRequest, ProgressCallback, StepCallback, StepOutput
from pocketllm.backends.fake import FakeBackend

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as no socket has anything to say.

    Every connection goes to `listener`, a Unix socket: what one end writes, the other can read at once, so nothing is under way when time jumps.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.listener: socket.socket | None = None
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    async def create_connection(self, protocol_factory: Callable[[], Any], *_address: Any, **_options: Any) -> tuple[Any, Any]:
        assert self.listener is not None
        return await self.create_unix_connection(protocol_factory, self.listener.getsockname())


class _Selector(selectors.DefaultSelector):  # type: ignore[misc,valid-type]  # whatever class the platform has
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        if ready := super().select(0):
            return ready
        self._loop.now += timeout
        return []


def run_in_virtual_time(main: Callable[[VirtualTimeLoop], Coroutine[Any, Any, T]]) -> T:
    """Run `main` on a loop of its own."""
    loop = VirtualTimeLoop()
    try:
        return loop.run_until_complete(main(loop))
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


class ScheduledBackend(FakeBackend):
    """The fake backend, with an event loop's timers in place of its thread. It notes when it made which tokens: the schedule's truth.

    Args:
        loop: whose time it goes by.
        period: seconds between two steps, of step number k since the engine was last idle.
        options: of FakeBackend.
    """

    def __init__(self, loop: VirtualTimeLoop, period: Callable[[int], float], **options: Any) -> None:
        super().__init__(**options)
        self._loop, self._period = loop, period
        self._number, self._is_ticking = 0, False
        self.submitted: dict[str, float] = {}
        self.steps: dict[str, list[tuple[float, int]]] = {}

    def load(self, progress: ProgressCallback) -> None:
        super().load(progress)
        super().close()  # its thread; the rows are stepped from here
        self._health = type(self._health)("ready")

    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        key = request.request_id
        self.submitted[key], self.steps[key] = self._loop.now, []

        def stamped(step: StepOutput) -> None:
            if step.token_ids:
                self.steps[key].append((self._loop.now, len(step.token_ids)))
            on_step(step)

        super().submit(request, stamped)
        if not self._is_ticking:
            self._is_ticking, self._number = True, 0
            self._loop.call_later(self._period(0), self._tick)

    def _tick(self) -> None:
        self._admit()
        self._step()
        self._number += 1
        self._is_ticking = bool(self._running or self._waiting)
        if self._is_ticking:
            self._loop.call_later(self._period(self._number), self._tick)
