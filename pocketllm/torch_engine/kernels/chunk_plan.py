"""How a step's prompt tokens are shared between the programs of the kernels that take a prompt in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

CHUNK = 64  # tokens of a row that one program takes


def num_chunks(num_tokens: int) -> int:
    """Chunks of a row of `num_tokens`."""
    return -(-num_tokens // CHUNK)


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """The rows of a prefill and their chunks. A plan may hold more than there is: rows without tokens come last, and so do chunks of no row.

    Args:
        row_starts: [num_rows + 1] int32, where each row's tokens begin, counted from the first row's; the last is the number of all rows' tokens.
        row_chunks: [num_rows + 1] int32, where each row's chunks begin.
        chunk_rows: [num_chunks] int32, each chunk's row; -1 is none.
    """

    row_starts: torch.Tensor
    row_chunks: torch.Tensor
    chunk_rows: torch.Tensor

    @classmethod
    def of(cls, query_lengths: Sequence[int], device: torch.device) -> ChunkPlan:
        """The plan of rows of `query_lengths` tokens, each at least 1."""
        counts = [num_chunks(length) for length in query_lengths]
        rows = [row for row, count in enumerate(counts) for _ in range(count)]
        arrays = ([0, *accumulate(query_lengths)], [0, *accumulate(counts)], rows)
        return cls(*(torch.tensor(array, dtype=torch.int32, device=device) for array in arrays))

    @property
    def num_rows(self) -> int:
        return self.row_starts.shape[0] - 1

    @property
    def num_chunks(self) -> int:
        return self.chunk_rows.shape[0]
