"""One request in the engine: the rows of its choices, from the moment its id is taken until the last of them has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pocketllm.backends.base import Backend, EngineRequest, StepOutput
from pocketllm.errors import RequestCancelledError
from pocketllm.text.answer import Reading

Put = Callable[[int, StepOutput], None]


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as the engine takes it.

    Args:
        request_id: the caller's.
        rows: one a choice, in the order of their index.
        rows_per_prompt: how many of them share a prompt.
        reading: how what they say is read.
        num_best: how many of the rows of a prompt are its choices, those with the highest mean log probability; None is all.
    """

    request_id: str
    rows: tuple[EngineRequest, ...]
    rows_per_prompt: int
    reading: Reading
    num_best: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; choices of one prompt count it once."""
        return sum(len(row.prompt_token_ids) for row in self.rows[:: self.rows_per_prompt])


class ActiveRequest:
    """Holds a request's id, and cancels its rows. It does not know the stream that reads them, which can so be collected while they run.

    Args:
        backend: where the rows run.
        request_id: the caller's.
        on_end: called once, when no row is left or none will come; from any thread.
    """

    def __init__(self, backend: Backend, request_id: str, on_end: Callable[[], object]) -> None:
        self.request_id = request_id
        self._backend = backend
        self._on_end = on_end
        self._lock = threading.RLock()  # a stream that is collected in the middle cancels, on whatever thread that is
        self._rows: dict[int, str] = {}  # those in the engine. Once a row has ended its id may be another's, which a cancel would hit
        self._is_submitting = True  # from the start, while the request is prepared
        self._is_cancelled = False

    def submit(self, prepared: Prepared, put: Put) -> None:
        """Queue every row; `put` is given their steps on the engine's thread. Raises what Backend.submit raises; rows queued before are cancelled.

        Raises:
            RequestCancelledError: it was cancelled before, or meanwhile.
        """
        try:
            for index, row in enumerate(prepared.rows):
                with self._lock:
                    if self._is_cancelled:
                        raise cancelled(self.request_id)
                    self._rows[index] = row.request_id
                try:
                    self._backend.submit(row, partial(self._on_step, index, put))
                except BaseException:
                    self._rows.pop(index, None)
                    raise
            if self._is_cancelled:  # while the last row was not yet the engine's to cancel
                raise cancelled(self.request_id)
        except BaseException:
            self.cancel()
            raise
        finally:
            self._leave(None)

    def cancel(self) -> bool:
        """End every row at the next step boundary. False if it has ended, or was cancelled before."""
        with self._lock:
            was_active = not self._is_cancelled and (self._is_submitting or bool(self._rows))
            self._is_cancelled = True
            rows = list(self._rows)
        for index in rows:
            self.cancel_row(index)
        return was_active

    def cancel_row(self, index: int) -> None:
        """End one row at the next step boundary, unless it has ended."""
        if (row_id := self._rows.get(index)) is not None:
            self._backend.cancel(row_id)

    def drop(self) -> None:
        """Give up before anything was submitted."""
        self.cancel()
        self._leave(None)

    def _on_step(self, index: int, put: Put, step: StepOutput) -> None:
        if step.finish_reason is not None:
            self._leave(index)
        put(index, step)

    def _leave(self, index: int | None) -> None:
        """A row has ended, or, with None, no further one will come."""
        with self._lock:
            if index is None:
                self._is_submitting = False
            else:
                self._rows.pop(index, None)
            has_ended = not self._is_submitting and not self._rows
        if has_ended:
            self._on_end()


def cancelled(request_id: str) -> RequestCancelledError:
    """The error of a request that was cancelled."""
    return RequestCancelledError(f"Request {request_id} was cancelled.")
