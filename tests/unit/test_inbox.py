"""The way of steps from an engine's thread to an event loop: complete, in order, and no first step waits."""

from __future__ import annotations

import asyncio
import random
import threading
import time

import pytest

from pocketllm.backends.base import StepOutput
from pocketllm.inbox import Inbox, Mailbox


def step(number: int) -> StepOutput:
    return StepOutput("r", (number,), number)


async def read(mailbox: Mailbox, count: int, busy: float = 0.0) -> list[int]:
    """The numbers of the next `count` steps, as they came."""
    found: list[int] = []
    while len(found) < count:
        if not mailbox.items:
            await mailbox.wait(None)
        found += [item[1].num_generated for item in mailbox.take()]
        end = time.thread_time() + busy
        while time.thread_time() < end:
            pass
    return found


def test_every_step_comes_in_order_while_the_loop_is_busy() -> None:
    async def run() -> list[list[int]]:
        inbox, mailboxes, count = Inbox(asyncio.get_running_loop()), [Mailbox() for _ in range(8)], 500
        draw = random.Random(0)

        def engine() -> None:
            for number in range(count):
                for mailbox in mailboxes:
                    inbox.put(mailbox, (0, step(number)))
                if draw.random() < 0.1:
                    time.sleep(0.001)

        thread = threading.Thread(target=engine)
        thread.start()
        found = await asyncio.wait_for(asyncio.gather(*(read(mailbox, count, busy=0.0002) for mailbox in mailboxes)), 30)
        thread.join()
        return found

    assert asyncio.run(run()) == [list(range(500))] * 8


def test_a_first_step_does_not_wait_for_the_rest_of_a_busy_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pocketllm.inbox._MOST_REST", 1.0)

    async def run() -> tuple[float, float]:
        inbox, old, new = Inbox(asyncio.get_running_loop()), Mailbox(), Mailbox()
        inbox.put(old, (0, step(0)))
        await read(old, 1)
        inbox.put(old, (0, step(1)))
        await read(old, 1, busy=0.5)  # the loop now rests for about as long
        await asyncio.sleep(0)
        began = time.perf_counter()
        inbox.put(old, (0, step(2)))
        inbox.put(new, (0, step(0)))
        await read(new, 1)
        first = time.perf_counter() - began
        assert await read(old, 1) == [2]
        return first, time.perf_counter() - began

    first, later = asyncio.run(run())
    assert first < 0.2
    assert later > 0.3


def test_a_rest_has_a_limit() -> None:
    async def run() -> float:
        inbox, mailbox = Inbox(asyncio.get_running_loop()), Mailbox()
        inbox.put(mailbox, (0, step(0)))
        await read(mailbox, 1)
        inbox.put(mailbox, (0, step(1)))
        await read(mailbox, 1, busy=0.6)
        began = time.perf_counter()
        inbox.put(mailbox, (0, step(2)))
        await read(mailbox, 1)
        return time.perf_counter() - began

    assert asyncio.run(run()) < 0.3


def test_an_idle_loop_does_not_rest() -> None:
    async def run() -> float:
        inbox, mailbox = Inbox(asyncio.get_running_loop()), Mailbox()
        began = time.perf_counter()
        for number in range(1000):
            inbox.put(mailbox, (0, step(number)))
            assert await read(mailbox, 1) == [number]
        return time.perf_counter() - began

    assert asyncio.run(run()) < 1.0


def test_waiting_ends_at_its_time_whatever_timer_is_left_over() -> None:
    async def run() -> float:
        loop, mailbox = asyncio.get_running_loop(), Mailbox()
        inbox = Inbox(loop)
        inbox.put(mailbox, (0, step(0)))
        await mailbox.wait(loop.time() + 0.05)  # ended by the step; its timer stays
        assert mailbox.take()
        began, until = time.perf_counter(), loop.time() + 0.2
        while loop.time() < until:
            await mailbox.wait(until)
        mailbox.stop_timer()
        return time.perf_counter() - began

    assert 0.19 <= asyncio.run(run()) < 1.0


@pytest.mark.parametrize("end", ["comes", "is forgotten", "stays away"])
def test_readers_that_are_due_let_a_new_request_go_first(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """And they do not wait for one that stays away, as one does that is queued behind a full batch."""
    monkeypatch.setattr("pocketllm.inbox._PAUSE", 0.2)

    async def run() -> float:
        loop = asyncio.get_running_loop()
        inbox, new, readers = Inbox(loop), Mailbox(), [Mailbox() for _ in range(20)]
        for reader in readers:
            inbox.put(reader, (0, step(0)))
            await read(reader, 1)
        reading = asyncio.gather(*(read(reader, 1) for reader in readers))
        await asyncio.sleep(0)  # until they wait
        inbox.expect(new)
        for reader in readers:
            inbox.put(reader, (0, step(1)))
        start = loop.time()
        if end == "comes":
            inbox.put(new, (0, step(0)))
        elif end == "is forgotten":
            inbox.forget(new)
        await asyncio.wait_for(reading, 10)
        return loop.time() - start

    taken = asyncio.run(run())
    assert taken >= 0.5 if end == "stays away" else taken < 0.5
