"""The rows of a step as attention over a compressed past reads them: those that decode together, each prompt by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch

from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.layers.compressed_cache import LayerShape, entry_places
from pocketllm.torch_engine.layers.device import AnyBatch


@dataclass(frozen=True, slots=True)
class PromptRow:
    """A row that computes several tokens.

    Args:
        tokens: its tokens in the batch.
        start, end: their positions.
        slot: of its state.
        table: its blocks, [num_blocks] int64.
    """

    tokens: slice
    start: int
    end: int
    slot: int
    table: torch.Tensor

    def entries(self, layer: LayerShape, block_size: int, first: int, last: int) -> torch.Tensor:
        """Places of the entries [first, last)."""
        ends = torch.arange(first + 1, last + 1, device=self.table.device) * layer.ratio - 1
        return entry_places(self.table[ends // block_size], ends % block_size, layer, block_size)


@dataclass(frozen=True)
class CompressedStep:
    """One step.

    Args:
        num_decode: rows that compute one token; they come first.
        positions: [num_decode] int64.
        slots: [num_decode] int64, of their states.
        tables: [num_decode, width] int64, their blocks.
        block_size: tokens a block.
        last_position: the largest of `positions`.
        prompts: the other rows.
        token_ids, all_positions: [num_tokens] int64, of all rows.
    """

    num_decode: int
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    block_size: int
    last_position: int
    prompts: list[PromptRow]
    token_ids: torch.Tensor
    all_positions: torch.Tensor

    @classmethod
    def of(cls, batch: AnyBatch, block_size: int) -> CompressedStep:
        """The rows of `batch`, in a cache with blocks of `block_size` tokens."""
        return _of_host(batch) if isinstance(batch, Batch) else _of_device(batch, block_size)

    def finishing(self, layer: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Decoding rows whose token completes a window, and the places of the entries that they give; neither may be changed."""
        if layer.ratio not in self._finishing:
            rows = ((self.positions + 1) % layer.ratio == 0).nonzero().squeeze(1)
            ends = self.positions[rows]
            blocks = self.tables[rows].gather(1, (ends // self.block_size).unsqueeze(1)).squeeze(1)
            self._finishing[layer.ratio] = rows, entry_places(blocks, ends % self.block_size, layer, self.block_size)
        return self._finishing[layer.ratio]

    def decode_entries(self, layer: LayerShape) -> tuple[torch.Tensor, torch.Tensor]:
        """Places [num_decode, count] of the decoding rows' entries, of the row that has the most, and which of them a row has, bool."""
        if layer.ratio not in self._entries:
            ends = torch.arange(1, (self.last_position + 1) // layer.ratio + 1, device=self.tables.device) * layer.ratio - 1
            blocks = self.tables[:, ends // self.block_size]
            self._entries[layer.ratio] = entry_places(blocks, ends % self.block_size, layer, self.block_size), ends <= self.positions.unsqueeze(1)
        return self._entries[layer.ratio]

    @cached_property
    def _finishing(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}

    @cached_property
    def _entries(self) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        return {}


def _of_host(batch: Batch) -> CompressedStep:
    count, slots = batch.num_decode, batch.state_slots
    starts = [scheduled.row.num_computed_tokens for scheduled in batch.rows]
    prompts = [
        PromptRow(prefill.tokens, start, prefill.length, slot, torch.tensor(prefill.table))
        for prefill, start, slot in zip(batch.prefills, starts[count:], slots[count:], strict=True)
    ]
    return CompressedStep(
        count,
        batch.positions[:count],
        torch.tensor(slots[:count], dtype=torch.int64),
        batch.decode_tables,
        batch.block_size,
        max(starts[:count], default=0),
        prompts,
        batch.token_ids,
        batch.positions,
    )


def _of_device(batch: DeviceBatch, block_size: int) -> CompressedStep:
    """The host waits to learn how long the rows are, so no graph holds such a step, and none is padded."""
    assert not batch.is_padded
    count, positions = batch.num_decode, batch.positions.long()
    slots, lengths = batch.row_slots.tolist(), batch.lengths.tolist()
    prompts = []
    if batch.prompts is not None:
        bounds = batch.prompts.row_starts.tolist()
        for place, (begin, end) in enumerate(pairwise(bounds)):
            slot, length = slots[count + place], lengths[count + place]
            table = batch.block_tables[slot, : -(-length // block_size)].long()
            prompts.append(PromptRow(slice(count + begin, count + end), length - (end - begin), length, slot, table))
    last = max(lengths[:count], default=1) - 1
    rows = batch.row_slots[:count].long()
    tables = batch.block_tables[rows, : last // block_size + 1].long()
    return CompressedStep(count, positions[:count], rows, tables, block_size, last, prompts, batch.token_ids, positions)
