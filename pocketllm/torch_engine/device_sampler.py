"""Draws of a step's rows on the GPU: what each row asks for goes there in one copy, ids and log probabilities come back in another, and nothing waits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from pocketllm.backends.base import MAX_LOGPROBS, EngineRequest, TokenLogprobs
from pocketllm.backends.logit_terms import LogitTerms
from pocketllm.torch_engine.device_edits import DeviceEdits
from pocketllm.torch_engine.kernels.logprobs import device_logprobs
from pocketllm.torch_engine.kernels.sampler import NOT_FINITE, NOTHING_ALLOWED, LastIds, SamplingTensors, sample_tokens
from pocketllm.torch_engine.logit_edits import LogitEdits, penalty_bits

__all__ = ["NOTHING_ALLOWED", "NOT_FINITE", "DeviceSampler", "DrawnTokens"]

_NUM_STAGES = 3  # steps whose copies may be under way at once, and one more than run ahead
_HOTTEST = 1e30  # higher temperatures give the same draws, and float32 holds it
_NUMBERS_OF_TOP = (0, 5, MAX_LOGPROBS)  # each is a kernel of its own: what is asked for is rounded up
_NO_MASKS: Mapping[int, npt.NDArray[np.uint32]] = {}
_NO_EDITS: Mapping[int, LogitEdits] = {}


@dataclass(frozen=True, slots=True)
class _Stage:
    """Host memory of one step's way to the device, and when the device has read it."""

    values: torch.Tensor  # [4, max_rows] int64, see _views
    masks: torch.Tensor  # [max_rows, num_words] int32
    read: torch.cuda.Event | None


class DrawnTokens:
    """Ids of one step, on their way to the host.

    Args:
        ids: [num_rows] int64 on the device; 0 where a row has no id.
        packed: on the host or on its way there: id, status, and the bits of float64 log probabilities and top ids a row, [num_rows, 3 + 2 * num_top] int64.
        ready: set when `packed` is there; None where it is there already.
        num_top: most likely ids of each row that was ranked.
    """

    def __init__(self, ids: torch.Tensor, packed: torch.Tensor, ready: torch.cuda.Event | None, num_top: int) -> None:
        self.ids = ids
        self._packed, self._ready, self._num_top = packed, ready, num_top

    def wait(self) -> tuple[list[int], list[int]]:
        """Wait for the device: ids and status of each row (0, NOT_FINITE or NOTHING_ALLOWED)."""
        if self._ready is not None:
            self._ready.synchronize()
        ids, status = self._packed[:, :2].t().tolist()
        return ids, status

    def logprobs(self, row: int, num_top: int) -> TokenLogprobs:
        """Of a row that asked for them, and for `num_top` alternatives; after `wait`."""
        line = self._packed[row]
        top_ids = line[3 : 3 + num_top].tolist()
        values = line[3 + self._num_top :][:num_top].view(torch.float64).tolist()
        return TokenLogprobs(float(line[2:3].view(torch.float64)), tuple(zip(top_ids, values, strict=True)))


