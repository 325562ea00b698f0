"""Reading the keys of a config that is one architecture's own: each fault in one line, no default of ours."""

from __future__ import annotations

from typing import Any

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError


def required(checkpoint: Checkpoint, key: str) -> Any:
    """The value of `key`.

    Raises:
        ConfigurationError: it is missing, or null.
    """
    if (value := checkpoint.config.get(key)) is None:
        raise ConfigurationError(f"{checkpoint.path} lacks the key {key}: download it again.", param="model")
    return value


def whole(checkpoint: Checkpoint, key: str) -> int:
    """The value of `key`, a whole number above 0.

    Raises:
        ConfigurationError: it is missing, or another.
    """
    if type(value := required(checkpoint, key)) is not int or value < 1:
        raise bad(checkpoint, key, value, "a whole number above 0")
    return value


def real(checkpoint: Checkpoint, key: str) -> float:
    """The value of `key`, a number above 0.

    Raises:
        ConfigurationError: it is missing, or another.
    """
    if type(value := required(checkpoint, key)) not in (int, float) or not 0 < value < float("inf"):
        raise bad(checkpoint, key, value, "a number above 0")
    return float(value)


def bad(checkpoint: Checkpoint, key: str, value: object, wanted: str) -> ConfigurationError:
    """The error for a value that can't be."""
    return ConfigurationError(f"{checkpoint.path} has {key} = {value!r}, which should be {wanted}: download it again.", param="model")
