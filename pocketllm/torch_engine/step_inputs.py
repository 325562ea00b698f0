"""A step's numbers for a GPU, in one buffer that travels in one transfer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.kernels.chunk_plan import ChunkPlan, num_chunks
from pocketllm.torch_engine.scheduler import ScheduledRow
from pocketllm.torch_engine.step_shape import StepShape

_ALIGNMENT = 16  # bytes; what the kernels' widest loads want


class StepInputs:
    """Arrays of fixed lengths on the host and on the device, side by side.

    Rows that decode come first. Samples are the tokens whose logits are wanted, in the order of their rows.

    Args:
        shape: of the steps that it takes; those of a padded one may be smaller.
        num_slots: row slots; an id that belongs to none is filed under this number.
        device: of the device's side.
    """

    def __init__(self, shape: StepShape, num_slots: int, device: torch.device) -> None:
        self.shape, self._num_slots = shape, num_slots
        fields: list[tuple[str, type[np.generic], int]] = [
            ("token_ids", np.int64, shape.num_tokens),
            ("input_slots", np.int64, shape.num_decode),  # slot whose last id stands for a token that is not known
            ("sample_index", np.int64, shape.num_samples),
            ("sample_slots", np.int64, shape.num_samples),
            ("positions", np.int32, shape.num_tokens),
            ("slot_mapping", np.int32, shape.num_tokens),
            ("row_slots", np.int32, shape.num_rows),
            ("state_slots", np.int32, shape.num_rows),
            ("lengths", np.int32, shape.num_rows),
            ("starts", np.int32, shape.num_prompts + 1),
            ("row_chunks", np.int32, shape.num_prompts + 1),
            ("chunk_rows", np.int32, shape.num_chunks),
        ]
        offsets, end = [], 0
        for _, dtype, count in fields:
            offsets.append(end)
            end = -(-(end + count * np.dtype(dtype).itemsize) // _ALIGNMENT) * _ALIGNMENT
        self._num_bytes = end
        self._pins = device.type == "cuda"
        self._fields = [(name, np.dtype(dtype), count, offset) for (name, dtype, count), offset in zip(fields, offsets, strict=True)]
        self._buffer = torch.empty(end, dtype=torch.uint8, device=device)
        self._views = {name: self._buffer[offset : offset + count * dtype.itemsize].view(_TORCH[dtype]) for name, dtype, count, offset in self._fields}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The device's side of a field."""
        return self._views[name]

    def batch(self, token_ids: torch.Tensor, block_tables: torch.Tensor) -> DeviceBatch:
        """The step for the model: its tokens once they are known, and the blocks of every row."""
        return DeviceBatch(
            token_ids=token_ids,
            positions=self["positions"],
            slot_mapping=self["slot_mapping"],
            block_tables=block_tables,
            row_slots=self["row_slots"],
            state_slots=self["state_slots"],
            lengths=self["lengths"],
            num_decode=self.shape.num_decode,
            prompts=ChunkPlan(self["starts"], self["row_chunks"], self["chunk_rows"]) if self.shape.num_prompts else None,
            longest_prompt=self.shape.longest_prompt,
            is_padded=self.shape.is_padded,
        )

    def send(self, rows: Sequence[ScheduledRow], block_size: int, *, is_hybrid: bool) -> None:
        """Fill the device's side with `rows`, decoding ones first; what there is room for beyond them is none."""
        host = torch.empty(self._num_bytes, dtype=torch.uint8, pin_memory=self._pins)  # of a pool that waits for the transfer before it reuses it
        raw = host.numpy()
        to: dict[str, npt.NDArray[np.generic]] = {
            name: raw[offset : offset + count * dtype.itemsize].view(dtype) for name, dtype, count, offset in self._fields
        }
        count = sum(1 for one in rows if one.num_tokens == 1)
        for name, value in {**_PADDING, "input_slots": self._num_slots, "sample_slots": self._num_slots}.items():
            to[name][:] = value
        decoding = [one.row for one in rows[:count]]
        places = [row.num_computed_tokens for row in decoding]
        slots = [row.slot for row in decoding]
        to["token_ids"][:count] = [row.token_ids[place] for row, place in zip(decoding, places, strict=True)]
        to["input_slots"][:count] = slots
        to["positions"][:count] = places
        to["slot_mapping"][:count] = [
            row.block_table[place // block_size] * block_size + place % block_size for row, place in zip(decoding, places, strict=True)
        ]
        to["row_slots"][:count] = slots
        to["lengths"][:count] = [place + 1 for place in places]
        first, last_tokens = self.shape.num_decode, list(range(count))
        starts, chunks = [0], [0]
        for place, one in enumerate(rows[count:]):
            row, start, end = one.row, one.row.num_computed_tokens, one.row.num_computed_tokens + one.num_tokens
            tokens = slice(first, first + one.num_tokens)
            to["token_ids"][tokens] = row.token_ids[start:end]
            positions = np.arange(start, end, dtype=np.int32)
            to["positions"][tokens] = positions
            block = start // block_size
            blocks = np.array(row.block_table[block : -(-end // block_size)], dtype=np.int32)
            to["slot_mapping"][tokens] = blocks[positions // block_size - block] * block_size + positions % block_size
            to["row_slots"][self.shape.num_decode + place], to["lengths"][self.shape.num_decode + place] = row.slot, end
            starts.append(starts[-1] + one.num_tokens)
            chunks.append(chunks[-1] + num_chunks(one.num_tokens))
            to["chunk_rows"][chunks[-2] : chunks[-1]] = place
            first += one.num_tokens
            last_tokens.append(first - 1)
        to["starts"][: len(starts)], to["starts"][len(starts) :] = starts, starts[-1]
        to["row_chunks"][: len(chunks)], to["row_chunks"][len(chunks) :] = chunks, chunks[-1]
        to["state_slots"][:] = to["row_slots"] if is_hybrid else -1
        sampling = [(token, one.row.slot) for one, token in zip(rows, last_tokens, strict=True) if one.samples]
        to["sample_index"][: len(sampling)] = [token for token, _ in sampling]
        to["sample_slots"][: len(sampling)] = [slot for _, slot in sampling]
        self._buffer.copy_(host, non_blocking=True)


_PADDING = {"token_ids": 0, "positions": 0, "slot_mapping": -1, "row_slots": -1, "lengths": 0, "chunk_rows": -1, "sample_index": 0}
_TORCH = {np.dtype(np.int64): torch.int64, np.dtype(np.int32): torch.int32}
