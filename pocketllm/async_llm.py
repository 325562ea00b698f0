"""The async API: AsyncLLM, LLM's four calls for an event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from pocketllm.backends.base import Capabilities, ProgressCallback
from pocketllm.config import EngineArgs
from pocketllm.errors import BackendUnavailableError
from pocketllm.generation import GenerationService
from pocketllm.llm import Prompts, build_request, build_requests
from pocketllm.outputs import GenerationOutput
from pocketllm.protocol.chat import build_chat_request
from pocketllm.sampling_params import SamplingParams
from pocketllm.token_stream import AsyncTokenStream


class AsyncLLM:
    """A model in this process, for `async with AsyncLLM(EngineArgs(...)) as llm`. The model loads on entry, off the event loop.

    Args:
        args: which model, where, and with how much memory; None reads POCKETLLM_* variables.
        progress: called with LoadProgress, from a worker thread, while the model loads.

    Raises:
        ConfigurationError, UnsupportedFeatureError: on entry, naming the file, the tensor or the option and the remedy.
    """

    def __init__(self, args: EngineArgs | None = None, *, progress: ProgressCallback | None = None) -> None:
        self._args = args if args is not None else EngineArgs.from_env()
        self._progress = progress
        self._opened: GenerationService | None = None

    async def __aenter__(self) -> Self:
        opening = asyncio.ensure_future(asyncio.to_thread(GenerationService.open, self._args, self._progress))
        try:
            self._opened = await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_close_opened)  # the thread goes on loading, for nobody
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.close()

    @property
    def _service(self) -> GenerationService:
        if self._opened is None:
            raise BackendUnavailableError("AsyncLLM is not loaded: use it as `async with AsyncLLM(...) as llm`.")
        return self._opened

    @property
    def capabilities(self) -> Capabilities:
        """What the loaded plane can do."""
        return self._service.capabilities

    async def generate(
        self, prompts: Prompts, sampling_params: SamplingParams | Sequence[SamplingParams] | None = None, *, request_id: str | None = None
    ) -> list[GenerationOutput]:
        """As LLM.generate."""
        streams = [self._service.stream_async(request) for request in build_requests(prompts, sampling_params, request_id, self._service.features)]
        try:
            for stream in streams:
                await stream.start()
            return [await stream.result() for stream in streams]
        finally:
            for stream in streams:
                await stream.aclose()

    def generate_stream(self, prompt: str | Sequence[int], sampling_params: SamplingParams | None = None, *, request_id: str | None = None) -> AsyncTokenStream:
        """As LLM.generate_stream, as an async iterator."""
        return self._service.stream_async(build_request(prompt, sampling_params, request_id, self._service.features))

    async def chat(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> list[GenerationOutput]:
        """As LLM.chat."""
        stream = self.chat_stream(messages, sampling_params, request_id=request_id, **options)
        try:
            return [await stream.result()]
        finally:
            await stream.aclose()

    def chat_stream(
        self, messages: Sequence[Mapping[str, Any]], sampling_params: SamplingParams | None = None, *, request_id: str | None = None, **options: Any
    ) -> AsyncTokenStream:
        """As LLM.chat_stream, as an async iterator."""
        return self._service.stream_async(
            build_chat_request(
                messages, SamplingParams() if sampling_params is None else sampling_params, request_id=request_id, features=self._service.features, **options
            )
        )

    async def cancel(self, request_id: str) -> bool:
        """As LLM.cancel."""
        return self._service.cancel(request_id)

    async def close(self) -> None:
        """Stop the engine and free the model."""
        if self._opened is not None:
            await asyncio.to_thread(self._opened.close)


def _close_opened(opening: asyncio.Future[GenerationService]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()
