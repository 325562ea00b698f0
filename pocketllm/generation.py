"""Generation: text above, token ids below. LLM, AsyncLLM, the server and the CLI are thin skins over this module.

One request goes through `prepare` (template, tokenizer, defaults, limits), becomes an EngineRequest, and comes back as
StepOutputs on the engine's thread. Each stream owns a queue; detokenizing happens on the side that reads it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from pocketllm.active_request import ActiveRequest, Prepared
from pocketllm.answer_form import AnswerForm, answer_form
from pocketllm.backends.base import Backend, Capabilities, EngineRequest, EngineStats, Health, LoadProgress, ProgressCallback, TokenConstraint
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.backends.open import open_backend
from pocketllm.checkpoint import GenerationDefaults
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, ContextLengthExceededError
from pocketllm.inbox import Inbox
from pocketllm.parallel.local_ranks import LocalRanks
from pocketllm.parallel.rank import Rank, has_launcher
from pocketllm.protocol.features import VOCABULARY_FEATURES, Surface, features
from pocketllm.protocol.refusals import refusal, summary
from pocketllm.protocol.request import GenerationRequest
from pocketllm.protocol.tools import with_described_tools
from pocketllm.row_terms import check_min_tokens, row_terms, stop_token_ids
from pocketllm.sampling_params import MAX_SEED
from pocketllm.splitmix import splitmix64
from pocketllm.text.answer import Reading
from pocketllm.text.chat_template import PromptFormat, load_chat_template
from pocketllm.text.conversation import render_conversation
from pocketllm.text.grammar import GrammarCompiler
from pocketllm.text.infill import find_infill_markers
from pocketllm.text.reasoned import AfterReasoning
from pocketllm.text.reasoning import find_markers
from pocketllm.text.stop import StopSequences
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer
from pocketllm.text.tool_parsers import find_syntax
from pocketllm.token_stream import AsyncTokenStream, TokenStream

logger = logging.getLogger(__name__)

T = TypeVar("T")
CALL_TOKEN = "<tool_call>"  # one token where the model has learnt such calls


class GenerationService:
    """A loaded model that turns GenerationRequests into text.

    Args:
        backend: a loaded plane.
        tokenizer: of the checkpoint.
        chat_template: of the checkpoint, or None when it has none.
        defaults: what the checkpoint says of sampling and of its EOS ids.
        model_name: name shown to clients.
        model_type: config.json's, which tells how the model writes calls where its template does not.
        seed: makes requests without a seed repeatable in their order of arrival; None draws from the system.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        chat_template: PromptFormat | None,
        defaults: GenerationDefaults,
        *,
        model_name: str,
        model_type: str = "",
        seed: int | None = None,
    ) -> None:
        self.backend = backend
        self._close = backend.close
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.model_name = model_name
        self._defaults = defaults
        self._seeds = random.Random(seed) if seed is not None else secrets.SystemRandom()
        self._reasoning = find_markers(tokenizer)
        self._infill = find_infill_markers(tokenizer)
        self._call_id = tokenizer.backend.token_to_id(CALL_TOKEN)
        self._syntax = find_syntax(None if chat_template is None else chat_template.source, model_type)
        self._grammars = GrammarCompiler(tokenizer, backend.capabilities.vocab_size)
        self._has_warned_of_tools = False
        self._lock = threading.Lock()
        self._active: dict[str, ActiveRequest] = {}  # guarded by _lock
        self._inboxes: dict[asyncio.AbstractEventLoop, Inbox] = {}

    @classmethod
    def open(cls, args: EngineArgs, progress: ProgressCallback | None = None) -> GenerationService:
        """Resolve, check and load the model that `args` names. Blocks until the engine is ready. Starts the other ranks where no launcher has.

        Raises:
            ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
            TensorParallelSupervisorError: another rank could not be started, or failed.
        """
        report = progress or _ignore_progress
        is_launched = args.tensor_parallel_size > 1 and has_launcher(args)
        if is_launched and (rank := Rank.from_environment(args)).index > 0:
            raise ConfigurationError(
                f"rank {rank.index} takes no requests: run this on rank 0, and as the others pocketllm serve with --no-tensor-parallel-supervisor.",
                param="tensor_parallel_rank",
            )
        checkpoint, backend = open_backend(args, report)
        tokenizer = load_tokenizer(checkpoint, args.tokenizer)
        chat_template = load_chat_template(checkpoint)
        ranks = None
        if args.tensor_parallel_size > 1 and not is_launched:
            ranks = LocalRanks(args, backend)
            ranks.load(report)
        else:
            backend.load(report)
        service = cls(
            backend, tokenizer, chat_template, checkpoint.generation_defaults, model_name=checkpoint.name, model_type=checkpoint.architecture, seed=args.seed
        )
        if ranks is not None:
            service._close = ranks.close
            weakref.finalize(service, ranks.close)  # for who drops it without closing it
        return service

    @property
    def capabilities(self) -> Capabilities:
        return self.backend.capabilities

    @property
    def features(self) -> frozenset[str]:
        """Everything that is acted on, by the plane and by the host."""
        return self.features_of("full")

    def features_of(self, surface: Surface) -> frozenset[str]:
        """Those of them that `surface` shows."""
        return features(self.capabilities, surface, frozenset() if self._infill is None else frozenset(VOCABULARY_FEATURES))

    def health(self) -> Health:
        return self.backend.health()

    def stats(self) -> EngineStats:
        return self.backend.stats()

    def cancel(self, request_id: str) -> bool:
        """End an active request at the next step boundary; its stream raises RequestCancelledError. False if it is not active."""
        active = self._active.get(request_id)
        return active is not None and active.cancel()

    def close(self) -> None:
        """Stop the engine, and the ranks that were started for it; requests still active are cancelled."""
        self._close()

    def activate(self, request_id: str) -> ActiveRequest:
        """Take an id, until the request's last row has ended.

        Raises:
            ConfigurationError: a request of that id is active.
        """
        with self._lock:
            if request_id in self._active:
                raise ConfigurationError(
                    f'"request_id" = "{request_id}" is active already: send another one, or wait until that request has ended.', param="request_id"
                )
            active = self._active[request_id] = ActiveRequest(self.backend, request_id, lambda: self._active.pop(request_id, None))
        return active

    def inbox(self) -> Inbox:
        """The way from the engine's thread to the running event loop."""
        loop = asyncio.get_running_loop()
        inbox = self._inboxes.get(loop)
        if inbox is None:
            inbox = Inbox(loop)
            self._inboxes = {**{other: its for other, its in self._inboxes.items() if not other.is_closed()}, loop: inbox}
        return inbox

    def prepare(self, requests: Sequence[GenerationRequest]) -> Prepared:
        """Prompt ids, resolved sampling, budgets and constraints of the rows of one HTTP or library request.

        Args:
            requests: one a prompt; they share their id and their sampling.

        Raises:
            ConfigurationError: a prompt is empty, holds an id outside the vocabulary, or the template refuses the messages.
            UnsupportedFeatureError: a schema can't be honoured.
            ContextLengthExceededError: prompt and budget do not fit into the context.
        """
        first, rows_per_prompt = requests[0], requests[0].sampling.num_candidates
        is_single = len(requests) * rows_per_prompt == 1
        terms = row_terms(first.sampling, self.tokenizer, self.capabilities.vocab_size)
        rows: list[EngineRequest] = []
        echoes: list[str] = []
        for request in requests:
            prompt_ids, seed = self._prompt_ids(request), request.sampling.seed
            if request.echo:
                echoes.append(request.prompt if isinstance(request.prompt, str) else self.tokenizer.decode(prompt_ids, skip_special_tokens=False))
            if seed is None:
                seed = self._seeds.randint(0, MAX_SEED)
            for choice in range(rows_per_prompt):
                row_id = first.request_id if is_single else f"{first.request_id}/{len(rows)}"  # no id of a request has a slash
                rows.append(self._row(request, row_id, prompt_ids, choice_seed(seed, choice), terms))
        reading = replace(self._reading(first, rows[0].prompt_token_ids), echoes=tuple(echoes))
        leads = reading.reasoning is not None and (reading.is_reasoning or not first.continues)
        form = answer_form(first, self._syntax, reasons=leads)
        if form.grammar is not None and first.sampling.ignore_eos:
            raise ConfigurationError(
                '"ignore_eos" = true can\'t hold for an answer that is held to a form, which ends where the form does: leave one of the two out.',
                param="ignore_eos",
            )
        if form.grammar is not None:
            eos = rows[0].stop_token_ids.union(self._defaults.eos_token_ids)  # a form ends there, whatever was echoed
            rows = [replace(row, constraint=self._constraint(first, form, reading), eos_token_ids=eos, ignores_eos=False) for row in rows]
        elif first.thinking_budget is not None:
            rows = [replace(row, constraint=self._constraint(first, form, reading)) for row in rows]
        if first.form is not None and leads:
            reading = replace(reading, skips_newlines=True)
        if form.syntax is not None:
            reading = replace(reading, parser=partial(form.syntax.parser, () if first.tools is None else first.tools.definitions))
        if form.grammar is None and self._syntax is not None and reading.reasoning is not None:
            reading = replace(reading, call_id=self._call_id)
        return Prepared(first.request_id, tuple(rows), rows_per_prompt, reading, first.sampling.n if rows_per_prompt > first.sampling.n else None)

    def prepare_grammars(self) -> None:
        """Do beforehand what the first answer that is held to a grammar would have to wait for, and with it every other request."""
        if self.capabilities.structured_outputs:
            self._grammars.prepare()

    def stream(self, *requests: GenerationRequest) -> TokenStream:
        """Submit `requests`, one a prompt, and return their events as a blocking iterator. Raises what `prepare` and `Backend.submit` raise."""
        return TokenStream(self, requests)

    def stream_async(self, *requests: GenerationRequest) -> AsyncTokenStream:
        """The events of `requests` as an async iterator; they are prepared and submitted when first awaited."""
        return AsyncTokenStream(self, requests)

    def _row(self, request: GenerationRequest, row_id: str, prompt_ids: tuple[int, ...], seed: int, terms: LogitTerms | None) -> EngineRequest:
        sampling, defaults = request.sampling, self._defaults
        max_tokens, stops = self._budget(request, len(prompt_ids)), stop_token_ids(sampling, self.capabilities.vocab_size)
        check_min_tokens(sampling, max_tokens)
        ranks = [count for count in (sampling.prompt_logprobs, sampling.logprobs if request.echo else None) if count is not None]
        # Clients that rank a text and have one token generated, which they drop, count on its being there.
        ignores_eos = sampling.ignore_eos or (request.echo and max_tokens == 1)
        return EngineRequest(
            request_id=row_id,
            prompt_token_ids=prompt_ids,
            max_tokens=max_tokens,
            temperature=float(_first(sampling.temperature, defaults.temperature, 1.0)),
            top_p=float(_first(sampling.top_p, defaults.top_p, 1.0)),
            top_k=max(0, _first(sampling.top_k, defaults.top_k, 0)),
            seed=seed,
            eos_token_ids=stops if ignores_eos else stops.union(defaults.eos_token_ids),
            logprobs=0 if sampling.logprobs is None and sampling.num_candidates > sampling.n else sampling.logprobs,
            prompt_logprobs=max(ranks, default=None),
            stop_token_ids=stops,
            ignores_eos=ignores_eos,
            terms=terms,
            priority=sampling.priority,
        )

    def _constraint(self, request: GenerationRequest, form: AnswerForm, reading: Reading) -> TokenConstraint:
        eos, budget, markers = frozenset(self._defaults.eos_token_ids), request.thinking_budget, reading.reasoning
        constraint = None if form.grammar is None else self._grammars.constraint(form.grammar, eos, param=form.param)
        if markers is None:
            if constraint is None or budget is not None:
                raise refusal("thinking_token_budget", budget, "the reasoning of this model has no marks", 'Leave "thinking_token_budget" out', is_shape=False)
            return constraint
        return AfterReasoning(
            constraint,
            markers.start_id,
            markers.end_id,
            eos,
            is_open=reading.is_reasoning,
            budget=budget,
            call_id=self._call_id if constraint is None and self._syntax is not None else None,
        )

    def _reading(self, request: GenerationRequest, prompt_ids: tuple[int, ...]) -> Reading:
        stop = request.sampling.stop_sequences
        markers = self._reasoning if "messages" in request.metadata else None
        return Reading(
            tokenizer=self.tokenizer,
            stop=StopSequences(stop) if stop else None,
            reasoning=markers,
            is_reasoning=markers is not None and markers.is_open(prompt_ids, self.tokenizer),
            has_logprobs=request.sampling.logprobs is not None,
            is_streamed=request.is_streamed,
        )

    def _prompt_ids(self, request: GenerationRequest) -> tuple[int, ...]:
        prompt, variables = request.prompt, self._template_variables(request)
        if not isinstance(prompt, str):
            ids = tuple(prompt)
        elif variables:
            text = render_conversation(self.chat_template, variables, continues=request.continues)
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=self.chat_template is None))
        else:
            ids = tuple(self.tokenizer.encode(prompt, add_special_tokens=True))
        if request.suffix and self._infill is not None:
            start = tuple(self.tokenizer.encode("", add_special_tokens=True))  # a BOS, which comes before the markers
            start = start if start == ids[: len(start)] else ()
            ids = start + self._infill.prompt(ids[len(start) :], self.tokenizer.encode(request.suffix, add_special_tokens=False))
        if not ids:
            raise ConfigurationError('"prompt" is empty: there is no token to continue from. Send at least one character or token id.', param="prompt")
        vocab_size = self.capabilities.vocab_size
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
            return ids
        for token_id in ids:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ConfigurationError(
                    f'"prompt" holds {summary(token_id)}, which is no token id of this model: ids are whole numbers from 0 to {vocab_size - 1}.', param="prompt"
                )
        return ids

    def _template_variables(self, request: GenerationRequest) -> Mapping[str, Any]:
        """What the template is given. One that ignores tools, or none at all, has those that must be called described in the system turn."""
        template = self.chat_template
        if request.tools is None or (template is not None and template.renders_tools):
            return request.metadata
        if not request.tools.is_forced:
            if not self._has_warned_of_tools:
                self._has_warned_of_tools = True
                logger.warning("This model's chat template has no place for tools: unless a call is forced, the model does not know of them.")
            return request.metadata
        return {**request.metadata, "messages": with_described_tools(request.metadata["messages"], request.tools.callable)}

    def _budget(self, request: GenerationRequest, prompt_tokens: int) -> int:
        max_tokens, default = request.sampling.max_tokens, request.default_max_tokens
        context = self.capabilities.context_length
        room = context - prompt_tokens
        if room < 1 and max_tokens != 0:
            raise ContextLengthExceededError(
                f"This model's maximum context length is {context} tokens, and the prompt has {prompt_tokens}, which leaves no room for an answer. "
                "Shorten the prompt; where the model was made for more, start the engine with a larger max_model_len or kv_cache_memory.",
                param="messages" if "messages" in request.metadata else "prompt",
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


def choice_seed(seed: int, choice: int) -> int:
    """Seed of choice `choice` of a request: its own for choice 0, else number `choice`, from 1, of the SplitMix64 stream that begins at it, 63 bits."""
    return seed if choice == 0 else int(splitmix64(np.uint64(seed), np.uint64(choice - 1))) & MAX_SEED


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
    if not _is_list(prompts):
        raise _no_prompt(prompts)
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [tuple(items)]  # type: ignore[arg-type]
    found: list[str | tuple[int, ...]] = []
    for item in items:
        if isinstance(item, str):
            found.append(item)
        elif _is_list(item):
            found.append(tuple(item))  # type: ignore[arg-type]
        else:
            raise _no_prompt(item)
    return found


def _is_list(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray, memoryview))


def _no_prompt(value: object) -> ConfigurationError:
    return ConfigurationError(f'"prompt" holds {summary(value)}: send a string, a list of token ids, or a list of either.', param="prompt")
