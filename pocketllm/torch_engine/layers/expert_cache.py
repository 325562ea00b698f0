"""Routed experts that stay in the mapped file: those that are chosen are built, and kept while they fit into a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from pocketllm.torch_engine.layers.feed_forward import Experts, TokenWise
from pocketllm.torch_engine.weights import StoredFeedForward

BuildExpert = Callable[[StoredFeedForward], TokenWise]


class ExpertCache:
    """Built experts of all layers; the least recently used ones make room. One thread uses it; others may read the totals.

    Args:
        budget: most bytes of built experts; the one in use is kept whatever it takes.

    Attributes:
        lookups: times that an expert was needed.
        hits: of those, times that it was there.
        num_bytes: of the experts that are there.
    """

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.lookups = self.hits = self.num_bytes = 0
        self._built: OrderedDict[tuple[int, int], TokenWise] = OrderedDict()  # least recently used first
        self._num_layers = 0

    @property
    def room(self) -> int:
        """Bytes of the budget that nothing takes yet; whoever measures free memory leaves them."""
        return max(0, self.budget - self.num_bytes)

    def forget_counts(self) -> None:
        """Count lookups from now on."""
        self.lookups = self.hits = 0

    def add_layer(self, stored: Sequence[StoredFeedForward], build: BuildExpert) -> CachedExperts:
        """The experts of one more layer."""
        self._num_layers += 1
        return CachedExperts(self, self._num_layers - 1, stored, build)

    def get(self, key: tuple[int, int], build: Callable[[], TokenWise]) -> TokenWise:
        """The expert `key`, made by `build` where it is not there."""
        self.lookups += 1
        if (expert := self._built.get(key)) is not None:
            self.hits += 1
            self._built.move_to_end(key)
            return expert
        # All experts of a model have one size, so the last one says how much room to make before another is built.
        expected = self._built[next(reversed(self._built))].num_bytes if self._built else 0
        self._evict(self.budget - expected)
        expert = build()
        self._evict(self.budget - expert.num_bytes)
        self._built[key] = expert
        self.num_bytes += expert.num_bytes
        return expert

    def _evict(self, allowed: int) -> None:
        while self._built and self.num_bytes > allowed:
            _, oldest = self._built.popitem(last=False)
            self.num_bytes -= oldest.num_bytes


class CachedExperts:
    """A layer's experts; taking one builds it, which reads its part of the file, or finds it in the cache."""

    def __init__(self, cache: ExpertCache, layer: int, stored: Sequence[StoredFeedForward], build: BuildExpert) -> None:
        self._cache, self._layer, self._stored, self._build = cache, layer, stored, build

    def __len__(self) -> int:
        return len(self._stored)

    def __getitem__(self, place: int) -> TokenWise:
        return self._cache.get((self._layer, place), lambda: self._build(self._stored[place]))


def place_experts(stored: Sequence[StoredFeedForward], build: BuildExpert, cache: ExpertCache | None) -> Experts:
    """A layer's experts: built now, or by `cache` when they are chosen."""
    return [build(one) for one in stored] if cache is None else cache.add_layer(stored, build)
