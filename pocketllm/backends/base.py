"""The contract between generation and an execution plane. Token ids are the only currency here.

Everything above this door (templates, text, JSON, HTTP) is the same for both planes; everything below it (kernels,
KV layouts, schedulers) belongs to one plane. Importing this module loads neither torch nor the native module.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.errors import UnsupportedFeatureError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from pocketllm.parallel.rank import Rank

EngineFinishReason = Literal["stop", "length", "cancelled", "error"]
HealthState = Literal["loading", "ready", "dead", "closed"]

MAX_LOGPROBS = 20  # alternatives at each token

# What a plane declares that does all of logit_terms.py, ends rows as a request says, and orders them.
SAMPLER_FLAGS = (
    "penalties",
    "repetition_penalty",
    "logit_bias",
    "min_p",
    "min_tokens",
    "allowed_token_ids",
    "bad_words",
    "stop_token_ids",
    "ignore_eos",
    "priority",
)


@dataclass(frozen=True, slots=True)
class Capabilities:
    """Every fact about a loaded plane that a caller may branch on.

    Args:
        backend: "torch", "cpp" or "fake".
        device: device that runs the model, such as "cpu" or "cuda:0".
        max_slots: most requests that run at once.
        context_length: most tokens of prompt and answer together.
        vocab_size: token ids are in [0, vocab_size).
        per_request_sampling: temperature, top_p and seed are the request's own.
        per_request_top_k: so is top_k.
        continuous_batching: requests join and leave a running batch.
        chunked_prefill: long prompts are computed in pieces between decode steps.
        paged_kv: KV lives in blocks that requests share.
        prefix_caching: KV of an equal prompt prefix is reused.
        logprobs: log probabilities of a row's tokens, with up to MAX_LOGPROBS alternatives each.
        structured_outputs: `EngineRequest.constraint` is honoured.
        prompt_logprobs: `EngineRequest.prompt_logprobs` and a `max_tokens` of 0 are honoured.
        penalties: frequency and presence penalty; this and the seven below are what `EngineRequest.terms` may hold.
        repetition_penalty, logit_bias, min_p, min_tokens, allowed_token_ids, bad_words: the fields of LogitTerms.
        stop_token_ids, ignore_eos: a request's own ids end a row, and the checkpoint's don't where it says so.
        priority: `EngineRequest.priority` orders the rows.
        speculative_methods: names accepted by `speculative_method`.
        details: facts for people, such as the weight layout and its size; never branched on.
    """

    backend: str
    device: str
    max_slots: int
    context_length: int
    vocab_size: int
    per_request_sampling: bool = True
    per_request_top_k: bool = True
    continuous_batching: bool = True
    chunked_prefill: bool = True
    paged_kv: bool = True
    prefix_caching: bool = True
    logprobs: bool = False
    structured_outputs: bool = False
    prompt_logprobs: bool = False
    penalties: bool = False
    repetition_penalty: bool = False
    logit_bias: bool = False
    min_p: bool = False
    min_tokens: bool = False
    allowed_token_ids: bool = False
    bad_words: bool = False
    stop_token_ids: bool = False
    ignore_eos: bool = False
    priority: bool = False
    speculative_methods: tuple[str, ...] = ()
    details: dict[str, Any] = field(default_factory=dict)


class TokenConstraint(Protocol):
    """What one row may say next, such as a grammar. It belongs to the row: the engine alone calls it, one call at a time, from threads of its own.

    A preempted row keeps its constraint, since its tokens are computed again and not drawn again.
    """

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        """Write which ids may come next: bit i % 32 of word i // 32 is set where id i may. `mask` has ceil(vocab_size / 32) words.

        Raises:
            ConfigurationError: the constraint asks for more work than its limits allow; the row fails with it.
        """

    def accept(self, token_id: int) -> None:
        """The row has drawn `token_id`, which the last mask allowed; an EOS id is not told. Raises as `fill` does."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow what was accepted; the row then ends with "stop", without a step for an EOS id."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One row for the engine, every default resolved.

    Args:
        request_id: unique among the active requests.
        prompt_token_ids: at least one id, each in [0, vocab_size).
        max_tokens: at least 1, or 0 with `prompt_logprobs`, where nothing is generated; prompt and max_tokens together fit into the context.
        temperature: 0 is greedy; then top_p, top_k and seed are not read.
        top_p: in (0, 1]; 1 is off.
        top_k: 0 is off.
        seed: seed of this row's own random stream.
        eos_token_ids: ids that end the row, the checkpoint's and the request's own; the id itself is not part of the answer.
        stop_token_ids: those of them that the request named itself.
        ignores_eos: the request has it that no others end the row.
        logprobs: how many alternatives to rank at each token, 0 for the drawn token's own log probability alone; None ranks nothing.
        constraint: what the row may say, or None for anything.
        terms: what changes the logits, or None for nothing.
        priority: rows with a lower number are started first and preempted last; of equal ones, those that came first.
        prompt_logprobs: how many alternatives to rank at each token of the prompt but the first, as `logprobs` does; None ranks nothing. Such a row's prompt
            is computed whole, and takes nothing of it from the prefix cache.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    logprobs: int | None = None
    constraint: TokenConstraint | None = field(default=None, compare=False)
    stop_token_ids: frozenset[int] = frozenset()
    ignores_eos: bool = False
    terms: LogitTerms | None = None
    priority: int = 0
    prompt_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log probabilities at one token, over the whole vocabulary, before temperature, top_k, top_p and constraint.

    None is below -9999.0, which stands for what the model finds impossible.

    Args:
        logprob: of the token that was drawn, or that the prompt has; finite, at most 0.
        top: (id, logprob) of the most likely ids, most likely first, as many as were asked for; of equal ones the lower id comes first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)  # not frozen, which would make it five times as slow to build, a row and a step