class DeviceSampler:
    """Sampling of up to `max_rows` rows a step on one device. One thread calls it, the engine's.

    `prepare` fills tensors that stay where they are, so that `tensors` may be captured in a CUDA graph; it and `draw` are called in the order of the
    steps, on the stream that computes the logits.

    Args:
        max_rows: rows a step at most.
        vocab_size: ids are in [0, vocab_size).
        device: where the logits are.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        is_cuda = device.type == "cuda"
        num_words = -(-vocab_size // 32)
        self._device, self._max_rows, self._vocab_size = device, max_rows, vocab_size
        self._stages = [
            _Stage(
                torch.zeros((4, max_rows), dtype=torch.int64, pin_memory=is_cuda),
                torch.zeros((max_rows, num_words), dtype=torch.int32, pin_memory=is_cuda),
                torch.cuda.Event() if is_cuda else None,
            )
            for _ in range(_NUM_STAGES)
        ]
        self._next = 0
        self._values = torch.zeros((4, max_rows), dtype=torch.int64, device=device)
        self._masks = torch.zeros((2 * max_rows, num_words), dtype=torch.int32, device=device)  # of the step, then those that stay, by slot
        self._staying: dict[int, npt.NDArray[np.uint32]] = {}  # by slot
        self._has_cuts, self._has_masks = False, False
        self._is_greedy = True  # every temperature on the device is 0, and nothing else is read of such rows
        self._ranked: list[int] = []
        self._edits: DeviceEdits | None = None
        self._edited_rows: Set[int] = frozenset()
        self._no_ids = torch.zeros(1, dtype=torch.int64, device=device)
        self._num_top = 0

    def prepare(
        self,
        requests: Sequence[EngineRequest],
        draws: Sequence[int],
        masks: Mapping[int, npt.NDArray[np.uint32]] = _NO_MASKS,
        edits: Mapping[int, LogitEdits] = _NO_EDITS,
        slots: Sequence[int] = (),
    ) -> None:
        """Send what the next `draw` needs.

        Args:
            requests: the rows' requests, for their sampling.
            draws: how many tokens each row has drawn before.
            masks: by row, words of bits as `TokenConstraint.fill` writes them. One that can't be written to stays as it is: its row, which has edits, has
                the same array at every draw.
            edits: by row, what its terms change.
            slots: each row's, where `draw` finds the id that it drew last; rows without edits need none.
        """
        self._edits = DeviceEdits(edits, requests, slots, self._device) if edits else None
        self._edited_rows = edits.keys()
        self._has_masks = bool(masks)
        self._has_cuts = any(request.temperature > 0 and (request.top_k > 1 or request.top_p < 1) for request in requests)
        self._ranked = [row for row, request in enumerate(requests) if request.logprobs is not None]
        self._num_top = self._rounded(max((requests[row].logprobs or 0 for row in self._ranked), default=0))
        was_greedy, self._is_greedy = self._is_greedy, not masks and all(request.temperature == 0 for request in requests)
        if was_greedy and self._is_greedy:
            return
        stage = self._stages[self._next]
        self._next = (self._next + 1) % _NUM_STAGES
        if stage.read is not None:
            stage.read.synchronize()
        count = len(requests)
        seeds, drawn, temperature, top_p, top_k, mask_rows = (part.numpy() for part in _views(stage.values, self._max_rows))
        seeds[:count] = [request.seed for request in requests]
        drawn[:count] = draws
        temperature[:count] = [min(request.temperature, _HOTTEST) for request in requests]
        top_p[:count] = [request.top_p for request in requests]
        top_k[:count] = [min(request.top_k, 2**31 - 1) for request in requests]
        temperature[count:] = 0  # rows that stand for none, in a graph of more rows
        mask_rows[:] = -1
        words = stage.masks.numpy()
        line = 0
        for row, mask in masks.items():
            if not mask.flags.writeable:  # it stays as it is, so it is sent once
                mask_rows[row] = self._staying_line(slots[row], mask)
                continue
            mask_rows[row] = line
            words[line] = mask.view(np.int32)
            line += 1
        self._values.copy_(stage.values, non_blocking=True)
        if line:
            self._masks[:line].copy_(stage.masks[:line], non_blocking=True)
        if stage.read is not None:
            stage.read.record()

    def _staying_line(self, slot: int, mask: npt.NDArray[np.uint32]) -> int:
        """Where on the device the mask is that the row in `slot` has at every draw."""
        line = self._max_rows + slot
        if self._staying.get(slot) is not mask:
            self._staying[slot] = mask
            self._masks[line].copy_(torch.from_numpy(mask.view(np.int32).copy()))
        return line

    def compile(self, keep: LastIds) -> None:
        """Launch every kernel that a `draw` with `keep`, of one row, may launch, so that none is compiled while somebody waits. While no draw is under way."""
        logits = torch.zeros((1, self._vocab_size), dtype=torch.float32, device=self._device)
        for has_masks in (False, True):
            for has_cuts in (False, True):
                drawn = sample_tokens(logits, self.tensors(has_masks=has_masks), has_cuts=has_cuts, keep=keep)
            terms = LogitTerms(repetition_penalty=2.0, min_p=0.5)
            edits = LogitEdits(terms, np.zeros((1, 3), np.int32), np.zeros((1, 2), np.int32), True, penalty_bits(terms))
            DeviceEdits({0: edits}, [EngineRequest("", (0,), 1, 1.0, terms=terms)], (0,), self._device).apply(
                logits, self.tensors(has_masks=has_masks), keep.ids
            )
        for number in sorted({self._rounded(number) for number in _NUMBERS_OF_TOP}):
            device_logprobs(logits, drawn[:, 0].contiguous(), number)

    def _rounded(self, num_top: int) -> int:
        return min(next(number for number in _NUMBERS_OF_TOP if number >= num_top), self._vocab_size)

    def tensors(self, *, has_masks: bool = True) -> SamplingTensors:
        """Where `prepare` puts each row's numbers, for a caller that captures `sample_tokens` in a graph."""
        seeds, drawn, temperature, top_p, top_k, mask_rows = _views(self._values, self._max_rows)
        return SamplingTensors(temperature, top_k, top_p, seeds, drawn, self._masks if has_masks else None, mask_rows if has_masks else None)

    def draw(self, logits: torch.Tensor, keep: LastIds | None = None) -> DrawnTokens:
        """Draw from logits [num_rows, vocab_size] float32 as the last `prepare` says, rank the rows that ask for it, and send the results to the host.

        Args:
            logits: [num_rows, vocab_size] float32; edits are made in them.
            keep: where each row's id goes as well, and where that of the step before is until then.
        """
        how, num_rows = self.tensors(has_masks=self._has_masks), logits.shape[0]
        rows = None if len(self._ranked) in (0, num_rows) else torch.tensor(self._ranked).to(self._device, non_blocking=True)
        model_logits = None  # of the ranked rows, where some of them are edited
        if self._edits is not None:
            if not self._edited_rows.isdisjoint(self._ranked):
                model_logits = logits.clone() if rows is None else logits[rows]
            self._edits.apply(logits, how, self._no_ids if keep is None else keep.ids)
        packed = sample_tokens(logits, how, has_cuts=self._has_cuts, keep=keep)
        ids = packed[:, 0]
        if self._ranked:
            if model_logits is None:
                drawn, top_ids, top = device_logprobs(logits, ids.contiguous(), self._num_top, rows)
            else:
                drawn, top_ids, top = device_logprobs(model_logits, ids.contiguous() if rows is None else ids[rows], self._num_top)
            ranks = torch.cat([drawn.view(torch.int64)[:, None], top_ids.long(), top.view(torch.int64)], dim=1)
            ranks = ranks if rows is None else ranks.new_zeros((num_rows, ranks.shape[1])).index_copy_(0, rows, ranks)
            packed = torch.cat([packed, ranks], dim=1)
        if self._device.type != "cuda":
            return DrawnTokens(ids, packed, None, self._num_top)
        host = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)  # torch keeps freed pinned memory for the next step
        host.copy_(packed, non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return DrawnTokens(ids, host, ready, self._num_top)


def _views(values: torch.Tensor, max_rows: int) -> tuple[torch.Tensor, ...]:
    """(seeds, draws, temperature, top_p, top_k, mask_rows) of the [4, max_rows] int64 that travels: two lines of int64, then four half as wide."""
    temperature, top_p = values[2].view(torch.float32).view(2, max_rows)
    top_k, mask_rows = values[3].view(torch.int32).view(2, max_rows)
    return values[0], values[1], temperature, top_p, top_k, mask_rows
