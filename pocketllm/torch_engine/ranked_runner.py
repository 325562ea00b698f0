"""One model over several ranks: rank 0's runner tells every step to the others, which compute it with it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pocketllm.torch_engine.logit_edits import has_mask
from pocketllm.torch_engine.masks import MaskSource, Words
from pocketllm.torch_engine.rank_group import RankGroup
from pocketllm.torch_engine.runner import Flight, Runner
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy
from pocketllm.torch_engine.step_order import StepReader, StepWriter


class LeadingRunner:
    """Rank 0's; see runner.Runner.

    Args:
        inner: computes this rank's part.
        group: the ranks.
    """

    def __init__(self, inner: Runner, group: RankGroup) -> None:
        self.vocab_size, self.runs_ahead = inner.vocab_size, inner.runs_ahead
        self._inner, self._group = inner, group
        self._writer = StepWriter()

    def launch(self, step: Sequence[ScheduledRow], masks: MaskSource, copies: Sequence[StateCopy]) -> Flight:
        self._group.order(self._writer.write(step, copies))
        return self._inner.launch(step, _SharedMasks(masks, self._group, self.vocab_size), copies)

    def release(self, row: Row) -> None:
        self._writer.release(row.slot)
        self._inner.release(row)

    def close(self, *, has_failed: bool) -> None:
        """Tell the others to end, or, after a step that failed midway, leave them, which ends them too."""
        if not has_failed:
            self._group.order(())
        self._inner.close(has_failed=has_failed)
        self._group.close()


def follow(inner: Runner, group: RankGroup) -> None:
    """Another rank's loop: compute what rank 0 tells until it ends.

    Raises:
        BackendUnavailableError: rank 0 is lost.
    """
    reader, masks = StepReader(), _SharedMasks(None, group, inner.vocab_size)
    try:
        while numbers := group.receive():
            released, step, copies = reader.read(numbers)
            for row in released:
                inner.release(row)
            inner.launch(step, masks, copies)
        inner.close(has_failed=False)
    finally:
        group.close()


class _SharedMasks:
    """Masks that rank 0 has, on every rank; see masks.MaskSource.

    Args:
        own: rank 0's, None on the others.
    """

    def __init__(self, own: MaskSource | None, group: RankGroup, vocab_size: int) -> None:
        self._own, self._group = own, group
        self._num_words = -(-vocab_size // 32)

    def take_all(self, rows: Sequence[Row]) -> tuple[dict[int, Words], dict[int, BaseException]]:
        places = [place for place, row in enumerate(rows) if has_mask(row.request)]
        words, errors = self._own.take_all(rows) if self._own is not None else ({}, {})
        if not places:
            return words, errors
        told = np.zeros((len(places), 1 + self._num_words), np.uint32)  # whether there is a mask, and its words
        for line, place in enumerate(places):
            if place in words:
                told[line, 0], told[line, 1:] = 1, words[place]
        self._group.share_words(told)
        return {place: told[line, 1:].copy() for line, place in enumerate(places) if told[line, 0]}, errors
