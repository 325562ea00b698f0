"""The offline API: LLM, four calls that block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from pocketllm.backends.base import Capabilities, ProgressCallback
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError
from pocketllm.generation import GenerationService, as_prompts
from pocketllm.outputs import GenerationOutput
from pocketllm.protocol.chat import build_chat_request
from pocketllm.protocol.fields import check_fields
from pocketllm.protocol.request import GenerationRequest, new_request_id
from pocketllm.protocol.sampling import check_sampling
from pocketllm.sampling_params import SamplingParams
from pocketllm.token_stream import TokenStream

Prompts = str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]


class LLM:
    """A model in this process.

    Args:
        args: which model, where, and with how much memory; None reads POCKETLLM_* variables.
        progress: called with LoadProgress while the model loads.

    Raises:
        ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
    """

    def __init__(self, args: EngineArgs | None = None, *, progress: ProgressCallback | None = None) -> None:
        self._service = GenerationService.open(args if args is not None else EngineArgs.from_env(), progress)

    @property
    def capabilities(self) -> Capabilities:
        """What the loaded plane can do."""
        return self._service.capabilities

    def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, request_id: str | None = None
    ) -> list[GenerationOutput]:
        """Complete each prompt; all of them run as one batch. Results are in the order of the prompts.

        Args:
            prompts: a text, a list of token ids, or a list of either.
            sampling_params: one for all, or one a prompt.
            request_id: id for `cancel`; with several prompts, prompt k has `<request_id>-k`.

        Raises:
            ConfigurationError: a prompt or a parameter is not valid. RequestCancelledError: one was cancelled.
        """
        requests = build_requests(prompts, sampling_params, request_id, self._service.features)
        with ExitStack() as stack:
            streams = [stack.enter_context(self._service.stream(request)) for request in requests]
            return [stream.result() for stream in streams]

    def generate_stream(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, request_id: str | None = None) -> TokenStream:
        """Complete one prompt, event by event. Closing the stream cancels the request. Raises as `generate` does."""
        return self._service.stream(build_request(prompt, sampling_params, request_id, self._service.features))

    def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> list[GenerationOutput]:
        """Answer one conversation; the list holds one result.

        Args:
            messages: as in /v1/chat/completions; never changed.
            sampling_params: budget and sampling.
            request_id: id for `cancel`.
            options: the request fields that /v1/chat/completions takes, such as reasoning_effort; refused in the same words.

        Raises:
            ConfigurationError, UnsupportedFeatureError: a message or a field is not valid; `param` names it.
        """
        with self.chat_stream(messages, sampling_params, request_id=request_id, **options) as stream:
            return [stream.result()]

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> TokenStream:
        """Answer one conversation, event by event. Closing the stream cancels the request. Arguments and errors are those of `chat`."""
        return self._service.stream(
            build_chat_request(
                messages, SamplingParams() if sampling_params is None else sampling_params, request_id=request_id, features=self._service.features, **options
            )
        )

    def cancel(self, request_id: str) -> bool:
        """End an active request at the next step boundary, from any thread. False if it is not active."""
        return self._service.cancel(request_id)

    def close(self) -> None:
        """Stop the engine and free the model."""
        self._service.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def build_requests(
    prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None, request_id: str | None, features: frozenset[str]
) -> list[GenerationRequest]:
    """One GenerationRequest a prompt, for `generate` of LLM and AsyncLLM."""
    items = as_prompts(prompts)
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        params = [sampling_params or SamplingParams()] * len(items)
    else:
        params = list(sampling_params) if isinstance(sampling_params, Sequence) else [sampling_params]
    for one in params:
        if not isinstance(one, SamplingParams):
            raise ConfigurationError(f'"sampling_params" = {one!r} is not valid: send a SamplingParams, or a list with one a prompt.', param="sampling_params")
    if len(params) != len(items):
        raise ConfigurationError(
            f'"sampling_params" has {len(params)} entries for {len(items)} prompts: send one for all, or one a prompt.', param="sampling_params"
        )
    for one in params:
        check_sampling(one, "completions", features)
    check_fields({"request_id": request_id}, "chat")  # the one endpoint that has it
    base = request_id or new_request_id("cmpl")
    ids = [base] if len(items) == 1 else [f"{base}-{index}" for index in range(len(items))]
    return [GenerationRequest(prompt, one, id_) for prompt, one, id_ in zip(items, params, ids, strict=True)]


def build_request(prompt: str | Sequence[int], sampling_params: SamplingParams | None, request_id: str | None, features: frozenset[str]) -> GenerationRequest:
    """The GenerationRequest of exactly one prompt, for `generate_stream` of LLM and AsyncLLM."""
    requests = [replace(request, is_streamed=True) for request in build_requests(prompt, sampling_params, request_id, features)]
    if len(requests) != 1:
        raise ConfigurationError(f'"prompt" holds {len(requests)} prompts: a stream takes one. Use generate() for several.', param="prompt")
    if requests[0].sampling.num_candidates > requests[0].sampling.n:
        raise ConfigurationError('"best_of" is known when all candidates have ended, so no stream has it: use generate(), or leave it out.', param="best_of")
    return requests[0]
