"""Which part of a model one rank holds. Plain ints, no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Of what is dealt out to `size` ranks, that of rank `index`."""

    index: int = 0
    size: int = 1

    def of(self, count: int) -> range:
        """An equal share of `count` things that lie one after another; the ranks divide `count`, as parallel/shards.py has checked."""
        assert count % self.size == 0, f"{self.size} ranks can't have equal shares of {count}"
        each = count // self.size
        return range(self.index * each, (self.index + 1) * each)

    def nearly(self, count: int) -> range:
        """A share that is equal up to one."""
        return range(self.index * count // self.size, (self.index + 1) * count // self.size)

    def all_nearly(self, count: int) -> list[range]:
        """`nearly` of each rank."""
        return [Share(index, self.size).nearly(count) for index in range(self.size)]


ALONE = Share()


def scaled(part: range, width: int, start: int = 0) -> range:
    """Places of the values of things that have `width` each, the first of which is at `start`."""
    return range(start + part.start * width, start + part.stop * width)


def joined(parts: Sequence[range]) -> list[range]:
    """The same places, neighbours as one range."""
    runs: list[range] = []
    for part in parts:
        if runs and runs[-1].stop == part.start:
            runs[-1] = range(runs[-1].start, part.stop)
        elif len(part):
            runs.append(part)
    return runs
