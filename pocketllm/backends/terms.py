"""What both planes hold options and requests to before anything is loaded or queued, in the same words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pocketllm.backends.base import Capabilities, EngineRequest
from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError

_MAX_THREADS = 1024  # far more than help; OpenMP ends the process when the system refuses it a thread


def read_backend_options(args: EngineArgs, plane: str, names: Sequence[str]) -> dict[str, Any]:
    """The plane's `backend_options`.

    Raises:
        ConfigurationError: a name is none of `names`.
    """
    for name in args.backend_options:
        if name not in names:
            raise ConfigurationError(
                f'"backend_options" holds {name!r}, which the {plane} plane does not know: it takes {", ".join(names)}.', param="backend_options"
            )
    return dict(args.backend_options)


def check_threads(threads: object) -> int:
    """`threads`, the num_threads of `backend_options`.

    Raises:
        ConfigurationError: it is no sensible number.
    """
    if isinstance(threads, bool) or not isinstance(threads, int) or not 1 <= threads <= _MAX_THREADS:
        raise ConfigurationError(
            f'"num_threads" = {threads!r} in "backend_options" is not valid: send a whole number from 1 to {_MAX_THREADS}.', param="backend_options"
        )
    return threads


def context_length(args: EngineArgs, checkpoint: Checkpoint) -> int:
    """Most tokens of prompt and answer that are asked for: `max_model_len`, or all that the model was made for.

    Raises:
        ConfigurationError: max_model_len is more than that.
    """
    trained = checkpoint.context_length
    if args.max_model_len is not None and args.max_model_len > trained:
        raise ConfigurationError(
            f'"max_model_len" = {args.max_model_len} is more than the {trained} tokens that {checkpoint.name} was made for: lower it, or leave it out.',
            param="max_model_len",
        )
    return trained if args.max_model_len is None else args.max_model_len


def check_request(request: EngineRequest, capabilities: Capabilities) -> None:
    """Hold a row to the vocabulary and the context of the loaded plane.

    Raises:
        ConfigurationError: an id is no token of the model, or prompt and answer do not fit.
    """
    if request.terms is not None:
        for name, ids in request.terms.named_ids():
            if ids and not 0 <= min(ids) <= max(ids) < capabilities.vocab_size:
                raise ConfigurationError(
                    f'"{name}" holds an id that is no token of this model: ids are whole numbers from 0 to {capabilities.vocab_size - 1}.', param=name
                )
    prompt, vocab_size, context = request.prompt_token_ids, capabilities.vocab_size, capabilities.context_length
    if prompt and not 0 <= min(prompt) <= max(prompt) < vocab_size:
        raise ConfigurationError(f'"prompt" holds an id that is no token of this model: ids are whole numbers from 0 to {vocab_size - 1}.', param="prompt")
    if len(prompt) + request.max_tokens > context:  # the device has neither rotations nor room in its tables for more
        raise ConfigurationError(
            f'"max_tokens" = {request.max_tokens} after a prompt of {len(prompt)} tokens is more than the context of {context} tokens: '
            "send less, or start the engine with a larger max_model_len.",
            param="max_tokens",
        )
