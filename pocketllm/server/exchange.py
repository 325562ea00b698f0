"""One generation request over HTTP, from its body to the end of its answer: limits, deadline, disconnect, failures, metrics."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive

from pocketllm.errors import PocketLLMError, QueueFullError, RequestCancelledError, RequestTimeoutError
from pocketllm.outputs import GenerationOutput, TokenEvent
from pocketllm.protocol.conditions import whole_number
from pocketllm.protocol.field import Endpoint
from pocketllm.protocol.fields import check_fields
from pocketllm.protocol.request import GenerationRequest
from pocketllm.protocol.responses import DONE, KEEP_ALIVE, AnswerBody, ChatBody, CompletionBody, dump, dump_in_pieces, error_of, sse
from pocketllm.server.body import parse_json, read_body
from pocketllm.server.metrics import Outcome, RequestClock
from pocketllm.server.sse import ClientDisconnected, EventStream, Write, unless_disconnected
from pocketllm.server.state import ServerState

logger = logging.getLogger("pocketllm.server")

_INLINE_BYTES = 2**16  # a body of more may take longer to understand, up to seconds, than streams should stand still
_UNREAD_SECONDS = 5  # past the deadline, for the error event to reach a client that reads

Build = Callable[[dict[str, Any], ServerState], Sequence[GenerationRequest]]
_BODIES: Mapping[Endpoint, type[ChatBody] | type[CompletionBody]] = {"chat": ChatBody, "completions": CompletionBody}


async def generate(http: Request, endpoint: Endpoint, build: Build) -> Response:
    """The response to a generation request.

    Args:
        http: the request; its body has not been read.
        endpoint: whose fields and answers are used.
        build: makes one GenerationRequest a prompt of a body whose fields have passed.

    Raises:
        PocketLLMError: the request is refused, or has failed before its answer began.
    """
    state: ServerState = http.app.state.server
    clock = RequestClock(state.metrics)
    try:
        features = state.features
        deadline = asyncio.get_running_loop().time() + state.args.request_timeout if state.args.request_timeout else None
        raw = await read_body(http, state.args.max_body_bytes, deadline)

        def understand() -> tuple[dict[str, Any], Sequence[GenerationRequest]]:
            body = parse_json(raw)
            check_fields(body, endpoint, features)
            return body, build(body, state)

        body, requests = understand() if len(raw) <= _INLINE_BYTES else await asyncio.to_thread(understand)
        request_id = requests[0].request_id
        include_usage = (body.get("stream_options") or {}).get("include_usage") is True
        answer = _BODIES[endpoint](
            request_id,
            state.model_name,
            int(time.time()),
            include_usage=include_usage,
            features=features,
            prompt_logprobs=whole_number(body.get("prompt_logprobs")),
        )
        exchange = _Exchange(state, requests, answer, clock, deadline)
        return await (exchange.stream() if body.get("stream") else exchange.whole(http.receive))
    except (ClientDisconnected, ClientDisconnect):
        clock.end("cancelled")
        return Response(status_code=499)
    except BaseException as error:
        clock.end(_outcome(error))
        raise


class _Exchange:
    def __init__(
        self,
        state: ServerState,
        requests: Sequence[GenerationRequest],
        answer: AnswerBody,
        clock: RequestClock,
        deadline: float | None,
    ) -> None:
        self._state = state
        self._id = requests[0].request_id
        self._num_choices = sum(request.sampling.num_candidates for request in requests)
        self._answer = answer
        self._clock = clock
        self._headers = {"x-request-id": self._id}
        self._deadline = deadline
        self._keep_alive = state.args.keep_alive_interval if "keep_alive" in state.features else 0.0
        self._reason: Outcome = "stop"
        self._tokens = state.service.stream_async(*requests)
        state.admit(self._id, self._num_choices)

    async def whole(self, receive: Receive) -> Response:
        """The finished answer: the choices that were done at the deadline. Raises what generation raises, and ClientDisconnected."""
        try:
            async with asyncio.timeout_at(self._deadline):
                output = await unless_disconnected(receive, self._collect())
        except TimeoutError:
            finished = await self._tokens.finished()
            if finished is None:
                raise self._timeout() from None
            output = finished
        finally:
            await self._release()
        self._clock.end(output.finish_reason)
        if output.logprobs is None and output.prompt_logprobs is None:
            content = dump(self._answer.whole(output))
        else:  # may be megabytes
            content = await asyncio.to_thread(lambda: dump_in_pieces(self._answer.whole(output)))
        return Response(content, media_type="application/json", headers=self._headers)

    async def stream(self) -> Response:
        """A response that streams the answer. Raises what preparing and submitting raise."""
        try:
            async with asyncio.timeout_at(self._deadline):
                await self._tokens.start()
        except TimeoutError:
            await self._release()
            raise self._timeout() from None
        except BaseException:
            await self._release()
            raise
        unread = self._deadline + _UNREAD_SECONDS if self._deadline is not None else None
        return EventStream(self._write, self._headers, self._close_stream, unread)

    async def _collect(self) -> GenerationOutput:
        await self._tokens.start()
        while not self._tokens.is_done:
            try:
                events = await self._tokens.next_events()
            except PocketLLMError:
                break  # `result` raises it, unless other choices have finished
            for event in events:
                self._clock.event(event)
        return await self._tokens.result()

    async def _write(self, write: Write) -> None:
        """Write the chunks of a stream. A failure is one error event; [DONE] comes last in any case."""
        outcome: Outcome = "cancelled"
        try:
            if opening := self._answer.opening(self._num_choices):
                await write(opening)
            await self._write_events(write)
            outcome = self._reason
        except PocketLLMError as error:
            outcome = _outcome(error)
            if error.status_code == 500:
                logger.error("Request %s failed", self._id, exc_info=error)
            await write(sse(error_of(error)))
        except Exception:
            logger.exception("Request %s failed", self._id)
            outcome = "error"
            await write(sse(error_of(PocketLLMError("The server failed to answer; its log says why."))))
        finally:
            self._clock.end(outcome)
        await write(DONE)

    async def _write_events(self, write: Write) -> None:
        """Write what the events say, and a comment whenever nothing was said for a while, so that no proxy takes the connection for dead."""
        time_of = asyncio.get_running_loop().time
        deadline = self._deadline if self._deadline is not None else math.inf
        patience = self._keep_alive or math.inf
        silence = time_of() + patience
        while not self._tokens.is_done:
            until = min(deadline, silence)
            events = await self._tokens.next_events(until if until < math.inf else None)
            if any(event.prompt_logprobs for event in events):  # may be megabytes
                chunk = await asyncio.to_thread(lambda found: b"".join(map(self._chunk, found)), events)
            else:
                chunk = self._chunk(events[0]) if len(events) == 1 else b"".join(map(self._chunk, events))
            now = time_of()
            is_late = now >= deadline and not self._tokens.is_done
            if not chunk and now >= silence and not is_late:
                chunk = KEEP_ALIVE
            if chunk:
                await write(chunk)
                silence = now + patience
            if is_late:
                raise self._timeout()

    def _chunk(self, event: TokenEvent) -> bytes:
        self._clock.event(event)
        if event.finish_reason is not None:
            self._reason = event.finish_reason
        return self._answer.chunk(event)

    async def _close_stream(self) -> None:
        self._clock.end("cancelled")  # for a client that left before the first event; else it has ended
        await self._release()

    async def _release(self) -> None:
        await self._tokens.aclose()
        self._state.release(self._id)

    def _timeout(self) -> RequestTimeoutError:
        seconds = self._state.args.request_timeout
        return RequestTimeoutError(
            f"The request did not finish within {seconds:g} seconds. Ask for fewer tokens, or start the server with a larger --request-timeout."
        )


def _outcome(error: BaseException) -> Outcome:
    if isinstance(error, (RequestCancelledError, asyncio.CancelledError)):
        return "cancelled"
    if isinstance(error, RequestTimeoutError):
        return "timeout"
    if isinstance(error, QueueFullError):
        return "rejected"
    return "refused" if isinstance(error, PocketLLMError) and error.status_code < 500 else "error"
