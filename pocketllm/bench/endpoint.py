"""An OpenAI-compatible server to be measured: its address, and the bytes of a request."""

from __future__ import annotations

import http.client
import json
import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import SplitResult, urlsplit

from pocketllm.bench.workload import Ask
from pocketllm.errors import BackendUnavailableError, ConfigurationError

Api = Literal["chat", "completions"]
_PATHS: dict[Api, str] = {"chat": "chat/completions", "completions": "completions"}
_PATIENCE = 10.0  # seconds, for the list of models


@dataclass(frozen=True)
class Endpoint:
    """Where requests go.

    Args:
        url: of the server, with or without "/v1" at its end.
        api: which endpoint of it.
        model: name that requests carry.
        api_key: sent as a bearer token, or None.
        extra_body: fields that requests carry beside the usual ones; null takes a usual one away.

    Raises:
        ConfigurationError: the URL is none of http or https.
    """

    url: str
    api: Api = "chat"
    model: str = "default"
    api_key: str | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        split_url(self.url)

    @property
    def host(self) -> str:
        return split_url(self.url).hostname or ""

    @property
    def port(self) -> int:
        parts = split_url(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def tls(self) -> ssl.SSLContext | None:
        return ssl.create_default_context() if split_url(self.url).scheme == "https" else None

    def request(self, ask: Ask) -> bytes:
        """The HTTP request of a greedy stream, with usage at its end."""
        prompt = {"messages": [{"role": "user", "content": ask.prompt}]} if self.api == "chat" else {"prompt": ask.prompt}
        usual = {"model": self.model, **prompt, "max_tokens": ask.max_tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        body = json.dumps({name: value for name, value in {**usual, **self.extra_body}.items() if value is not None}).encode()
        parts = split_url(self.url)
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        head = f"POST {_base(parts)}/{_PATHS[self.api]} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n{key}Content-Type: application/json\r\n"
        return f"{head}Accept: text/event-stream\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def first_model(url: str, api_key: str | None) -> str:
    """The first id of the server's /v1/models.

    Raises:
        ConfigurationError: the URL is none of http or https.
        BackendUnavailableError: the server can't be reached, or answers otherwise.
    """
    parts = split_url(url)
    address = f"{parts.scheme}://{parts.netloc}{_base(parts)}/models"
    request = urllib.request.Request(address, headers={"Authorization": f"Bearer {api_key}"} if api_key else {})
    try:
        # Directly, as the load itself goes.
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=_PATIENCE) as response:
            return str(json.load(response)["data"][0]["id"])
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:  # URLError is an OSError
        reason = getattr(error, "reason", None) or error
        raise BackendUnavailableError(
            f"{address} did not name a model ({reason}): start the server, check --url and --api-key, or name the model with --served-model-name."
        ) from None


def split_url(url: str) -> SplitResult:
    """The parts of a server's URL. Raises ConfigurationError where it is none."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise ConfigurationError(f'"url" = {url!r} is not a URL of a server: send one such as http://127.0.0.1:8000.', param="url")
    return parts


def _base(parts: SplitResult) -> str:
    path = parts.path.rstrip("/")
    return path if path.endswith("/v1") else f"{path}/v1"
