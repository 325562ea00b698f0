"""Slots for the recurrent states of hybrid models, as plain ints: which prefix each snapshot stands for, and what is copied where. No tensors.

The state of a layer that is not attention says nothing of earlier positions, so a cached prefix can be taken up again only
where a copy of the state was kept: a snapshot. Slots [0, num_rows) are those of the running rows, which the scheduler hands out;
slots [num_rows, num_slots) hold snapshots, so a row never waits for one, and what snapshots take in memory is fixed.

Nothing is copied here. The pool writes down copies, and whoever owns the tensors carries them out in this order before the
next step. So each decision sees the slots as if all earlier ones had been carried out at once: a snapshot may be evicted, and
its slot given away, right after a row was started from it.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum


@dataclass(frozen=True, slots=True)
class StateCopy:
    """Overwrite the state in slot `target` with that in slot `source`; None is the state before the first token, all zeros."""

    source: int | None
    target: int


class Worth(IntEnum):
    """Why a snapshot is there, the least reason first.

    PASSING ones go when their rows have gone on. INTERVAL ones stay, and are the first to make room, so that one long prompt does
    not drive out what others come back to. LASTING ones, at the end of a prompt or a row, or started from before, go when they are
    the least recently used.
    """

    PASSING = 0
    INTERVAL = 1
    LASTING = 2


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of a row's state after a whole number of blocks.

    Args:
        digest: of that prefix, as hash_block chains it.
        slot: where it is; -1 once it was given up.
        rows: running rows whose newest snapshot this is.
        worth: the best of the reasons so far.
    """

    digest: bytes
    slot: int
    rows: int = 0
    worth: Worth = Worth.PASSING


class StatePool:
    """Starts rows in their slots, and keeps snapshots as their worth says.

    Args:
        num_rows: most running rows.
        num_snapshots: most snapshots; 0 is without prefix reuse.
        interval_blocks: snapshots are kept at each whole multiple of so many blocks, beside those at the last whole block of a prompt
            and of a row that has ended.
    """

    def __init__(self, num_rows: int, num_snapshots: int, interval_blocks: int) -> None:
        self.num_rows = num_rows
        self.num_slots = num_rows + num_snapshots
        self.interval_blocks = interval_blocks
        self._free_snapshots: deque[int] = deque(range(num_rows, self.num_slots))
        self._snapshots: OrderedDict[bytes, Snapshot] = OrderedDict()  # least recently used first
        self._copies: list[StateCopy] = []

    @property
    def num_snapshots(self) -> int:
        """Snapshots that exist now."""
        return len(self._snapshots)

    def take_copies(self) -> list[StateCopy]:
        """The copies written down since the last call, to be carried out in order."""
        copies, self._copies = self._copies, []
        return copies

    def has(self, digest: bytes) -> bool:
        """Whether a row can start after the prefix `digest`."""
        return digest in self._snapshots

    def start(self, slot: int, digest: bytes | None) -> None:
        """Start a row in its `slot`: from the snapshot of `digest`, or at its beginning."""
        source = None
        if digest is not None:
            snapshot = self._snapshots[digest]
            snapshot.worth = Worth.LASTING
            self._snapshots.move_to_end(digest)
            source = snapshot.slot
        self._copies.append(StateCopy(source, slot))

    def end(self, newest: Snapshot | None) -> None:
        """A row stops running; its newest snapshot stays."""
        if newest is not None:
            newest.rows -= 1
            newest.worth = Worth.LASTING

    def save(self, slot: int, digest: bytes, newest: Snapshot | None, worth: Worth) -> Snapshot | None:
        """Snapshot the row in `slot`, which is now at the prefix `digest`.

        Args:
            newest: the row's snapshot before this one, which goes if it was a passing one.
            worth: of the new one; one that is there already keeps its own if that is better.

        Returns:
            The row's newest snapshot now; None without room for any.
        """
        if newest is not None:
            newest.rows -= 1
            if newest.rows == 0 and newest.worth == Worth.PASSING and newest.slot >= 0:
                self.drop(newest.digest)
        snapshot = self._snapshots.get(digest)
        if snapshot is None:
            if self.num_slots == self.num_rows:
                return None
            if not self._free_snapshots:
                self.drop(self._least_needed())
            snapshot = self._snapshots[digest] = Snapshot(digest, self._free_snapshots.popleft())
            self._copies.append(StateCopy(slot, snapshot.slot))
        self._snapshots.move_to_end(digest)
        snapshot.rows += 1
        snapshot.worth = max(snapshot.worth, worth)
        return snapshot

    def drop(self, digest: bytes) -> None:
        """Give up the snapshot of `digest`, if there is one: its blocks are gone, or its slot is needed."""
        snapshot = self._snapshots.pop(digest, None)
        if snapshot is not None:
            self._free_snapshots.append(snapshot.slot)
            snapshot.slot = -1

    def _least_needed(self) -> bytes:
        """The snapshot that makes room: the least recently used one that only marks an interval, else the least recently used one."""
        marks = (digest for digest, snapshot in self._snapshots.items() if snapshot.worth == Worth.INTERVAL and not snapshot.rows)
        return next(marks, next(iter(self._snapshots)))

    def check_integrity(self, newest: Iterable[Snapshot | None]) -> None:
        """Raise AssertionError unless slots and counts are just those of `newest`: the newest snapshot of each running row."""
        held = list(newest)
        used = [snapshot.slot for snapshot in self._snapshots.values()]
        assert sorted([*used, *self._free_snapshots]) == list(range(self.num_rows, self.num_slots)), "a snapshot's slot is lost or held twice"
        for digest, snapshot in self._snapshots.items():
            assert snapshot.digest == digest, "a snapshot is filed under another prefix"
            assert snapshot.rows == sum(one is snapshot for one in held), "a snapshot counts other rows than hold it"
            assert snapshot.rows or snapshot.worth != Worth.PASSING, "a snapshot that nobody needs takes a slot"
        for one in held:
            assert one is None or one.slot < 0 or self._snapshots.get(one.digest) is one, "a row's snapshot is unknown to the pool"
