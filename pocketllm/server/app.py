"""The HTTP application: which path goes where, who may call it, and one form for every error."""

from __future__ import annotations

import hmac
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pocketllm.config import ServerArgs
from pocketllm.errors import BackendUnavailableError, PocketLLMError
from pocketllm.protocol.refusals import summary
from pocketllm.protocol.responses import error_body, error_of
from pocketllm.server.chat import chat_completions
from pocketllm.server.completions import completions
from pocketllm.server.operations import alive, cancel_request, health, json_response, metrics, model, models, ready
from pocketllm.server.state import Load, ServerState

logger = logging.getLogger("pocketllm.server")

_REQUEST_ID = re.compile(rb"[!-~]{1,128}")
OPEN_PATHS = frozenset({"/alive", "/ready", "/health"})

# Everything that the server answers, the busiest first; any other path is a 404. MODEL_BY_ID is left out on the guide's surface.
MODEL_BY_ID = Route("/v1/models/{model_id:path}", model, methods=["GET"])
ROUTES = (
    Route("/v1/chat/completions", chat_completions, methods=["POST"]),
    Route("/v1/completions", completions, methods=["POST"]),
    Route("/health", health, methods=["GET"]),
    Route("/alive", alive, methods=["GET"]),
    Route("/ready", ready, methods=["GET"]),
    Route("/metrics", metrics, methods=["GET"]),
    Route("/v1/models", models, methods=["GET"]),
    MODEL_BY_ID,
    Route("/v1/requests/{request_id}", cancel_request, methods=["DELETE"]),
)


def create_app(args: ServerArgs, load: Load) -> Starlette:
    """The application, whose `state.server` is its ServerState. The model loads from the lifespan's start on.

    Args:
        args: the server's options.
        load: opens the model; called once, on a thread of its own.
    """
    state = ServerState(args, load)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        state.start_loading()
        try:
            yield
        finally:
            await state.close()

    is_full = args.surface == "full"
    middleware = [Middleware(_RequestId, is_shown=is_full)]
    if args.allow_origin is not None:  # outermost, so that a browser may read the errors too
        exposed = ["x-request-id", "retry-after"]
        middleware.append(Middleware(_Cors, allow_origins=[args.allow_origin], allow_methods=["*"], allow_headers=["*"], expose_headers=exposed))
    middleware.append(Middleware(_Failures))
    if args.api_key is not None:
        middleware.append(Middleware(_ApiKey, api_key=args.api_key))
    app = Starlette(
        routes=[route for route in ROUTES if is_full or route is not MODEL_BY_ID],
        middleware=middleware,
        exception_handlers={PocketLLMError: _pocketllm_error, HTTPException: _http_error},
        lifespan=lifespan,
    )
    router: Router = app.router
    router.redirect_slashes = False  # a redirect would be an answer outside of the error form
    app.state.server = state
    return app


async def _pocketllm_error(_request: Request, error: Exception) -> Response:
    assert isinstance(error, PocketLLMError)
    if error.status_code == 500:
        logger.error("A request failed", exc_info=error)
    headers = {"retry-after": "1"} if isinstance(error, BackendUnavailableError) else None
    if error.status_code == 408:  # the rest of the body may still come, and must not be taken for the next request
        headers = {"connection": "close"}
    return json_response(error_of(error), error.status_code, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, method = request.url.path, request.method
    if error.status_code == 404:
        return json_response(error_body(f"There is no {summary(path)} on this server.", "not_found_error"), 404)
    if error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
        return json_response(error_body(f"{summary(path)} does not take {method}, only {allowed}.", "invalid_request_error"), 405, {"allow": allowed})
    return json_response(error_body(str(error.detail), "invalid_request_error"), error.status_code)


class _RequestId:
    """Echoes the caller's X-Request-Id on every answer; the guide's surface has no such header at all."""

    def __init__(self, app: ASGIApp, is_shown: bool) -> None:
        self._app = app
        self._is_shown = is_shown

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sent = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"") if scope["type"] == "http" and self._is_shown else b""
        echo = sent if _REQUEST_ID.fullmatch(sent) else None

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": [*headers, (b"x-request-id", echo)] if echo else headers}
            await send(message)

        await self._app(scope, receive, send if self._is_shown and echo is None else send_with_id)


class _Cors(CORSMiddleware):
    """Starlette's, with its refusals in the one form."""

    def preflight_response(self, request_headers: Headers) -> Response:
        answer = super().preflight_response(request_headers)
        if answer.status_code == 200:
            return answer
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        message = "This server does not take such a request from that origin: start it with another --allow-origin."
        return json_response(error_body(message, "invalid_request_error"), answer.status_code, kept)


class _Failures:
    """Makes an error of the program a 500 in the one form; its traceback goes to the log alone."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            if scope["type"] != "http":
                raise
            logger.exception("%s %s failed", scope["method"], scope["path"])
            await json_response(error_body("The server failed to answer; its log says why.", "server_error"), 500)(scope, receive, send)


class _ApiKey:
    """Refuses requests without the key, except to OPEN_PATHS."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._key = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_known(scope):
            body = error_body("The API key is missing or wrong. Send it as `Authorization: Bearer KEY`.", "authentication_error", code="invalid_api_key")
            await json_response(body, 401, {"www-authenticate": "Bearer"})(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_known(self, scope: Scope) -> bool:
        sent = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = sent.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)
