"""Generation: text above, token ids below. LLM, AsyncLLM, the server and the CLI are thin skins over this module.

One request goes through `prepare` (template, tokenizer, defaults, limits), becomes an EngineRequest, and comes back as
StepOutputs on the engine's thread. Each stream owns a queue; detokenizing happens on the side that reads it.
"""

from __future__ import annotations

import asyncio
import queue
import random
import secrets
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from types import TracebackType
from typing import Self, TypeVar

from pocketllm.backends.base import Backend, Capabilities, EngineRequest, EngineStats, Health, LoadProgress, ProgressCallback, StepOutput
from pocketllm.backends.select import select_backend
from pocketllm.checkpoint import GenerationDefaults, open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, ContextLengthExceededError, PocketLLMError, RequestCancelledError
from pocketllm.hub import resolve_model
from pocketllm.outputs import FinishReason, GenerationOutput, TokenEvent, Usage
from pocketllm.protocol.fields import summary
from pocketllm.protocol.request import GenerationRequest
from pocketllm.sampling_params import MAX_SEED
from pocketllm.text.chat_template import ChatTemplate, load_chat_template
from pocketllm.text.detokenizer import Detokenizer
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer

T = TypeVar("T")


class GenerationService:
    """A loaded model that turns GenerationRequests into text.

    Args:
        backend: a loaded plane.
        tokenizer: of the checkpoint.
        chat_template: of the checkpoint, or None when it has none.
        defaults: what the checkpoint says of sampling and of its EOS ids.
        model_name: name shown to clients.
        seed: makes requests without a seed repeatable in their order of arrival; None draws from the system.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        defaults: GenerationDefaults,
        *,
        model_name: str,
        seed: int | None = None,
    ) -> None:
        self.backend = backend
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model_name = model_name
        self._defaults = defaults
        self._seeds = random.Random(seed) if seed is not None else secrets.SystemRandom()
        self._preparing: set[AsyncTokenStream] = set()

    @classmethod
    def open(cls, args: EngineArgs, progress: ProgressCallback | None = None) -> GenerationService:
        """Resolve, check and load the model that `args` names. Blocks until the engine is ready.

        Raises:
            ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
        """
        report = progress or _ignore_progress
        path = resolve_model(args.model, report)
        checkpoint = open_checkpoint(path, args.model_format)
        backend = select_backend(args, checkpoint)
        tokenizer = load_tokenizer(checkpoint, args.tokenizer)
        chat_template = load_chat_template(checkpoint)
        backend.load(report)
        return cls(backend, tokenizer, chat_template, checkpoint.generation_defaults, model_name=checkpoint.name, seed=args.seed)

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    def health(self) -> Health:
        return self.backend.health()

    def stats(self) -> EngineStats:
        return self.backend.stats()

    def cancel(self, request_id: str) -> bool:
        """End an active request at the next step boundary; its stream raises RequestCancelledError. False if it is not active."""
        preparing = [stream for stream in list(self._preparing) if stream.request_id == request_id]
        for stream in preparing:
            stream.is_cancelled = True
        return self.backend.cancel(request_id) or bool(preparing)

    def close(self) -> None:
        """Stop the engine; requests still active are cancelled."""
        self.backend.close()

    def prepare(self, request: GenerationRequest) -> EngineRequest:
        """Prompt ids, resolved sampling and budget of `request`.

        Raises:
            ConfigurationError: the prompt is empty, holds an id outside the vocabulary, or the template refuses the messages.
            ContextLengthExceededError: prompt and budget do not fit into the context.
        """
        prompt_ids = self._prompt_ids(request)
        sampling, defaults = request.sampling, self._defaults
        temperature = _first(sampling.temperature, defaults.temperature, 1.0)
        return EngineRequest(
            request_id=request.request_id,
            prompt_token_ids=prompt_ids,
            max_tokens=self._budget(len(prompt_ids), sampling.max_tokens, request.default_max_tokens),
            temperature=float(temperature),
            top_p=float(_first(sampling.top_p, defaults.top_p, 1.0)),
            top_k=max(0, _first(sampling.top_k, defaults.top_k, 0)),
            seed=_first(sampling.seed, None, self._seeds.randint(0, MAX_SEED)),
            eos_token_ids=frozenset(defaults.eos_token_ids),
        )

    def stream(self, request: GenerationRequest) -> TokenStream:
        """Submit `request` and return its events as a blocking iterator. Raises what `prepare` and `Backend.submit` raise."""
        return TokenStream(self, self.prepare(request))

    def stream_async(self, request: GenerationRequest) -> AsyncTokenStream:
        """The events of `request` as an async iterator; it is prepared and submitted when first awaited."""
        return AsyncTokenStream(self, request)

    def _prompt_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        prompt = request.prompt
        if not isinstance(prompt, str):
            ids = tuple(prompt)
        elif "messages" in request.metadata and self.chat_template is not None:
            text = self.chat_template.render(**request.metadata)
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
        else:
            ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
        if not ids:
            raise ConfigurationError('"prompt" is empty: there is no token to continue from. Send at least one character or token id.', param="prompt")
        vocab_size = self.capabilities.vocab_size
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ConfigurationError(
                    f'"prompt" holds {summary(token_id)}, which is no token id of this model: ids are whole numbers from 0 to {vocab_size - 1}.', param="prompt"
                )
        return ids

    def _budget(self, prompt_tokens: int, max_tokens: int | None, default: int | None) -> int:
        context = self.capabilities.context_length
        room = context - prompt_tokens
        if room < 1:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {context} tokens, and the prompt has {prompt_tokens}, which leaves no room for an answer. "
                "Shorten the prompt, or start the engine with a larger max_model_len.",
                param="prompt",
            )
        if max_tokens is not None and max_tokens > room:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {context} tokens, and you asked for {prompt_tokens + max_tokens} "
                f"({prompt_tokens} in the prompt, {max_tokens} for the answer). Shorten the prompt, or send a smaller max_tokens.",
                param="max_tokens",
            )
        if max_tokens is not None:
            return max_tokens
        return room if default is None else min(room, default)  # nobody asked for the default, so it refuses nobody


class _Answer:
    """Builds one request's events and its finished output from StepOutputs."""

    def __init__(self, request: EngineRequest, tokenizer: Tokenizer) -> None:
        self.request = request
        self._detokenizer = Detokenizer(tokenizer)
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._cached_tokens = 0
        self.last: TokenEvent | None = None

    def event(self, step: StepOutput) -> TokenEvent:
        if step.finish_reason == "cancelled":
            raise _cancelled(step.request_id)
        if step.finish_reason == "error":
            if isinstance(step.error, PocketLLMError):
                raise step.error
            reason = next(iter(str(step.error).splitlines()), type(step.error).__name__)  # torch adds lines of stack to its own
            raise PocketLLMError(f"Request {step.request_id} failed in the engine: {reason}") from step.error
        self._cached_tokens = max(self._cached_tokens, step.cached_tokens)
        text = self._detokenizer.step(step.token_ids)
        usage = None
        if step.finish_reason is not None:
            text += self._detokenizer.finish()
            usage = Usage(len(self.request.prompt_token_ids), step.num_generated, self._cached_tokens)
        self._text.append(text)
        self._token_ids.extend(step.token_ids)
        self.last = TokenEvent(step.request_id, text, step.token_ids, step.finish_reason, usage)
        return self.last

    def output(self) -> GenerationOutput:
        assert self.last is not None and self.last.finish_reason is not None and self.last.usage is not None
        reason: FinishReason = self.last.finish_reason
        return GenerationOutput(self.request.request_id, "".join(self._text), tuple(self._token_ids), reason, self.last.usage)


