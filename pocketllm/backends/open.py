"""From what the user names to a plane that can load it; bad input fails here, before anything slow starts."""

from __future__ import annotations

from pocketllm.backends.base import Backend, ProgressCallback
from pocketllm.backends.select import refuse_options, select_backend
from pocketllm.checkpoint import Checkpoint, open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.hub import resolve_model


def open_backend(args: EngineArgs, report: ProgressCallback) -> tuple[Checkpoint, Backend]:
    """The checkpoint of `args`, downloaded if need be, and the plane that runs it, constructed and not yet loaded.

    Raises:
        ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
    """
    refuse_options(args)
    checkpoint = open_checkpoint(resolve_model(args.model, report, args.backend), args.model_format)
    return checkpoint, select_backend(args, checkpoint)
