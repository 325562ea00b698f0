"""The JSON that the endpoints answer with. One class an endpoint, with the same three answers: whole, chunk by chunk, and in failure."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any, Protocol

from pocketllm.errors import PocketLLMError
from pocketllm.outputs import ChoiceOutput, GenerationOutput, TokenEvent, ToolCallDelta, Usage
from pocketllm.protocol.ranks import TextOffsets, content_ranks, legacy_ranks, prompt_ranks

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": keep-alive\n\n"  # a comment, which clients of event streams skip

_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode
_encode_ascii = json.JSONEncoder(separators=(",", ":")).encode


def error_body(message: str, kind: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """OpenAI's error object: `{"error": {"message", "type", "param", "code"}}`."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_of(error: PocketLLMError) -> dict[str, Any]:
    """The error object that reports `error`."""
    return error_body(error.message, error.error_type, param=error.param, code=error.code)


def usage_body(usage: Usage, *, has_details: bool = True) -> dict[str, Any]:
    """OpenAI's usage object, with the prompt tokens that the prefix cache gave and the tokens that were reasoning."""
    if not has_details:
        return usage.as_dict()
    return {
        **usage.as_dict(),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def model_body(name: str, created: int, context_length: int) -> dict[str, Any]:
    """One entry of /v1/models."""
    return {"id": name, "object": "model", "created": created, "owned_by": "pocketllm", "max_model_len": context_length}


def dump(body: Mapping[str, Any]) -> bytes:
    """Compact UTF-8 JSON. Half a surrogate pair, which UTF-8 can't hold, becomes its JSON escape."""
    return _encode(body).encode("utf-8", "backslashreplace")


def dump_in_pieces(body: Mapping[str, Any]) -> bytes:
    """As `dump`, for a large body on a thread of its own: the encoder lets no other thread run until it has finished, so it is given small parts."""
    return "".join(_pieces(body, 5)).encode("utf-8", "backslashreplace")


def _pieces(value: Any, depth: int, encode: Callable[[Any], str] = _encode) -> Iterator[str]:
    if not depth or not value or not isinstance(value, (dict, list)):
        yield encode(value)
        return
    mark = "{" if isinstance(value, dict) else "["
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield f"{mark}{encode(key)}:" if isinstance(value, dict) else mark
        yield from _pieces(item, depth - 1, encode)
        mark = ","
    yield "}" if isinstance(value, dict) else "]"


def sse(body: Mapping[str, Any]) -> bytes:
    """One server-sent event. Its JSON is ASCII: some clients take U+2028 and its kin in a text for the end of a line."""
    return b"data: " + _encode_ascii(body).encode("ascii") + b"\n\n"


def _sse_in_pieces(body: Mapping[str, Any]) -> bytes:
    """As `sse`, for a large body on a thread of its own; see dump_in_pieces."""
    return b"data: " + "".join(_pieces(body, 5, _encode_ascii)).encode("ascii") + b"\n\n"


class AnswerBody(Protocol):
    """How one endpoint spells the answer to one request."""

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def opening(self, num_choices: int) -> bytes:
        """What a stream begins with."""

    def chunk(self, event: TokenEvent) -> bytes:
        """What a stream says of one event; empty when there is nothing to say."""


class ChatBody:
    """chat.completion and chat.completion.chunk.

    Args:
        request_id: id of the response.
        model: name of the model.
        created: Unix time in seconds.
        include_usage: whether a stream ends with a chunk of token counts.
        features: what is acted on; "null_keys" has message.refusal and logprobs present where they are empty, as OpenAI's schema wants, "usage_details" breaks
            the token counts down.
        prompt_logprobs: alternatives to show at each token of the prompt; None shows none.
    """

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool, features: Container[str], prompt_logprobs: int | None = None) -> None:
        self._head = {"id": request_id, "object": "chat.completion", "created": created, "model": model}
        self._prompt_logprobs = prompt_logprobs
        self._refusal: dict[str, Any] = {"refusal": None} if "null_keys" in features else {}
        self._ranks: dict[str, Any] = {"logprobs": None} if "null_keys" in features else {}
        self._has_details = "usage_details" in features
        self._chunks = _Chunks({**self._head, "object": "chat.completion.chunk"}, include_usage, self._has_details)

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        ranks = {} if self._prompt_logprobs is None else {"prompt_logprobs": prompt_ranks(output.prompt_logprobs or (), self._prompt_logprobs)}
        usage = usage_body(output.usage, has_details=self._has_details)
        return {**self._head, "choices": [self._choice(choice) for choice in output.choices], "usage": usage, **ranks}

    def opening(self, num_choices: int) -> bytes:
        delta = {"role": "assistant", "content": "", **self._refusal}
        return b"".join(self._chunks.event([self._delta(index, delta)]) for index in range(num_choices))

    def chunk(self, event: TokenEvent) -> bytes:
        found = b""
        ranks = {"logprobs": {"content": content_ranks(event.logprobs), **self._refusal}} if event.logprobs else {}
        if event.reasoning_content:
            found += self._chunks.event([{**self._delta(event.index, {"reasoning_content": event.reasoning_content}), **ranks}])
            ranks = {}  # of the whole event: in its first chunk
        if ranks:
            found += self._chunks.event([{**self._delta(event.index, {"content": event.text}), **ranks}])
        elif event.text:
            found += self._chunks.text(event.index, event.text, self._empty)
        for call in event.tool_calls:
            found += self._chunks.event([self._delta(event.index, {"tool_calls": [_call_delta(call)]})])
        if event.finish_reason is not None:
            found += self._chunks.end(self._delta(event.index, {}, event.finish_reason), event.usage)
        return found

    def _choice(self, choice: ChoiceOutput) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text, **self._refusal}
        if choice.reasoning_content is not None:
            message["reasoning_content"] = choice.reasoning_content
        if choice.tool_calls:
            message["content"] = choice.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}} for call in choice.tool_calls
            ]
        ranks = self._ranks
        if choice.logprobs is not None:
            ranks = {"logprobs": {"content": content_ranks(choice.logprobs), **self._refusal}}
        return {"index": choice.index, "message": message, **ranks, "finish_reason": choice.finish_reason}

    def _delta(self, index: int, delta: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, **self._ranks, "finish_reason": finish_reason}

    def _empty(self, index: int) -> dict[str, Any]:
        return self._delta(index, {"content": ""})