class TokenStream(Iterator[TokenEvent]):
    """The events of one request, read by a blocking loop. Closing it early cancels the request."""

    def __init__(self, service: GenerationService, request: EngineRequest) -> None:
        self.request_id = request.request_id
        self._service = service
        self._answer = _Answer(request, service.tokenizer)
        self._steps: queue.SimpleQueue[StepOutput] = queue.SimpleQueue()
        self._done = True  # until submitted: a refused request must not cancel an active one of the same id
        service.backend.submit(request, self._steps.put)
        self._done = False

    def __next__(self) -> TokenEvent:
        """The next event.

        Raises:
            RequestCancelledError: the request was cancelled.
            PocketLLMError: the request failed in the engine.
        """
        if self._done:
            raise StopIteration
        step = self._steps.get()
        self._done = step.finish_reason is not None
        return self._answer.event(step)

    def result(self) -> GenerationOutput:
        """Read to the end and return the finished answer."""
        for _ in self:
            pass
        return self._answer.output()

    def close(self) -> None:
        """Cancel the request unless it has finished."""
        if not self._done:
            self._done = True
            self._service.cancel(self.request_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()


class AsyncTokenStream(AsyncIterator[TokenEvent]):
    """The events of one request, read by an event loop. Closing it early, or cancelling the task that reads it, cancels the request."""

    def __init__(self, service: GenerationService, request: GenerationRequest) -> None:
        self.request_id = request.request_id
        self._service = service
        self._request = request
        self._answer: _Answer | None = None
        self._steps: asyncio.Queue[StepOutput] = asyncio.Queue()
        self._done = False
        self.is_cancelled = False  # set while the request is being prepared, when the backend does not know it yet

    async def start(self) -> None:
        """Prepare and submit the request, once; later calls do nothing. Raises what `prepare` and `Backend.submit` raise."""
        if self._answer is not None or self._done:
            return
        self._service._preparing.add(self)
        try:
            prepared = await asyncio.to_thread(self._service.prepare, self._request)
            if self.is_cancelled:
                raise _cancelled(self.request_id)
            answer = _Answer(prepared, self._service.tokenizer)
            self._service.backend.submit(prepared, _deliver_to(asyncio.get_running_loop(), self._steps))
            self._answer = answer
        except BaseException:
            self._done = True
            raise
        finally:
            self._service._preparing.discard(self)

    @property
    def prompt_tokens(self) -> int:
        """Number of prompt tokens; 0 before `start`."""
        return 0 if self._answer is None else len(self._answer.request.prompt_token_ids)

    async def __anext__(self) -> TokenEvent:
        """The next event. Raises as TokenStream does."""
        await self.start()
        if self._done or self._answer is None:
            raise StopAsyncIteration
        try:
            step = await self._steps.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        self._done = step.finish_reason is not None
        return self._answer.event(step)

    async def result(self) -> GenerationOutput:
        """Read to the end and return the finished answer."""
        async for _ in self:
            pass
        assert self._answer is not None
        return self._answer.output()

    async def aclose(self) -> None:
        """Cancel the request unless it has finished."""
        if not self._done:
            self._done = self.is_cancelled = True
            if self._answer is not None:
                self._service.cancel(self.request_id)

    def __del__(self) -> None:
        # A loop that was left with `break` has nobody to close the stream.
        if not self._done and self._answer is not None:
            self._service.cancel(self.request_id)


def _deliver_to(loop: asyncio.AbstractEventLoop, steps: asyncio.Queue[StepOutput]) -> Callable[[StepOutput], None]:
    def deliver(step: StepOutput) -> None:
        if not loop.is_closed():
            loop.call_soon_threadsafe(steps.put_nowait, step)

    return deliver


def _cancelled(request_id: str) -> RequestCancelledError:
    return RequestCancelledError(f"Request {request_id} was cancelled.")


def _first(value: T | None, default: T | None, fallback: T) -> T:
    if value is not None:
        return value
    return default if default is not None else fallback


def _ignore_progress(_progress: LoadProgress) -> None:
    pass


def as_prompts(prompts: str | Sequence[int] | Sequence[str] | Sequence[Sequence[int]]) -> list[str | tuple[int, ...]]:
    """One prompt per entry, whether the caller gave a text, a list of ids, or a list of either.

    Raises:
        ConfigurationError: the value has another shape; `param` is "prompt".
    """
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [tuple(items)]  # type: ignore[arg-type]
    found: list[str | tuple[int, ...]] = []
    for item in items:
        if isinstance(item, str):
            found.append(item)
        elif isinstance(item, Sequence):
            found.append(tuple(item))
        else:
            raise ConfigurationError(f'"prompt" holds {item!r}: send a string, a list of token ids, or a list of either.', param="prompt")
    return found
