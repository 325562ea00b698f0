"""What the engine's loop needs of whatever computes its steps, at once or behind its back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from pocketllm.backends.base import TokenLogprobs
from pocketllm.torch_engine.masks import MaskSource
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy


@dataclass(frozen=True, slots=True)
class Draw:
    """The id that a row drew, and its log probabilities where the row asked for them and the id is not one that ends it."""

    token_id: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Ranked:
    """What a row that does not sample is given: the log probabilities of `ScheduledRow.ranked`, as the Draw of one that does has them too."""

    prompt_logprobs: tuple[TokenLogprobs, ...]


Result = Draw | Ranked | BaseException


class Flight(Protocol):
    """A step that was launched."""

    def result(self) -> Mapping[int, Result]:
        """Wait for the step; called once, and in the order of the launches.

        Returns:
            By place in the step: what each row that samples or ranks its prompt was given, or why it could not. A runner that sees at once that a row
            computed values which are not finite says so without a sample too; for others the row fails when it samples.
        """


@dataclass(frozen=True, slots=True)
class Landed:
    """The flight of a step that was computed when it was launched."""

    results: Mapping[int, Result]

    def result(self) -> Mapping[int, Result]:
        return self.results


class Runner(Protocol):
    """One model with its cache. One thread calls this, the engine's.

    Steps take effect in the order of their launches, `copies` before the step they come with. So a block or a slot may be given to
    another row, and be written by a later step, while a step that still writes to it is under way.

    Attributes:
        vocab_size: ids are in [0, vocab_size).
        runs_ahead: `launch` returns before the step is computed, so that the engine launches the next one before it asks for the result.
    """

    vocab_size: int
    runs_ahead: bool

    def launch(self, step: Sequence[ScheduledRow], masks: MaskSource, copies: Sequence[StateCopy]) -> Flight:
        """Compute one step, or begin to.

        What is read of the rows has to be read here: they change as soon as this returns. At most one flight is under way when this is called.
        Its ids are those that rows in `step` have as `UNKNOWN`, each as its row's last token and the only one that the row computes: the
        runner takes them from where that step drew them. The draw of a row that samples is its number `row.num_generated`.

        Args:
            step: rows with their tokens, none twice; not empty.
            masks: has the mask of each row in `step` that samples and has a constraint, to be taken here; rows with a constraint are in
                `step` only when no flight is under way.
            copies: between state slots of a hybrid model, to be carried out in order before the step.

        Raises:
            Anything: the engine ends every row, and is dead.
        """

    def release(self, row: Row) -> None:
        """`row` leaves the running rows, ended or preempted, and `row.slot`, which it still has, becomes free for another row.

        It may be part of the flight that is under way, whose result for it is then dropped."""

    def close(self, *, has_failed: bool) -> None:
        """The last call: the engine ends, after a step that failed where `has_failed`."""
