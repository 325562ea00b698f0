"""One step's rows as tensors on a GPU: what the Triton kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The tokens of one step, all on one device: first one a row of the rows that decode, then those of each row that prefills.

    A decode step in a CUDA graph always has the graph's number of rows; those that stand for no row have -1 as `row_slots`, `state_slots`,
    and `slot_mapping`, and 0 as `lengths`: kernels write nothing to a cache for them, and their results are finite and not read.

    Args:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int32.
        slot_mapping: [num_tokens] int32, where each token's keys and values go in the cache, or -1.
        block_tables: [max_rows, max_blocks] int32, the blocks of every running row, by row slot; only as many as `lengths` needs are valid.
        row_slots: [num_rows] int32, each row's line in `block_tables`, or -1.
        state_slots: [num_rows] int32, each row's slot in the state cache of a hybrid model, or -1.
        lengths: [num_rows] int32, tokens that the row's last token attends to, itself included.
        num_decode: rows that compute one token; they come first.
        starts: [num_prefill + 1] int32, where the tokens of each other row begin, counted from the first of them; the last is their number.
        query_lengths: tokens of each of those rows, on the host.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    row_slots: torch.Tensor
    state_slots: torch.Tensor
    lengths: torch.Tensor
    num_decode: int
    starts: torch.Tensor
    query_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
