"""Constraints made of plain ids, for tests of what honours them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt


class IdConstraint:
    """Allows `allowed(accepted)` after the ids accepted so far, and is complete after `length` of them.

    It asserts that one call runs at a time, and remembers how it was used.
    """

    def __init__(self, allowed: Callable[[Sequence[int]], Iterable[int]] | Iterable[int], *, length: int | None = None, seconds: float = 0.0) -> None:
        self._allowed = allowed if callable(allowed) else lambda _accepted, ids=frozenset(allowed): ids
        self._length = length
        self._seconds = seconds
        self._busy = threading.Lock()
        self.accepted: list[int] = []
        self.num_fills = 0
        self.last_call = 0.0
        self.fill_threads: set[str] = set()

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        assert self._busy.acquire(blocking=False), "two calls at once"
        try:
            assert not mask.any()
            time.sleep(self._seconds)
            self.num_fills += 1
            self.fill_threads.add(threading.current_thread().name)
            for token_id in self._allowed(self.accepted):
                mask[token_id // 32] |= np.uint32(1 << (token_id % 32))
            self.last_call = time.monotonic()
        finally:
            self._busy.release()

    def accept(self, token_id: int) -> None:
        assert self._busy.acquire(blocking=False), "two calls at once"
        try:
            assert token_id in self._allowed(self.accepted), "an id that the mask did not allow"
            self.accepted.append(token_id)
            self.last_call = time.monotonic()
        finally:
            self._busy.release()

    @property
    def is_complete(self) -> bool:
        return len(self.accepted) == self._length
