"""KV blocks as plain ints: who holds which, and which cached prefix each one carries. No tensors.

A block is free (nothing refers to it), in use (reference count above zero), or evictable (reference count zero, but its
content is a known prefix that a later request may take up again).
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

ROOT = b""


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Key of a full block: a digest of its own ids chained to the digest of everything before it."""
    return hashlib.blake2b(parent + array("q", token_ids).tobytes(), digest_size=16).digest()


class BlockPool:
    """Hands out fixed-size KV blocks and remembers full ones by the prefix that they hold.

    Args:
        num_blocks: blocks in the KV cache.
        block_size: tokens a block.
        enable_prefix_caching: keep freed full blocks for reuse until the space is needed, least recently used first.

    Attributes:
        on_evict: told the prefix whose block is given away, where something else is kept for that prefix.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: deque[int] = deque(range(num_blocks))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        self.on_evict: Callable[[bytes], None] | None = None

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out now, evictable ones included."""
        return len(self._free) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def match_prefix(self, token_ids: Sequence[int]) -> list[int]:
        """Longest run of cached blocks that holds the beginning of `token_ids`, short of its last token.

        The last token is never matched, since its logits have to be computed. References are not taken: call `share` next.
        """
        blocks: list[int] = []
        if not self.enable_prefix_caching:
            return blocks
        parent = ROOT
        for start in range(0, len(token_ids) - self.block_size, self.block_size):
            parent = hash_block(parent, token_ids[start : start + self.block_size])
            block = self._block_of.get(parent)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def digest_of(self, block: int) -> bytes:
        """The prefix that ends with `block`, which `match_prefix` found."""
        return self._hash_of[block]

    def share(self, blocks: Iterable[int]) -> None:
        """Take one reference on each of `blocks`, which `match_prefix` found."""
        for block in blocks:
            self._evictable.pop(block, None)
            self._ref_counts[block] += 1

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None, and nothing taken, when fewer are available."""
        if count > self.num_available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.popleft()
            else:
                block, _ = self._evictable.popitem(last=False)
                digest = self._hash_of.pop(block)
                del self._block_of[digest]
                if self.on_evict is not None:
                    self.on_evict(digest)
            self._ref_counts[block] = 1
            blocks.append(block)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give one reference back on each block of a row, in table order.

        The tail of a prefix is put up for eviction before its head, since a head is useful without its tail but not the reverse.
        """
        for block in reversed(blocks):
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if block in self._hash_of:
                self._evictable[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, digest: bytes) -> None:
        """Record that the full, computed `block` holds the prefix `digest`. The first block of a prefix stays its home."""
        if self.enable_prefix_caching and digest not in self._block_of and block not in self._hash_of:
            self._block_of[digest] = block
            self._hash_of[block] = digest

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise AssertionError unless the reference counts are just those of `tables`, the block tables of all rows."""
        counts = [0] * self.num_blocks
        for table in tables:
            for block in table:
                counts[block] += 1
        assert counts == self._ref_counts, "reference counts differ from the block tables"
        free, evictable = set(self._free), set(self._evictable)
        assert len(free) == len(self._free), "a block is free twice"
        assert not free & evictable, "a block is free and evictable"
        assert free | evictable == {block for block, count in enumerate(counts) if count == 0}, "a block is lost"
        assert evictable <= self._hash_of.keys(), "an evictable block holds no known prefix"
        assert {block: digest for digest, block in self._block_of.items()} == self._hash_of, "the two prefix maps differ"
