"""A step's edits of logits on their way to the device, in one transfer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch

from pocketllm.backends.base import EngineRequest
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
        edited = [(row, one) for row, one in edits.items() if len(one.table) or one.awaits_last]
        cut = [(row, one.terms.min_p, requests[row].temperature) for row, one in edits.items() if one.terms.min_p > 0 and not is_greedy(requests[row])]
        self._num_edited, self._num_cut = len(edited), len(cut)
        first_cut = len(edited) * HEAD  # the heads of both kinds, then what those of the first point to
        at = first_cut + len(cut) * CUT_HEAD
        heads: list[tuple[int, ...]] = []
        parts: list[npt.NDArray[np.int32]] = []
        for row, one in edited:
            table, pairs = one.table, one.pairs
            pairs_at = at + table.size
            heads.append((row, slots[row] if one.awaits_last else -1, at, len(table), pairs_at, len(pairs), *one.penalty_bits, 0, 0, 0))
            parts += (table.ravel(), pairs.ravel())
            at = pairs_at + pairs.size
        host = torch.empty(at, dtype=torch.int32, pin_memory=device.type == "cuda")  # of a pool that waits for the transfer before it reuses it
        raw = host.numpy()
        if edited:
            raw[:first_cut] = np.array(heads, np.int32).ravel()
            np.concatenate(parts, out=raw[first_cut + len(cut) * CUT_HEAD :])
        if cut:
            depths = np.array([-math.log(min_p) * temperature for _, min_p, temperature in cut], np.float32)
            raw[first_cut : first_cut + len(cut) * CUT_HEAD] = np.stack([np.array([row for row, *_ in cut], np.int32), depths.view(np.int32)], axis=1).ravel()
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
