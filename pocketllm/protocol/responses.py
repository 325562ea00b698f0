"""The JSON that the endpoints answer with. One class an endpoint, with the same three answers: whole, chunk by chunk, and in failure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from pocketllm.errors import PocketLLMError
from pocketllm.outputs import GenerationOutput, TokenEvent, Usage

DONE = b"data: [DONE]\n\n"


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: PocketLLMError) -> dict[str, Any]:
    """The error object that reports `error`."""
    return error_body(error.message, error.error_type, param=error.param, code=error.code)


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object, with the prompt tokens that the prefix cache gave."""
    return {**usage.as_dict(), "prompt_tokens_details": {"cached_tokens": usage.cached_tokens}}


def model_body(name: str, created: int, context_length: int) -> dict[str, Any]:
    """One entry of /v1/models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "pocketllm", "max_model_len": context_length}


def dump(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON. Half a surrogate pair, which UTF-8 can't hold, becomes its JSON escape."""
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "backslashreplace")


def sse(body: Mapping[str, Any]) -> bytes:
    """One server-sent event. Its JSON is ASCII: some clients take U+2028 and its kin in a text for the end of a line."""
    return b"data: " + json.dumps(body, separators=(",", ":")).encode("ascii") + b"\n\n"


class Answer(Protocol):
    """How one endpoint spells the answer to one request."""

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def opening(self) -> bytes:
        """What a stream begins with."""

    def chunk(self, event: TokenEvent) -> bytes:
        """What a stream says of one event; empty when there is nothing to say."""


class ChatAnswer:
    """chat.completion and chat.completion.chunk.

    Args:
        request_id: id of the response.
        model: name of the model.
        created: Unix time in seconds.
        include_usage: whether a stream ends with a chunk of token counts.
    """

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool = False) -> None:
        self._head = {"id": request_id, "object": "chat.completion", "created": created, "model": model}
        self._stream = _Chunks({**self._head, "object": "chat.completion.chunk"}, include_usage)
        self._before, self._after = self._stream.split({"index": 0, "delta": {"content": ""}, "logprobs": None, "finish_reason": None})

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": output.finish_reason}
        return {**self._head, "choices": [choice], "usage": usage_body(output.usage)}

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return self._stream.event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}])

    def chunk(self, event: TokenEvent) -> bytes:
        text = self._before + encode_basestring_ascii(event.text).encode() + self._after if event.text else b""
        if event.finish_reason is None:
            return text
        return text + self._stream.end({"index": 0, "delta": {}, "logprobs": None, "finish_reason": event.finish_reason}, event.usage)


class CompletionAnswer:
    """text_completion, whole and in chunks. Arguments are those of ChatAnswer."""

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool = False) -> None:
        self._head = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        self._stream = _Chunks(self._head, include_usage)
        self._before, self._after = self._stream.split({"index": 0, "text": "", "logprobs": None, "finish_reason": None})

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        choice = {"index": 0, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason}
        return {**self._head, "choices": [choice], "usage": usage_body(output.usage)}

    def opening(self) -> bytes:
        return b""

    def chunk(self, event: TokenEvent) -> bytes:
        text = self._before + encode_basestring_ascii(event.text).encode() + self._after if event.text else b""
        if event.finish_reason is None:
            return text
        return text + self._stream.end({"index": 0, "text": "", "logprobs": None, "finish_reason": event.finish_reason}, event.usage)


class _Chunks:
    """The parts that all chunks of a stream share. With include_usage, every chunk but the last says `"usage": null`."""

    def __init__(self, head: Mapping[str, Any], include_usage: bool) -> None:
        self._head = head
        self._include_usage = include_usage

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None) -> bytes:
        body = {**self._head, "choices": choices}
        if self._include_usage:
            body["usage"] = usage_body(usage) if usage is not None else None
        return sse(body)

    def split(self, choice: dict[str, Any]) -> tuple[bytes, bytes]:
        """A chunk cut at the one empty string of `choice`, so that a token costs one concatenation."""
        mark = b'""'
        body = self.event([choice])
        at = body.rindex(mark)
        return body[:at], body[at + len(mark) :]

    def end(self, choice: dict[str, Any], usage: Usage | None) -> bytes:
        last = self.event([choice])
        return last + self.event([], usage) if self._include_usage and usage is not None else last
