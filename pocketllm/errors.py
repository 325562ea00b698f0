"""Errors that PocketLLM raises, each with the HTTP status it becomes.

Every message names the field, the file or the tensor at fault and the remedy, because it is shown to the user as it
stands: on the terminal, in an exception, or in the `error.message` of a response.
"""

from __future__ import annotations


class PocketLLMError(Exception):
    """Base of every error that PocketLLM raises on purpose.

    Attributes:
        status_code: HTTP status of the response that reports the error.
        error_type: OpenAI's `error.type`.
        code: OpenAI's `error.code`, or None.
        param: name of the request field or option at fault, or None.
    """

    status_code = 500
    error_type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    @property
    def message(self) -> str:
        return str(self)


class ConfigurationError(PocketLLMError):
    """An option, a file or a request value is wrong; nothing was started."""

    status_code = 400
    error_type = "invalid_request_error"


class UnsupportedFeatureError(PocketLLMError):
    """The request or the checkpoint asks for something that the selected plane does not do."""

    status_code = 400
    error_type = "invalid_request_error"


class ContextLengthExceededError(ConfigurationError):
    """Prompt and generation budget do not fit into the model's context."""

    code = "context_length_exceeded"


class BackendUnavailableError(PocketLLMError):
    """The engine is still loading, has failed, or is shutting down."""

    status_code = 503
    error_type = "service_unavailable_error"


class QueueFullError(BackendUnavailableError):
    """More requests are waiting than `max_queued_requests` allows."""

    status_code = 429
    error_type = "rate_limit_error"


class RequestCancelledError(PocketLLMError):
    """The request was cancelled before it finished."""

    status_code = 499
    error_type = "request_cancelled"


class RequestTimeoutError(PocketLLMError):
    """The request's deadline passed before it finished."""

    status_code = 504
    error_type = "timeout_error"


class TensorParallelSupervisorError(PocketLLMError):
    """A tensor-parallel rank failed to start, died, or did not stop in time."""
