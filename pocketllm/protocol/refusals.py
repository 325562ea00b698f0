"""The words in which a value is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError


def refusal(name: str, value: object, instead: str, remedy: str, *, is_shape: bool) -> ConfigurationError | UnsupportedFeatureError:
    """The error that refuses `value` of field `name`, in four parts: field, value, what happens instead, remedy."""
    kind = ConfigurationError if is_shape else UnsupportedFeatureError
    return kind(f"{summary(name)} = {summary(value)} is not supported by this server: {instead}. {remedy}.", param=name)


def missing(name: str, instead: str, remedy: str) -> ConfigurationError:
    """The error of a request without the field `name`."""
    return ConfigurationError(f'"{name}" is missing: {instead}. {remedy}.', param=name)


def checked_text(text: str, where: str) -> str:
    """`text`, unless it holds half of a surrogate pair, which no tokenizer can read.

    Raises:
        ConfigurationError: naming `where`.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigurationError(
            f'"{where}" holds half of a surrogate pair at character {error.start}: that is no character of any text. Send valid Unicode.', param=where
        ) from None
    return text


def summary(value: object) -> str:
    """`value` as JSON on one short line; what is long or nested is cut to an ellipsis."""
    if isinstance(value, Mapping):
        shown = [f"{_scalar(str(key))}: {_scalar(item)}" for key, item in list(value.items())[:3]]
        return "{" + ", ".join(shown + ["…"] * (len(value) > 3)) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_scalar(item) for item in value[:3]] + ["…"] * (len(value) > 3)) + "]"
    return _scalar(value)


def _scalar(value: object) -> str:
    if isinstance(value, Mapping):
        return "{…}" if value else "{}"
    if isinstance(value, (list, tuple)):
        return "[…]" if value else "[]"
    if isinstance(value, str):
        return json.dumps(value[:60] + "…" * (len(value) > 60), ensure_ascii=False)
    if value is None or isinstance(value, (bool, float)) or (isinstance(value, int) and abs(value) < 10**40):
        return json.dumps(value)
    return "a very large number" if isinstance(value, int) else f"a {type(value).__name__}"
