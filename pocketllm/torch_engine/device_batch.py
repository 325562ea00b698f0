"""One step's rows as tensors on a GPU: what the Triton kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pocketllm.torch_engine.kernels.chunk_plan import ChunkPlan


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """The tokens of one step, all on one device: first one a row of the rows that decode, then those of each row that prefills.

    A padded step, as a CUDA graph computes it, has a shape that is larger than what it computes. Rows that stand for none have -1 as `row_slots`
    and `state_slots`, and 0 as `lengths`, and are the last of their kind; tokens of no row, one for each of those that would decode, and the last of the
    prompts' tokens, have -1 as `slot_mapping`. Kernels write nothing to a cache for them, and their results are finite and not read.

    Args:
        token_ids: [num_tokens] int64.
        positions: [num_tokens] int32.
        slot_mapping: [num_tokens] int32, where each token's keys and values go in the cache, or -1.
        block_tables: [max_rows, max_blocks] int32, the blocks of every running row, by row slot; only as many as `lengths` needs are valid.
        row_slots: [num_rows] int32, each row's line in `block_tables`, or -1.
        state_slots: [num_rows] int32, each row's slot in the state cache of a hybrid model, or -1.
        lengths: [num_rows] int32, tokens that the row's last token attends to, itself included.
        num_decode: rows that compute one token; they come first.
        prompts: the other rows' tokens, counted from the first of them, and their chunks; None where all rows decode.
        longest_prompt: no other row has more tokens.
        is_padded: some rows and tokens may stand for none.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    row_slots: torch.Tensor
    state_slots: torch.Tensor
    lengths: torch.Tensor
    num_decode: int
    prompts: ChunkPlan | None
    longest_prompt: int
    is_padded: bool

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]
