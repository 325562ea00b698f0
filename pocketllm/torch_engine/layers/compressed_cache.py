"""Cache of attention whose far past is compressed: paged entries that stand for several tokens each, and the recent tokens of each row by slot.

What a window of tokens was pooled into depends on no later token, so entries lie in blocks that rows with the same beginning share. The last tokens
themselves, and the inputs of windows that are not complete, are a row's state: rows start again where a snapshot of it was kept, as in other hybrid models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pocketllm.torch_engine.layers.attention import KVCache, zeros
from pocketllm.torch_engine.state_pool import StateCopy


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps beside its window.

    Args:
        ratio: tokens that one entry stands for; 0 where nothing is compressed.
        widths: values of an entry, for each compressor of the layer.
        overlaps: an entry is pooled from the tokens of the window before, too.
    """

    ratio: int = 0
    widths: tuple[int, ...] = ()
    overlaps: bool = False

    @property
    def span(self) -> int:
        """Tokens that an entry is pooled from."""
        return self.ratio * (2 if self.overlaps else 1)

    def input_width(self, width: int) -> int:
        """Values of a token that a compressor of entries of `width` needs: what is pooled, and its weights."""
        return 2 * width * (2 if self.overlaps else 1)

    def entries_per_block(self, block_size: int) -> int:
        """Most entries whose last token lies in one block."""
        return -(-block_size // self.ratio) if self.ratio else 0


@dataclass(frozen=True, slots=True)
class CompressedShape:
    """Sizes of the cache of a model.

    Args:
        window: last tokens that are attended to as they are, the own one included.
        head_dim: values of a token, which are key and value at once.
        layers: in order.
    """

    window: int
    head_dim: int
    layers: tuple[LayerShape, ...]

    def block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        return dtype.itemsize * sum(layer.entries_per_block(block_size) * sum(layer.widths) for layer in self.layers)

    def slot_bytes(self, dtype: torch.dtype) -> int:
        inputs = sum(4 * layer.span * layer.input_width(width) for layer in self.layers for width in layer.widths)
        return len(self.layers) * self.window * self.head_dim * dtype.itemsize + inputs


class WindowStates:
    """The recent tokens of every slot, that of position p at place p % length; one slot more than there are takes what is written for no row.

    Attributes:
        windows: a layer: [num_slots + 1, window, head_dim] in the cache's dtype, keys that are values too.
        inputs: a layer, and each of its compressors: [num_slots + 1, span, input_width] float32.
    """

    def __init__(self, shape: CompressedShape, num_slots: int, dtype: torch.dtype, device: torch.device) -> None:
        count = num_slots + 1
        self.windows = [zeros((count, shape.window, shape.head_dim), dtype, device) for _ in shape.layers]
        self.inputs = [[zeros((count, layer.span, layer.input_width(width)), torch.float32, device) for width in layer.widths] for layer in shape.layers]
        self._all = [*self.windows, *(inputs for layer in self.inputs for inputs in layer)]
        self.num_bytes = sum(states.nbytes for states in self._all)

    def run(self, copies: Sequence[StateCopy]) -> None:
        """Carry out `copies` one after another, over all layers."""
        for copy in copies:
            for states in self._all:
                if copy.source is None:
                    states[copy.target] = 0  # what a failed row left may not be finite, and zeroed weights do not mask that
                else:
                    states[copy.target] = states[copy.source]


class CompressedCache(KVCache):
    """Entries of every layer by block, and the states of the rows. No layer keeps keys and values of all tokens.

    Entry w of a row, which stands for `ratio` tokens, lies in the block of the last of them: place (p % block_size) // ratio, p = (w + 1) * ratio - 1.
    One block more than there are takes what is written for no row.

    Args:
        shape: sizes of a layer and a slot.
        num_blocks, block_size: sizes.
        num_slots: rows and snapshots.
        dtype: of entries and windows.
        device: where they lie.

    Attributes:
        entries: a layer, and each of its compressors: [(num_blocks + 1) * entries_per_block, width].
        states: of the rows.
    """

    states: WindowStates

    def __init__(
        self, shape: CompressedShape, num_blocks: int, block_size: int, num_slots: int, dtype: torch.dtype, device: str | torch.device = "cpu"
    ) -> None:
        super().__init__(0, num_blocks, block_size, 1, shape.head_dim, dtype, device)
        self.shape, self.block_size = shape, block_size
        self.entries = [
            [zeros(((num_blocks + 1) * layer.entries_per_block(block_size), width), dtype, self.device) for width in layer.widths] for layer in shape.layers
        ]
        self.states = WindowStates(shape, num_slots, dtype, self.device)
        self.num_bytes = sum(entries.nbytes for layer in self.entries for entries in layer)

    def clear(self, slots: torch.Tensor) -> None:
        for layer, entries in zip(self.shape.layers, self.entries, strict=True):
            if layer.ratio:
                places = entry_places(slots // self.block_size, slots % self.block_size, layer, self.block_size)
                for one in entries:
                    one.index_fill_(0, places, 0)


def entry_places(blocks: torch.Tensor, offsets: torch.Tensor, layer: LayerShape, block_size: int) -> torch.Tensor:
    """Where a layer keeps the entries whose last tokens lie at `offsets` of `blocks`, which have any one shape."""
    return blocks * layer.entries_per_block(block_size) + offsets // layer.ratio
