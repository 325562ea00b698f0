"""What all endpoints of one server share: its options, the model once it is loaded, and the requests in flight."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from pocketllm.backends.base import EngineStats, Health, LoadProgress, ProgressCallback
from pocketllm.config import ServerArgs
from pocketllm.errors import BackendUnavailableError, ConfigurationError, QueueFullError
from pocketllm.server.metrics import Metrics

if TYPE_CHECKING:
    from pocketllm.generation import GenerationService

Load = Callable[[ProgressCallback], "GenerationService"]


class ServerState:
    """Shared by the endpoints; lives on the event loop.

    Args:
        args: the server's options.
        load: opens the model; called once, on a thread of its own.
    """

    def __init__(self, args: ServerArgs, load: Load) -> None:
        self.args = args
        self.created = int(time.time())
        self.metrics = Metrics(self._stats)
        self.loaded = asyncio.Event()  # set once the model is ready, or loading has failed
        self.load_error: BaseException | None = None
        self._load = load
        self._service: GenerationService | None = None
        self._features: frozenset[str] | None = None
        self._progress = LoadProgress(0.0, "starting")
        self._active: dict[str, int] = {}  # number of choices
        self._is_closing = False

    @property
    def service(self) -> GenerationService:
        """The loaded model.

        Raises:
            BackendUnavailableError: it is loading, could not be loaded, has failed, or is shutting down.
        """
        health = self.health()
        if health.state != "ready" or self._service is None:
            raise BackendUnavailableError(health.detail)
        return self._service

    @property
    def features(self) -> frozenset[str]:
        """What the loaded model and this server act on. Raises as `service` does."""
        service = self.service
        if self._features is None:
            self._features = service.features_of(self.args.surface)
        return self._features

    @property
    def model_name(self) -> str:
        return self.args.served_model_name or self.service.model_name

    def health(self) -> Health:
        """State of the engine, with a line for people when it is not ready."""
        if self._is_closing:
            return Health("closed", "The server is shutting down.")
        if self.load_error is not None:
            return Health("dead", "The model could not be loaded; the server's log says why.")
        if self._service is None:
            return Health("loading", f"The model is loading: {self._progress.message} ({self._progress.fraction:.0%}). Try again in a moment.")
        health = self._service.health()
        if health.state == "ready":
            return health
        return Health(health.state, health.detail or f"The engine is {health.state}. Restart the server.")

    def start_loading(self) -> None:
        """Load the model on a daemon thread, so that a signal ends the process even while it loads."""
        loop = asyncio.get_running_loop()

        def work() -> None:
            service: GenerationService | None = None
            error: BaseException | None = None
            try:
                service = self._load(self._set_progress)
                service.prepare_grammars()
            except BaseException as caught:  # handed to whoever waits for `loaded`
                error = caught
            try:
                loop.call_soon_threadsafe(self._finish_loading, service, error)
            except RuntimeError:  # the loop has ended meanwhile, and nobody else knows of this model
                if service is not None:
                    service.close()

        threading.Thread(target=work, name="pocketllm-load", daemon=True).start()

    def admit(self, request_id: str, num_choices: int) -> None:
        """Count a request in, until `release`.

        Raises:
            ConfigurationError: a request of that id is in flight, or it has more choices than are ever taken.
            QueueFullError: it would make more choices than `max_queued_requests` in flight.
        """
        limit, active = self.args.max_queued_requests, sum(self._active.values())
        if request_id in self._active:
            raise ConfigurationError(
                f'"request_id" = "{request_id}" is active already: send another one, or wait until that request has ended.', param="request_id"
            )
        if num_choices > limit:
            raise ConfigurationError(
                f'"n" asks for {num_choices} choices over all prompts, and this server takes {limit} at a time: send fewer, or start it with a larger '
                "--max-queued-requests.",
                param="n",
            )
        if active + num_choices > limit:
            raise QueueFullError(f"The queue is full: {active} choices are in flight, and the server takes {limit}. Try again in a second.")
        self._active[request_id] = num_choices

    def release(self, request_id: str) -> None:
        self._active.pop(request_id, None)

    def cancel_all(self) -> int:
        """Cancel every request in flight; how many there were."""
        active = list(self._active)
        if self._service is not None:
            for request_id in active:
                self._service.cancel(request_id)
        return len(active)

    async def close(self) -> None:
        """Stop the engine. Requests still active are cancelled."""
        self._is_closing = True
        if self._service is not None:
            await asyncio.to_thread(self._service.close)

    def _finish_loading(self, service: GenerationService | None, error: BaseException | None) -> None:
        self._service, self.load_error = service, error
        self.loaded.set()

    def _set_progress(self, progress: LoadProgress) -> None:
        self._progress = progress

    def _stats(self) -> EngineStats:
        return EngineStats() if self._service is None else self._service.stats()
