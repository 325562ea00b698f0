"""A step's edits of logits on their way to the device, in one transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.torch_engine.kernels.logit_edits import CUT_HEAD, HEAD, cut_unlikely, edit_logits
from pocketllm.torch_engine.kernels.sampler import SamplingTensors
from pocketllm.torch_engine.logit_edits import LogitEdits
from pocketllm.torch_engine.sampler import is_greedy


class DeviceEdits:
    """What the rows of one step change, sent to `device` when this is made.

    Args:
        edits: by row.
        requests: the rows' requests.
        slots: by row, where the id is that it drew last.

    Attributes:
        numbers, cut_numbers: int32 on the device, as kernels/logit_edits.py reads them.
    """

    def __init__(self, edits: Mapping[int, LogitEdits], requests: Sequence[EngineRequest], slots: Sequence[int], device: torch.device) -> None:
        edited = [(row, one) for row, one in edits.items() if one.table.shape[1] or one.pairs.shape[1] or one.awaits_last]
        cut = [(row, one.terms.min_p, requests[row].temperature) for row, one in edits.items() if one.terms.min_p > 0 and not is_greedy(requests[row])]
        self._num_edited, self._num_cut = len(edited), len(cut)
        total = len(edited) * HEAD + sum(one.table.size + one.pairs.size for _, one in edited) + len(cut) * CUT_HEAD
        host = torch.empty(total, dtype=torch.int32, pin_memory=device.type == "cuda")  # of a pool that waits for the transfer before it reuses it
        raw = host.numpy()
        first_cut = len(edited) * HEAD  # the heads of both kinds, then what those of the first point to
        at = first_cut + len(cut) * CUT_HEAD
        for place, (row, one) in enumerate(edited):
            table_end = at + one.table.size
            end = table_end + one.pairs.size
            raw[at:table_end].reshape(3, -1)[:] = one.table
            raw[table_end:end].reshape(2, -1)[:] = one.pairs
            head = (row, slots[row] if one.awaits_last else -1, at, one.table.shape[1], table_end, one.pairs.shape[1], *_penalty_bits(one.terms))
            raw[place * HEAD : place * HEAD + len(head)] = head
            at = end
        for place, (row, min_p, temperature) in enumerate(cut):
            first = first_cut + place * CUT_HEAD
            raw[first : first + CUT_HEAD] = row, _bits(-math.log(min_p) * temperature)
        self.numbers = host.to(device, non_blocking=True)
        self.cut_numbers = self.numbers[first_cut:]

    def apply(self, logits: torch.Tensor, how: SamplingTensors, last_ids: torch.Tensor) -> None:
        """Change `logits` [num_rows, vocab_size] float32 in place.

        Args:
            how: of the rows; its masks come before min_p.
            last_ids: [num_slots] int64.
        """
        if self._num_edited:
            edit_logits(logits, self.numbers, self._num_edited, last_ids)
        if self._num_cut:
            cut_unlikely(logits, self.cut_numbers, self._num_cut, how)


def _bits(value: float) -> int:
    return int(np.float32(value).view(np.int32))


def _penalty_bits(terms: LogitTerms) -> tuple[int, int, int]:
    return _bits(terms.repetition_penalty), _bits(terms.frequency_penalty), _bits(terms.presence_penalty)
