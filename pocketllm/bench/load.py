"""The load generator: requests go out at their times, or one after another from so many clients, and the client watches itself meanwhile."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pocketllm.bench.endpoint import Endpoint
from pocketllm.bench.exchange import Exchange
from pocketllm.bench.stream_client import StreamClient
from pocketllm.bench.workload import Arrivals, Ask

Clock = Callable[[], float]
T = TypeVar("T")


@dataclass
class ClientWatch:
    """How the client itself did.

    Args:
        seconds: from the first request to the end of the last one.
        cpu_seconds: that the client's thread used meanwhile.
        lags: how late the event loop came to each of its ticks, in seconds; a timer's own coarseness, up to about 1 ms, is in it.
    """

    seconds: float = 0.0
    cpu_seconds: float = 0.0
    lags: list[float] = field(default_factory=list)


async def run_load(
    endpoint: Endpoint,
    asks: Sequence[Ask],
    arrivals: Arrivals,
    *,
    seed: int = 0,
    timeout: float = 600.0,
    tick: float = 0.01,
    clock: Clock = time.perf_counter,
    on_end: Callable[[], None] = lambda: None,
) -> tuple[list[Exchange], ClientWatch]:
    """Send `asks` and return their exchanges, in order, and the watch.

    What comes is kept as it came, some 0.4 KB an event, and is to be read afterwards by `read_answer`.

    Args:
        endpoint: the server.
        asks: what to ask for, in order.
        arrivals: when.
        seed: of the arrivals.
        timeout: most seconds of each request; a longer one is closed and counts as an error.
        tick: seconds between two looks at how late the event loop is.
        clock: seconds; any time goes by it that is measured.
        on_end: called after each request.
    """
    client = StreamClient(endpoint, clock, timeout)
    requests = [endpoint.request(ask) for ask in asks]
    watch = ClientWatch()
    ticking = asyncio.create_task(_tick(watch, tick, clock))
    had_gc = gc.isenabled()
    gc.disable()  # a full collection stops everything for as long as it takes to look through all that was received
    began, cpu = clock(), time.thread_time()
    exchanges = [Exchange(began) for _ in asks]
    try:
        if arrivals.concurrency is not None:
            await _from_clients(client, requests, exchanges, arrivals.concurrency, clock, on_end)
        else:
            await _at_times(client, requests, exchanges, arrivals, seed, clock, on_end)
    finally:
        watch.seconds, watch.cpu_seconds = clock() - began, time.thread_time() - cpu
        ticking.cancel()
        if had_gc:
            gc.enable()
        client.close()
    return exchanges, watch


def run_client(main: Coroutine[Any, Any, T]) -> T:
    """Run a load to its end, on uvloop where it is installed, which halves what the client costs."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def _from_clients(
    client: StreamClient, requests: Sequence[bytes], exchanges: Sequence[Exchange], concurrency: int, clock: Clock, on_end: Callable[[], None]
) -> None:
    pending = iter(zip(requests, exchanges, strict=True))

    async def one_client() -> None:
        for request, exchange in pending:
            exchange.due_at = clock()
            await client.send(request, exchange)
            on_end()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(concurrency, len(requests))):
            group.create_task(one_client())


async def _at_times(
    client: StreamClient,
    requests: Sequence[bytes],
    exchanges: Sequence[Exchange],
    arrivals: Arrivals,
    seed: int,
    clock: Clock,
    on_end: Callable[[], None],
) -> None:
    began = clock()

    async def one_request(request: bytes, exchange: Exchange) -> None:
        await client.send(request, exchange)
        on_end()

    async with asyncio.TaskGroup() as group:
        for request, exchange, after in zip(requests, exchanges, arrivals.times(seed), strict=False):
            exchange.due_at = began + after
            if (early := exchange.due_at - clock()) > 0:
                await asyncio.sleep(early)
            group.create_task(one_request(request, exchange))


async def _tick(watch: ClientWatch, tick: float, clock: Clock) -> None:
    while True:
        before = clock()
        try:
            await asyncio.sleep(tick)
        finally:  # the last one too, in which the load ends
            watch.lags.append(max(0.0, clock() - before - tick))
