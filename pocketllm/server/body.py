"""The body of a request: read up to a limit, and parsed without surprises."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any, NoReturn

from starlette.requests import Request

from pocketllm.errors import ConfigurationError
from pocketllm.protocol.refusals import summary

MAX_DEPTH = 64
_DRAINED_BYTES = 2**24  # beyond the limit: a client that is still sending would see a broken connection in place of the answer


class BodyTooLargeError(ConfigurationError):
    """The body is larger than `max_body_bytes`."""

    status_code = 413


class BodyTimeoutError(ConfigurationError):
    """The body did not arrive in time."""

    status_code = 408
    error_type = "timeout_error"


async def read_body(request: Request, limit: int, deadline: float | None = None) -> bytes:
    """The body of `request`.

    Args:
        request: its body has not been read.
        limit: most bytes that are read.
        deadline: time of the event loop until which the body must be here, or None.

    Raises:
        BodyTimeoutError: it was not.
        BodyTooLargeError: the body is longer; some of the rest is read and thrown away.
    """
    try:
        async with asyncio.timeout_at(deadline):
            return await _read(request, limit)
    except TimeoutError:
        raise BodyTimeoutError("The request's body did not arrive in time. Send all of it at once.") from None


def parse_json(raw: bytes) -> dict[str, Any]:
    """The JSON object that a body holds. Takes time in proportion to its length, whatever it holds.

    Raises:
        ConfigurationError: it is not UTF-8, not JSON, no object, nested too deep, or has a key twice.
    """
    try:
        body = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"The request body is not UTF-8: byte {error.start} begins no character. Send JSON in UTF-8.") from None
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"The request body is not valid JSON: {error}. Send one JSON object.") from None
    except RecursionError:
        raise _too_deep() from None
    except ValueError:
        raise ConfigurationError("The request body holds a number with more digits than any field takes. Send a shorter one.") from None
    if not isinstance(body, dict):
        raise ConfigurationError("The request body is not a JSON object. Send one, with the request's fields as its keys.")
    _check_depth(body)
    return body


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of `pairs`, unless a key comes twice."""
    body = dict(pairs)
    if len(body) != len(pairs):
        name, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ConfigurationError(f"{summary(name)} is sent twice, and only one of its values could be acted on. Send it once.", param=name)
    return body


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    is_too_large = declared.isdecimal() and (len(declared) > 18 or int(declared) > limit)
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        is_too_large = is_too_large or size > limit
        if not is_too_large:
            parts.append(part)
        elif size > limit + _DRAINED_BYTES:
            break
    if is_too_large:
        raise _too_large(limit)
    return b"".join(parts)


def _check_depth(body: dict[str, Any]) -> None:
    """Refuse what later steps, which recurse, could not walk."""
    level: list[Any] = [body]
    for _ in range(MAX_DEPTH):
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item) if isinstance(child, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> ConfigurationError:
    return ConfigurationError(f"The request body is nested deeper than {MAX_DEPTH} levels. Send a flatter one.")


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"The request body is larger than {limit} bytes. Send a shorter one, or start the server with a larger --max-body-bytes.")


def _refuse_constant(name: str) -> NoReturn:
    raise ConfigurationError(f"The request body holds {name}, which is no JSON number. Send a finite number, or leave the field out.")
