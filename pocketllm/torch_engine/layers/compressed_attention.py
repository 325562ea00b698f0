"""Attention of DeepSeek-V4 (2026): a window of recent tokens, and before it entries that stand for several tokens, all of them or the best for a query.

One head of values is key and value at once for all query heads, so what is attended to is rotated; the result is rotated back by the query's position. A
sink for each head takes its share of the softmax and gives nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pocketllm.torch_engine.device_batch import DeviceBatch
from pocketllm.torch_engine.layers.compressed_cache import CompressedCache, LayerShape
from pocketllm.torch_engine.layers.compressed_step import CompressedStep, PromptRow
from pocketllm.torch_engine.layers.compressor import Compressor, CompressorWeights, normalize, rotate_pairs, rotation
from pocketllm.torch_engine.layers.device import Norm
from pocketllm.torch_engine.layers.linear import Linear
from pocketllm.torch_engine.layers.rope import RotaryEmbedding

_SCORES_AT_ONCE = 2**23  # values of a prompt's scores, or of entries gathered for its queries
_ROWS_VALUES_AT_ONCE = 2**26  # the same of rows that decode
_LEAST_QUERIES = 16


@dataclass(frozen=True, slots=True)
class IndexerSizes:
    """How a layer's queries choose among its entries: their `top_k` best by sum over heads of share * max(0, query * key).

    Args:
        num_heads, head_dim: of the queries.
        top_k: entries that a query attends to.
    """

    num_heads: int
    head_dim: int
    top_k: int


@dataclass(frozen=True, slots=True)
class CompressedAttentionWeights:
    """One layer.

    Args:
        num_heads, head_dim: of the queries.
        shape: of what is kept.
        rope: of queries, tokens and entries.
        input: matrix of all that is computed from the layer's input, in this order: the latent query, key and value, for each compressor its values and
            their weights, the shares of the indexer's heads.
        query_norm: of the latent query.
        query: matrix of its heads, and then of the indexer's.
        key_norm: of keys and values.
        sinks: [num_heads] float32.
        compressors: of the attention, then of the indexer.
        indexer: where a query attends to some entries only.
        groups: matrices of the heads' results [num_tokens, num_heads * head_dim], a group of neighbouring heads each, side by side.
        output: matrix of what those give.
        activations: dtype of the matrices' inputs.
    """

    num_heads: int
    head_dim: int
    shape: LayerShape
    rope: RotaryEmbedding
    input: Linear
    query_norm: Norm
    query: Linear
    key_norm: Norm
    sinks: torch.Tensor
    compressors: Sequence[CompressorWeights]
    indexer: IndexerSizes | None
    groups: Linear
    output: Linear
    activations: torch.dtype


@dataclass(frozen=True, slots=True)
class Keys:
    """What some queries attend to: values [count, head_dim], or [num_queries, count, head_dim] of each query's own; seen, bool [num_queries, count]."""

    values: torch.Tensor
    seen: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Queries:
    """Of some tokens: heads [num_tokens, num_heads, head_dim]; of the indexer, keys to compare with [num_tokens, index_heads, index_dim] and shares
    [num_tokens, index_heads], or None. float32."""

    heads: torch.Tensor
    index: torch.Tensor | None
    shares: torch.Tensor | None

    def of(self, tokens: slice) -> _Queries:
        return _Queries(self.heads[tokens], None if self.index is None else self.index[tokens], None if self.shares is None else self.shares[tokens])