class CompletionBody:
    """text_completion, whole and in chunks. Arguments are those of ChatBody."""

    def __init__(self, request_id: str, model: str, created: int, *, include_usage: bool, features: Container[str], prompt_logprobs: int | None = None) -> None:
        self._prompt_logprobs = prompt_logprobs
        self._offsets: dict[int, TextOffsets] = {}  # of the choices of a stream
        self._head = {"id": request_id, "object": "text_completion", "created": created, "model": model}
        self._ranks: dict[str, Any] = {"logprobs": None} if "null_keys" in features else {}
        self._has_details = "usage_details" in features
        self._chunks = _Chunks(self._head, include_usage, self._has_details)

    def whole(self, output: GenerationOutput) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(choice) for choice in output.choices], "usage": usage_body(output.usage, has_details=self._has_details)}

    def opening(self, num_choices: int) -> bytes:
        return b""

    def chunk(self, event: TokenEvent) -> bytes:
        found = b""
        if event.logprobs or event.prompt_logprobs is not None:
            offsets = self._offsets.setdefault(event.index, TextOffsets())
            ranks = {"content": content_ranks(event.logprobs), **legacy_ranks(event.logprobs, event.prompt_logprobs or (), event.echo, offsets)}
            found = self._chunks.event(
                [{**self._text(event.index, event.echo + event.text, None), "logprobs": ranks}], is_large=event.prompt_logprobs is not None
            )
        elif event.echo or event.text:
            found = self._chunks.text(event.index, event.echo + event.text, self._empty)
        if event.finish_reason is not None:
            found += self._chunks.end(self._text(event.index, "", event.finish_reason), event.usage)
        return found

    def _choice(self, choice: ChoiceOutput) -> dict[str, Any]:
        ranks = self._ranks
        if choice.logprobs is not None:
            prompt = choice.prompt_logprobs if choice.echo else None
            ranks = {"logprobs": {"content": content_ranks(choice.logprobs), **legacy_ranks(choice.logprobs, prompt or (), choice.echo, TextOffsets())}}
        if self._prompt_logprobs is not None:
            ranks = {**ranks, "prompt_logprobs": prompt_ranks(choice.prompt_logprobs or (), self._prompt_logprobs)}
        return {"index": choice.index, "text": choice.echo + choice.text, **ranks, "finish_reason": choice.finish_reason}

    def _text(self, index: int, text: str, finish_reason: str | None) -> dict[str, Any]:
        return {"index": index, "text": text, **self._ranks, "finish_reason": finish_reason}

    def _empty(self, index: int) -> dict[str, Any]:
        return self._text(index, "", None)


class _Chunks:
    """The parts that all chunks of a stream share. With include_usage, every chunk but the last says `"usage": null`."""

    def __init__(self, head: Mapping[str, Any], include_usage: bool, has_details: bool) -> None:
        self._head = head
        self._include_usage = include_usage
        self._has_details = has_details
        self._frames: dict[int, tuple[bytes, bytes]] = {}

    def event(self, choices: list[dict[str, Any]], usage: Usage | None = None, *, is_large: bool = False) -> bytes:
        body = {**self._head, "choices": choices}
        if self._include_usage:
            body["usage"] = usage_body(usage, has_details=self._has_details) if usage is not None else None
        return _sse_in_pieces(body) if is_large else sse(body)

    def text(self, index: int, text: str, empty: Callable[[int], dict[str, Any]]) -> bytes:
        """The chunk that adds `text`; `empty` is that chunk with an empty text, whose frame is kept, so that a token costs one concatenation."""
        frame = self._frames.get(index)
        if frame is None:
            body, mark = self.event([empty(index)]), b'""'
            at = body.rindex(mark)
            frame = self._frames[index] = body[:at], body[at + len(mark) :]
        return frame[0] + encode_basestring_ascii(text).encode("ascii") + frame[1]

    def end(self, choice: dict[str, Any], usage: Usage | None) -> bytes:
        last = self.event([choice])
        return last + self.event([], usage) if self._include_usage and usage is not None else last


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    return {"index": call.index, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