class StepOutput:
    """What one engine step gave one row. Outputs of a row arrive in order; nothing follows a finish.

    Args:
        request_id: the row.
        token_ids: new ids; an EOS id ends the row and is left out.
        num_generated: tokens that the engine has generated so far, the EOS step included.
        finish_reason: set on the last output.
        cached_tokens: prompt tokens whose KV came from the prefix cache.
        error: why the row failed, when finish_reason is "error".
        logprobs: one entry for each of `token_ids` where the request asked for them, else empty.
        prompt_logprobs: on the row's first output, one entry for each token of the prompt but the first, where the request asked for them; else empty.
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_generated: int
    finish_reason: EngineFinishReason | None = None
    cached_tokens: int = 0
    error: BaseException | None = None
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """How far loading has come: `fraction` in [0, 1] and a line for people, such as "weights 12/30"."""

    fraction: float
    message: str


@dataclass(frozen=True, slots=True)
class Health:
    """State of the engine. Once dead or closed it stays so, and every submit is refused."""

    state: HealthState
    detail: str = ""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Gauges and running totals since load, read at any time from any thread.

    `expert_lookups` counts the routed experts that steps needed, `expert_hits` those of them that were in memory, and `expert_bytes` is what lies there;
    all 0 where no experts stay in their file.
    """

    running: int = 0
    waiting: int = 0
    kv_blocks_total: int = 0
    kv_blocks_used: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    expert_lookups: int = 0
    expert_hits: int = 0
    expert_bytes: int = 0


ProgressCallback = Callable[[LoadProgress], None]
StepCallback = Callable[[StepOutput], None]


class Backend(ABC):
    """One execution plane with one loaded model.

    Life: construct (cheap, refuses what the plane can't run), load (slow), submit and cancel from any thread, close.
    The plane runs one engine thread; `on_step` is called on it and must return at once.

    Attributes:
        DECLARES: the flags of Capabilities that are true of each loaded plane of this kind, where they are false by default.
        on_death: told why, on a thread of the plane, when the engine of a plane with several ranks has died of itself; may be set at any time.
        rank: this process among several ranks, set before `load` by who started the others; None looks into the environment.
    """

    DECLARES: ClassVar[frozenset[str]] = frozenset()
    on_death: Callable[[str], None] | None = None
    rank: Rank | None = None

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Facts of the loaded plane; complete once `load` returned."""

    @abstractmethod
    def load(self, progress: ProgressCallback) -> None:
        """Read the weights, allocate the KV cache, start the engine thread. Called once.

        Raises:
            ConfigurationError, UnsupportedFeatureError: naming the file, the tensor or the option and the remedy.
        """

    def follow(self, progress: ProgressCallback, on_ready: Callable[[], None]) -> None:
        """As a rank above 0: load, and compute what rank 0 orders until it stops. Takes the place of `load`, and no request.

        Args:
            on_ready: called once, when this rank can compute.

        Raises:
            ConfigurationError, UnsupportedFeatureError: as `load`. BackendUnavailableError: another rank is lost.
        """
        raise UnsupportedFeatureError(
            f'"tensor_parallel_size" is not supported on the {self.capabilities.backend} plane: one device runs the whole model. Leave it out.',
            param="tensor_parallel_size",
        )

    def abandon(self, reason: str) -> None:
        """Another rank is lost, as `reason` says. Called on any thread, and the engine thread may be waiting for that rank for ever: a plane of several ranks
        ends every active row with an error all the same, and is dead. One that has no other ranks closes."""
        self.close()

    @abstractmethod
    def submit(self, request: EngineRequest, on_step: StepCallback) -> None:
        """Queue one row; never blocks on the device and never drops.

        Raises:
            BackendUnavailableError: not loaded, dead or closed.
            ConfigurationError: request_id is active already, or the request breaks EngineRequest's terms.
        """

    @abstractmethod
    def cancel(self, request_id: str) -> bool:
        """End an active row at the next step boundary with finish_reason "cancelled". False if it is not active."""

    @abstractmethod
    def health(self) -> Health:
        """Current state, from any thread, without waiting for the device."""

    @abstractmethod
    def stats(self) -> EngineStats:
        """Current gauges and totals, from any thread, without waiting for the device."""

    @abstractmethod
    def close(self) -> None:
        """Stop the engine thread; rows still active end with "cancelled". May be called more than once."""
