"""What holds the answer of a model that reasons: the answer alone, once the reasoning has ended, and the reasoning to a number of tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pocketllm.backends.base import TokenConstraint
from pocketllm.text.grammar import bit_of

if TYPE_CHECKING:
    import numpy.typing as npt

_ALL = np.uint32(0xFFFFFFFF)


class AfterReasoning:
    """A constraint that begins where the reasoning ends.

    While reasoning is open everything may come, but no end of a row whose answer is held to something. Before it is open, it may be opened, or the answer
    begins at once. Reasoning that has its budget of tokens is closed.

    Args:
        inner: holds the answer; None where it may be anything.
        start_id: opens reasoning; None where only the prompt does.
        end_id: ends it.
        eos_token_ids: ids that end the row.
        is_open: whether the prompt has left reasoning open.
        budget: most tokens between the two; None is any number.
        call_id: also ends the reasoning, and is part of the answer; for an answer that may be anything.
    """

    def __init__(
        self,
        inner: TokenConstraint | None,
        start_id: int | None,
        end_id: int,
        eos_token_ids: frozenset[int],
        *,
        is_open: bool,
        budget: int | None = None,
        call_id: int | None = None,
    ) -> None:
        self._inner = inner
        self._start = None if start_id is None else bit_of(start_id)
        self._start_id = start_id
        self._end_id = end_id
        self._call_id = call_id
        self._left = budget  # tokens
        self._closed = [bit_of(id_) for id_ in eos_token_ids] if inner is not None else []
        self._closed += [] if start_id is None else [bit_of(start_id)]
        self._is_open = is_open
        self._may_open = not is_open and start_id is not None

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        if self._is_open and self._left == 0:
            mask[:] = 0
            word, bit = bit_of(self._end_id)
            mask[word] = bit
        elif self._is_open:
            mask[:] = _ALL
            for word, bit in self._closed:
                if word < len(mask):
                    mask[word] &= ~bit
        elif self._inner is None:
            mask[:] = _ALL
        else:
            self._inner.fill(mask)
            if self._may_open and self._start is not None:
                word, bit = self._start
                mask[word] |= bit

    def accept(self, token_id: int) -> None:
        if self._is_open:
            self._is_open = token_id not in (self._end_id, self._call_id)
            if self._left is not None and self._is_open:
                self._left -= 1
        elif self._may_open and token_id == self._start_id:
            self._is_open, self._may_open = True, False
        else:
            self._may_open = False
            if self._inner is not None:
                self._inner.accept(token_id)

    @property
    def is_complete(self) -> bool:
        return not self._is_open and self._inner is not None and self._inner.is_complete
