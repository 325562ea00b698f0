"""Masks of rows: which ids each may draw next. Those of constraints are computed on threads of their own while the device works."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pocketllm.backends.base import TokenConstraint
from pocketllm.torch_engine.logit_edits import allowed_words
from pocketllm.torch_engine.scheduler import Row

Words = npt.NDArray[np.uint32]


class MaskSource(Protocol):
    """Where a runner takes the masks of a step from."""

    def take_all(self, rows: Sequence[Row]) -> tuple[dict[int, Words], dict[int, BaseException]]:
        """As Masks.take_all."""


_NUM_THREADS = 4  # beside the threads that compute; each starts when a mask finds none idle


class Masks:
    """The next mask of each row with a constraint; rows without one cost nothing. One thread calls this, the engine's.

    Args:
        vocab_size: ids are in [0, vocab_size).
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size, self._num_words = vocab_size, -(-vocab_size // 32)
        self._futures: dict[Row, Future[Words]] = {}
        self._pool = ThreadPoolExecutor(_NUM_THREADS, "pocketllm-mask")

    def __len__(self) -> int:
        """How many masks were asked for and not taken."""
        return len(self._futures)

    def ask(self, row: Row) -> None:
        """Begin the row's next mask, if it has a constraint."""
        constraint = row.request.constraint
        if constraint is None:
            return
        try:
            self._futures[row] = self._pool.submit(self._fill, constraint)
        except RuntimeError as error:  # the system refuses a thread, or Python is ending: the row's own error, when it takes its mask
            refused: Future[Words] = Future()
            refused.set_exception(error)
            self._futures[row] = refused

    def take(self, row: Row) -> Words | BaseException:
        """Wait for the mask of a row with a constraint: its words, as `TokenConstraint.fill` describes them, or what `fill` raised."""
        future = self._futures.pop(row)
        error = future.exception()
        return future.result() if error is None else error

    def take_all(self, rows: Sequence[Row]) -> tuple[dict[int, Words], dict[int, BaseException]]:
        """Wait for the masks of those of `rows` that have one: what `take` gives of a constraint, and the ids that the request allows, words and failures
        apart, by place in `rows`."""
        words: dict[int, Words] = {}
        errors: dict[int, BaseException] = {}
        for place, row in enumerate(rows):
            if row.request.constraint is not None:
                mask = self.take(row)
                if isinstance(mask, BaseException):
                    errors[place] = mask
                else:
                    words[place] = mask
            if (allowed := allowed_words(row, self._vocab_size)) is not None:
                words[place] = words[place] & allowed if place in words else allowed
        return words, errors

    def accept(self, row: Row, token_id: int) -> BaseException | None:
        """Tell the constraint of a row what it drew, before the scheduler resolves it, and begin the next mask unless the row ends here.

        Returns what the constraint raised.
        """
        request = row.request
        if request.constraint is None or token_id in request.eos_token_ids:
            return None
        try:
            request.constraint.accept(token_id)
            row.is_complete = bool(request.constraint.is_complete)
        except BaseException as error:  # a panic of a native module is no Exception, and is this row's alone all the same
            return error
        if not row.is_complete and row.num_generated < request.max_tokens:  # this id is counted already
            self.ask(row)
        return None

    def drop(self, row: Row) -> None:
        """Forget a row that leaves the engine. Nothing calls its constraint afterwards."""
        future = self._futures.pop(row, None)
        if future is not None and not future.cancel():
            future.exception()  # waits for the mask under way

    def close(self) -> None:
        """Drop every row and end the threads."""
        self._pool.shutdown(cancel_futures=True)
        self._futures.clear()

    def _fill(self, constraint: TokenConstraint) -> Words:
        words = np.zeros(self._num_words, np.uint32)
        constraint.fill(words)
        return words
