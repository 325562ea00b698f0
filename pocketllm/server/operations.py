"""Health, metrics, models, and the cancelling of a request."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.refusals import summary
from pocketllm.protocol.responses import dump, model_body
from pocketllm.server.metrics import CONTENT_TYPE
from pocketllm.server.state import ServerState


class NotFoundError(ConfigurationError):
    """No such model, request or path."""

    status_code = 404
    error_type = "not_found_error"


class ModelNotFoundError(NotFoundError):
    """The server serves another model."""

    code = "model_not_found"


def state_of(request: Request) -> ServerState:
    """The server that `request` came to."""
    state: ServerState = request.app.state.server
    return state


def json_response(body: dict[str, Any], status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(dump(body), status, headers, "application/json")


async def alive(request: Request) -> Response:
    """200 while the process is of use; 503 once the engine is dead and only a restart helps."""
    is_dead = state_of(request).health().state == "dead"
    return json_response({"status": "dead" if is_dead else "alive"}, 503 if is_dead else 200)


async def ready(request: Request) -> Response:
    """200 when requests are answered; 503 before and after, with how far loading has come."""
    health = state_of(request).health()
    return json_response({"status": health.state, "detail": health.detail}, 200 if health.state == "ready" else 503)


async def health(request: Request) -> Response:
    """As `ready`, with what is being served."""
    state = state_of(request)
    found = state.health()
    body: dict[str, Any] = {"status": found.state, "detail": found.detail}
    if found.state == "ready":
        facts, stats = state.service.capabilities, state.service.stats()
        body |= {
            "model": state.model_name,
            "backend": facts.backend,
            "device": facts.device,
            "max_model_len": facts.context_length,
            "max_batch_size": facts.max_slots,
            "running": stats.running,
            "waiting": stats.waiting,
        }
    return json_response(body, 200 if found.state == "ready" else 503)


async def metrics(request: Request) -> Response:
    """Prometheus text."""
    return Response(state_of(request).metrics.render(), headers={"content-type": CONTENT_TYPE})


async def models(request: Request) -> Response:
    """The one model, as a list."""
    return json_response({"object": "list", "data": [_model(state_of(request))]})


async def model(request: Request) -> Response:
    """The one model, if that is the one asked for."""
    state, wanted = state_of(request), request.path_params["model_id"]
    if wanted != state.model_name:
        raise ModelNotFoundError(f"The model {summary(wanted)} does not exist: this server has {summary(state.model_name)}.", param="model")
    return json_response(_model(state))


async def cancel_request(request: Request) -> Response:
    """Cancel an active request; 404 for one that is unknown or has ended."""
    request_id = request.path_params["request_id"]
    if not state_of(request).service.cancel(request_id):
        raise NotFoundError(f"No request {summary(request_id)} is active: it is unknown, or has ended.", param="request_id")
    return json_response({"id": request_id, "object": "request", "status": "cancelled"})


def _model(state: ServerState) -> dict[str, Any]:
    return model_body(state.model_name, state.created, state.service.capabilities.context_length)
