"""Pools windows of tokens into entries (DeepSeek-V4, 2026): a weighted mean of each value, normalised and rotated to the window's first position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pocketllm.torch_engine.layers.compressed_cache import CompressedCache, LayerShape
from pocketllm.torch_engine.layers.compressed_step import CompressedStep, PromptRow
from pocketllm.torch_engine.layers.device import Norm
from pocketllm.torch_engine.layers.rope import RotaryEmbedding

_WINDOWS_AT_ONCE = 2**22  # values that are pooled at once


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """One compressor beside its projection.

    Args:
        width: values of an entry.
        bias: added to the weights before their softmax, by place in the window: [ratio, width], twice as wide where windows overlap. float32.
        norm: of an entry.
    """

    width: int
    bias: torch.Tensor
    norm: Norm


class Compressor:
    """One of a layer's compressors. Where windows overlap, a token's values are double: the first half for the entry after its own, the second for its own.

    Args:
        weights: of it.
        layer: sizes; `place` says which of the layer's compressors this is.
        rope: of entries.
    """

    def __init__(self, weights: CompressorWeights, layer: LayerShape, place: int, rope: RotaryEmbedding) -> None:
        self._weights, self._layer, self._place, self._rope = weights, layer, place, rope

    def decode(self, inputs: torch.Tensor, step: CompressedStep, cache: CompressedCache, index: int) -> None:
        """Take in one token a row, inputs [num_decode, input_width] float32, and store the entries that they complete in the layer `index` of `cache`."""
        layer, stored = self._layer, cache.states.inputs[index][self._place]
        stored[step.slots, step.positions % layer.span] = inputs
        rows, places = step.finishing(layer)
        if rows.numel():
            ends = step.positions[rows]
            taken = (ends.unsqueeze(1) + torch.arange(1 - layer.span, 1, device=ends.device)) % layer.span  # oldest first
            entries = self._pool(stored[step.slots[rows].unsqueeze(1), taken], ends // layer.ratio)
            cache.entries[index][self._place][places] = entries.to(cache.dtype)

    def prefill(self, inputs: torch.Tensor, row: PromptRow, cache: CompressedCache, index: int) -> None:
        """The same for the tokens of one row, inputs [num_tokens, input_width]."""
        layer, stored, device = self._layer, cache.states.inputs[index][self._place][row.slot], inputs.device
        first, last = row.start // layer.ratio, row.end // layer.ratio  # entries that are completed
        if first < last:
            begin = (first + 1) * layer.ratio - layer.span  # may be before the row's beginning, by one window that counts for nothing
            kept = torch.arange(begin, row.start, device=device) % layer.span
            known = torch.cat([stored[kept], inputs[: last * layer.ratio - row.start]])
            places = row.entries(layer, cache.block_size, first, last)
            size = max(1, _WINDOWS_AT_ONCE // (layer.span * inputs.shape[1]))
            for at in range(first, last, size):
                end = min(at + size, last)
                part = known[(at - first) * layer.ratio : (end - 1 - first) * layer.ratio + layer.span]
                windows = part.unfold(0, layer.span, layer.ratio).transpose(1, 2)
                entries = self._pool(windows, torch.arange(at, end, device=device))
                cache.entries[index][self._place][places[at - first : end - first]] = entries.to(cache.dtype)
        tail = inputs[-layer.span :]
        stored[torch.arange(row.end - tail.shape[0], row.end, device=device) % layer.span] = tail

    def _pool(self, inputs: torch.Tensor, windows: torch.Tensor) -> torch.Tensor:
        """inputs: [num_windows, span, input_width], oldest first; windows: [num_windows] int64, their numbers. Returns [num_windows, width] float32."""
        width, ratio, bias = self._weights.width, self._layer.ratio, self._weights.bias
        values, gates = inputs.chunk(2, dim=-1)
        if self._layer.overlaps:
            values = torch.cat([values[:, :ratio, :width], values[:, ratio:, width:]], dim=1)
            before = (gates[:, :ratio, :width] + bias[:, :width]).masked_fill((windows == 0)[:, None, None], float("-inf"))
            gates = torch.cat([before, gates[:, ratio:, width:] + bias[:, width:]], dim=1)
        else:
            gates = gates + bias
        pooled = (values * gates.softmax(dim=1)).sum(dim=1)
        norm = self._weights.norm
        return rotate_pairs(normalize(pooled, norm.eps) * norm.weight, *rotation(self._rope, windows * ratio))


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) over the last dimension; float32."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def rotation(rope: RotaryEmbedding, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines of positions [n], each [n, rotary_dim / 2] float32."""
    return rope.cos[positions], rope.sin[positions]


def rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [..., size] float32 with its last 2 * cos.shape[-1] values rotated, each two neighbours of them together. cos and sin broadcast to [..., pairs]."""
    kept = x.shape[-1] - 2 * cos.shape[-1]
    pairs = x[..., kept:].unflatten(-1, (-1, 2))
    even, odd = pairs[..., 0], pairs[..., 1]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    return torch.cat([x[..., :kept], turned], dim=-1)