class CompressedAttention:
    """One layer; see CompressedAttentionWeights.

    Args:
        weights: of it.
        index: of the layer in the cache.

    Attributes:
        is_capturable: a CUDA graph can hold a step of rows that decode, which the layer then takes as a DeviceBatch.
    """

    is_capturable = False

    def __init__(self, weights: CompressedAttentionWeights, index: int) -> None:
        self._w, self._index = weights, index
        self._compressors = [Compressor(one, weights.shape, place, weights.rope) for place, one in enumerate(weights.compressors)]
        self._scale = weights.head_dim**-0.5
        widths = [weights.shape.input_width(one.width) for one in weights.compressors]
        latent = weights.query_norm.weight.shape[0]
        self._sizes = [latent, weights.head_dim, *widths, *([weights.indexer.num_heads] if weights.indexer else [])]
        self.num_bytes = sum(one.num_bytes for one in (weights.input, weights.query, weights.groups, weights.output))

    def __call__(self, x: torch.Tensor, step: CompressedStep | DeviceBatch, cache: CompressedCache) -> torch.Tensor:
        """x: [num_tokens, hidden_size] in the activations' dtype -> the same shape, after the rows' caches have taken their tokens in."""
        assert isinstance(step, CompressedStep)
        weights, count = self._w, step.num_decode
        cos, sin = rotation(weights.rope, step.all_positions)
        latent, key, *rest = weights.input(x).float().split(self._sizes, dim=-1)
        inputs = rest[: len(self._compressors)]
        key = rotate_pairs(normalize(key, weights.key_norm.eps) * weights.key_norm.weight, cos, sin).to(cache.dtype)
        queries = self._queries(latent, None if weights.indexer is None else rest[-1], cos, sin)
        parts = []
        if count:
            parts.append(self._decode(queries.of(slice(0, count)), key[:count], [one[:count] for one in inputs], step, cache))
        for row in step.prompts:
            parts.append(self._prefill(queries.of(row.tokens), key[row.tokens], [one[row.tokens] for one in inputs], row, cache))
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)  # [num_tokens, num_heads, head_dim] float32
        unturned = rotate_pairs(attended, cos.unsqueeze(1), -sin.unsqueeze(1)).to(weights.activations)
        return weights.output(weights.groups(unturned.flatten(1)))

    def _queries(self, latent: torch.Tensor, shares: torch.Tensor | None, cos: torch.Tensor, sin: torch.Tensor) -> _Queries:
        weights, indexer = self._w, self._w.indexer
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        projected = weights.query((normalize(latent, weights.query_norm.eps) * weights.query_norm.weight).to(weights.activations)).float()
        width = weights.num_heads * weights.head_dim
        heads = rotate_pairs(normalize(projected[:, :width].unflatten(-1, (-1, weights.head_dim)), weights.query_norm.eps), cos, sin)
        if indexer is None or shares is None:
            return _Queries(heads, None, None)
        index = rotate_pairs(projected[:, width:].unflatten(-1, (-1, indexer.head_dim)), cos, sin)
        return _Queries(heads, index, shares * (indexer.num_heads * indexer.head_dim) ** -0.5)

    def _decode(self, queries: _Queries, key: torch.Tensor, inputs: Sequence[torch.Tensor], step: CompressedStep, cache: CompressedCache) -> torch.Tensor:
        stored = cache.states.windows[self._index]
        window = stored.shape[1]
        stored[step.slots, step.positions % window] = key
        for compressor, one in zip(self._compressors, inputs, strict=True):
            compressor.decode(one, step, cache, self._index)
        places, has = step.decode_entries(self._w.shape) if self._w.shape.ratio else (None, None)
        seen = torch.arange(window, device=key.device) <= step.positions.unsqueeze(1)  # once a row is longer than the window, every place is
        parts, size = [], self._rows_at_once(0 if places is None else places.shape[1])
        for start in range(0, step.num_decode, size):
            some = slice(start, start + size)
            keys = [Keys(stored[step.slots[some]], seen[some])]
            if places is not None and has is not None and places.shape[1]:
                keys.append(self._choose(queries.of(some), places[some], has[some], cache))
            parts.append(attend(queries.heads[some], keys, self._w.sinks, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _choose(self, queries: _Queries, places: torch.Tensor, has: torch.Tensor, cache: CompressedCache) -> Keys:
        """Entries at `places`, [num_entries], or [num_queries, num_entries] of each query's own row, of which each query `has` some: the best ones of those."""
        entries, indexer = cache.entries[self._index], self._w.indexer
        if indexer is None or places.shape[-1] <= indexer.top_k:
            return Keys(_seen(entries[0][places], has), has)
        assert queries.index is not None
        assert queries.shares is not None
        index_keys = entries[1][places].float()
        scores = torch.relu(queries.index @ index_keys.transpose(-1, -2)).mul_(queries.shares.unsqueeze(-1)).sum(1)  # [num_queries, num_entries]
        best = scores.masked_fill_(~has, float("-inf")).topk(indexer.top_k, dim=-1).indices
        chosen = places[best] if places.ndim == 1 else places.gather(1, best)
        has = has.gather(1, best)
        return Keys(_seen(entries[0][chosen], has), has)

    def _prefill(self, queries: _Queries, key: torch.Tensor, inputs: Sequence[torch.Tensor], row: PromptRow, cache: CompressedCache) -> torch.Tensor:
        stored, device = cache.states.windows[self._index][row.slot], key.device
        window, ratio = stored.shape[0], self._w.shape.ratio
        first = max(0, row.start - window + 1)  # the first position that one of the row's tokens sees
        known = torch.cat([stored[torch.arange(first, row.start, device=device) % window], key])
        tail = key[-window:]
        stored[torch.arange(row.end - tail.shape[0], row.end, device=device) % window] = tail
        for compressor, one in zip(self._compressors, inputs, strict=True):
            compressor.prefill(one, row, cache, self._index)
        parts, size = [], self._queries_at_once(row)
        for start in range(row.start, row.end, size):
            end = min(start + size, row.end)
            own = torch.arange(start, end, device=device).unsqueeze(1)
            begin = max(0, start - window + 1)
            positions = torch.arange(begin, end, device=device)
            keys = [Keys(known[begin - first : end - first], (positions <= own) & (positions > own - window))]
            part = queries.of(slice(start - row.start, end - row.start))
            if ratio and (count := end // ratio):
                has = torch.arange(count, device=device) < (own + 1) // ratio
                keys.append(self._choose(part, row.entries(self._w.shape, cache.block_size, 0, count), has, cache))
            parts.append(attend(part.heads, keys, self._w.sinks, self._scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _rows_at_once(self, entries: int) -> int:
        """Decoding rows of so many entries whose scores, and what is gathered for them, are in memory together."""
        weights, indexer = self._w, self._w.indexer
        if indexer is None or entries <= indexer.top_k:
            each = entries * (weights.num_heads + weights.head_dim)
        else:
            each = entries * (indexer.num_heads + indexer.head_dim) + indexer.top_k * (weights.num_heads + weights.head_dim)
        return max(1, _ROWS_VALUES_AT_ONCE // max(1, each))

    def _queries_at_once(self, row: PromptRow) -> int:
        """Tokens of a prompt whose scores, and whose own choice of entries, are in memory together."""
        weights, indexer = self._w, self._w.indexer
        entries = row.end // weights.shape.ratio if weights.shape.ratio else 0
        each = weights.num_heads * (entries + 2 * _LEAST_QUERIES)
        if indexer is not None and entries > indexer.top_k:
            each = max(indexer.num_heads * entries, indexer.top_k * weights.head_dim)
        return max(_LEAST_QUERIES, _SCORES_AT_ONCE // each)


def _seen(values: torch.Tensor, has: torch.Tensor) -> torch.Tensor:
    """`values` gathered for each query, zeroed where it `has` none: there may be what a failed row left, and a share of 0 does not mask what is not finite."""
    return values.masked_fill_(~has.unsqueeze(-1), 0) if values.ndim == 3 else values


def attend(queries: torch.Tensor, keys: Sequence[Keys], sinks: torch.Tensor, scale: float) -> torch.Tensor:
    """Attention of each query to all of `keys` that it sees, and to the sink of its head; computed in float32.

    Args:
        queries: [num_queries, num_heads, head_dim] float32.
        keys: one after another.
        sinks: [num_heads] float32, scores whose values are 0.
        scale: of the other scores.

    Returns:
        [num_queries, num_heads, head_dim] float32.
    """
    values = [one.values.float() for one in keys]
    scores = [queries @ one.transpose(-1, -2) for one in values]  # [num_queries, num_heads, count]
    masked = [(score * scale).masked_fill_(~one.seen.unsqueeze(1), float("-inf")) for score, one in zip(scores, keys, strict=True)]
    sink = sinks.expand(queries.shape[0], -1).unsqueeze(-1)
    shares = torch.cat([*masked, sink], dim=-1).softmax(-1)
    out = torch.zeros_like(queries)
    start = 0
    for one in values:
        out += shares[..., start : start + one.shape[-2]] @ one
        start += one.shape[-2]
    return out
