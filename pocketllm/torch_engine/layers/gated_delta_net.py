"""Gated DeltaNet (Yang, Kautz and Hatamizadeh, 2024): linear attention whose memory is one matrix a head.

Each token decays the matrix S, corrects what S gives for the token's key towards its value, and reads S at its query:

    S <- exp(decay) S;    S <- S + k (beta (v - S^T k))^T;    o = S^T q

Rows that decode do just that. Rows that prefill use the chunked form, equal up to rounding: within a chunk of CHUNK tokens the
corrections solve a triangular system, so S is read and written once a chunk. All of it is float32 under every compute dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from pocketllm.torch_engine.batch import Batch
from pocketllm.torch_engine.layers.state_cache import StateCache, StateShape
from pocketllm.torch_engine.share import Share, scaled

CHUNK = 64
_CHUNKS_AT_ONCE = 16  # bounds what a long prompt's pairs of tokens take in memory: 16 chunks of 32 heads are 8 MiB
_L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetSizes:
    """Heads and widths of one layer.

    Args:
        num_key_heads, num_value_heads: a key head serves num_value_heads / num_key_heads value heads.
        key_dim, value_dim: of one head.
        conv_kernel: tokens that the causal convolution covers, at least 2.
        tiled: value head h reads key head h % num_key_heads, GGUF's order; otherwise h // (num_value_heads / num_key_heads), Hugging Face's.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    tiled: bool = False

    @property
    def conv_dim(self) -> int:
        """Channels that the convolution mixes: queries, keys, values."""
        return 2 * self.num_key_heads * self.key_dim + self.num_value_heads * self.value_dim

    @property
    def value_size(self) -> int:
        """Values of a token over all heads."""
        return self.num_value_heads * self.value_dim

    def value_heads(self, share: Share) -> list[range]:
        """The value heads that read the key heads of `share`."""
        if not self.tiled:
            return [share.of(self.num_value_heads)]
        keys = share.of(self.num_key_heads)
        return [range(start + keys.start, start + keys.stop) for start in range(0, self.num_value_heads, self.num_key_heads)]

    def channels(self, share: Share) -> list[range]:
        """Channels of the convolution of those heads: queries, keys, values."""
        keys, of_keys = share.of(self.num_key_heads), self.num_key_heads * self.key_dim
        values = [scaled(part, self.value_dim, 2 * of_keys) for part in self.value_heads(share)]
        return [scaled(keys, self.key_dim), scaled(keys, self.key_dim, of_keys), *values]

    def dealt_out(self, share: Share) -> DeltaNetSizes:
        """The sizes of what a rank holds."""
        return replace(self, num_key_heads=self.num_key_heads // share.size, num_value_heads=self.num_value_heads // share.size)

    @property
    def state_shape(self) -> StateShape:
        return StateShape(self.conv_kernel - 1, self.conv_dim, self.num_value_heads, self.key_dim, self.value_dim)


class GatedDeltaNet:
    """One layer's mixer, between its projections.

    Args:
        sizes: heads and widths.
        conv_weight: [conv_kernel, conv_dim] float32, the oldest token's first.
        decay_rate: [num_value_heads] float32, below 0: -exp(A_log).
        dt_bias: [num_value_heads] float32.
        norm_weight: [value_dim] float32.
        norm_eps: of the output's norm.
    """

    def __init__(
        self,
        sizes: DeltaNetSizes,
        conv_weight: torch.Tensor,
        decay_rate: torch.Tensor,
        dt_bias: torch.Tensor,
        norm_weight: torch.Tensor,
        norm_eps: float,
    ) -> None:
        self.sizes = sizes
        self._conv_weight = conv_weight.contiguous()
        self._decay_rate, self._dt_bias = decay_rate, dt_bias
        self._norm_weight, self._norm_eps = norm_weight, norm_eps
        heads = torch.arange(sizes.num_value_heads)
        self._key_heads = heads % sizes.num_key_heads if sizes.tiled else heads // (sizes.num_value_heads // sizes.num_key_heads)

    def __call__(self, mixed: torch.Tensor, batch: Batch, states: StateCache, layer: int) -> torch.Tensor:
        """Mix the tokens of each row, reading and writing the rows' states of `layer`.

        Args:
            mixed: [num_tokens, conv_dim + value_size + 2 * num_value_heads] float32: queries, keys, values, gate z, beta, decay.

        Returns:
            [num_tokens, value_size] float32.
        """
        sizes, count = self.sizes, batch.num_decode
        qkv, z, b, a = mixed.split([sizes.conv_dim, sizes.value_size, sizes.num_value_heads, sizes.num_value_heads], dim=-1)
        beta = b.sigmoid()  # [num_tokens, num_value_heads]
        decay = self._decay_rate * F.softplus(a + self._dt_bias)  # [num_tokens, num_value_heads]
        parts = []
        if count:
            parts.append(self._decode(qkv[:count], decay[:count], beta[:count], batch, states, layer))
        for prefill, slot in zip(batch.prefills, batch.state_slots[count:], strict=True):
            tokens = prefill.tokens
            convolved = causal_conv(qkv[tokens].unsqueeze(0), states.conv[layer][slot : slot + 1], self._conv_weight)[0]
            query, key, value = self._heads(convolved)
            parts.append(chunked_delta_rule(query, key, value, decay[tokens], beta[tokens], states.recurrent[layer][slot], self._key_heads))
        read = parts[0] if len(parts) == 1 else torch.cat(parts)  # [num_tokens, num_value_heads, value_dim]
        gated = gated_rms_norm(read, z.unflatten(-1, (sizes.num_value_heads, sizes.value_dim)), self._norm_weight, self._norm_eps)
        return gated.flatten(1)

    def _decode(self, qkv: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, batch: Batch, states: StateCache, layer: int) -> torch.Tensor:
        """One token a row: qkv [num_rows, conv_dim] -> [num_rows, num_value_heads, value_dim]."""
        slots = batch.state_slots[: batch.num_decode]
        if len(slots) == 1:  # in place
            tails, recurrent = states.conv[layer][slots[0] : slots[0] + 1], states.recurrent[layer][slots[0] : slots[0] + 1]
        else:
            index = torch.tensor(slots)
            tails, recurrent = states.conv[layer][index], states.recurrent[layer][index]
        query, key, value = self._heads(causal_conv(qkv.unsqueeze(1), tails, self._conv_weight).squeeze(1))
        read = delta_rule_step(query[:, self._key_heads], key[:, self._key_heads], value, decay, beta, recurrent)
        if len(slots) > 1:
            states.conv[layer][index] = tails
            states.recurrent[layer][index] = recurrent
        return read

    def _heads(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[num_tokens, conv_dim] -> queries of length key_dim ** -0.5 and keys of length 1, [num_tokens, num_key_heads, key_dim], and values
        [num_tokens, num_value_heads, value_dim]."""
        sizes = self.sizes
        query, key, value = qkv.split([sizes.num_key_heads * sizes.key_dim] * 2 + [sizes.value_size], dim=-1)
        query, key = (_unit(heads.unflatten(-1, (sizes.num_key_heads, sizes.key_dim))) for heads in (query, key))
        return query * sizes.key_dim**-0.5, key, value.unflatten(-1, (sizes.num_value_heads, sizes.value_dim))


def causal_conv(x: torch.Tensor, tails: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """SiLU of a depthwise convolution of each token with those before it.

    Args:
        x: [num_rows, num_tokens, conv_dim] float32.
        tails: [num_rows, conv_kernel - 1, conv_dim] float32, the tokens before x, oldest first; becomes the last ones of both.
        weight: [conv_kernel, conv_dim] float32.

    Returns:
        The shape of x.
    """
    num_tokens, kernel = x.shape[1], weight.shape[0]
    window = torch.cat([tails, x], dim=1)
    mixed = window[:, :num_tokens] * weight[0]
    for place in range(1, kernel):
        mixed.addcmul_(window[:, place : place + num_tokens], weight[place])
    tails.copy_(window[:, num_tokens:])
    return F.silu(mixed, inplace=True)


def delta_rule_step(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """One token of each row.

    Args:
        query, key: [num_rows, num_heads, key_dim] float32.
        value: [num_rows, num_heads, value_dim] float32.
        decay, beta: [num_rows, num_heads] float32; decay is a logarithm.
        state: [num_rows, num_heads, key_dim, value_dim] float32, changed in place.

    Returns:
        [num_rows, num_heads, value_dim].
    """
    state.mul_(decay.exp()[..., None, None])
    remembered = (key.unsqueeze(-2) @ state).squeeze(-2)
    correction = (value - remembered) * beta.unsqueeze(-1)
    state.addcmul_(key.unsqueeze(-1), correction.unsqueeze(-2))
    return (query.unsqueeze(-2) @ state).squeeze(-2)


def chunked_delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, key_heads: torch.Tensor
) -> torch.Tensor:
    """Several tokens of one row.

    Args:
        query, key: [num_tokens, num_key_heads, key_dim] float32.
        value: [num_tokens, num_heads, value_dim] float32.
        decay, beta: [num_tokens, num_heads] float32; decay is a logarithm.
        state: [num_heads, key_dim, value_dim] float32, changed in place.
        key_heads: [num_heads] int64, the key head that each head reads.

    Returns:
        [num_tokens, num_heads, value_dim].
    """
    parts = []
    whole = query.shape[0] // CHUNK * CHUNK  # what is left makes one shorter chunk
    for start, end in pairwise([*range(0, whole, CHUNK * _CHUNKS_AT_ONCE), whole, query.shape[0]]):
        if start < end:
            shape = (-1, min(CHUNK, end - start))
            q, k, v, d, b = (x[start:end].unflatten(0, shape) for x in (query, key, value, decay, beta))
            parts.append(_run_chunks(q, k, v, d, b, state, key_heads))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _run_chunks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, decay: torch.Tensor, beta: torch.Tensor, state: torch.Tensor, key_heads: torch.Tensor
) -> torch.Tensor:
    """As chunked_delta_rule, each argument but the last two cut into [num_chunks, chunk]."""
    chunk = query.shape[1]
    query, key, value = (x.permute(0, 2, 1, 3) for x in (query, key, value))  # [num_chunks, heads, chunk, dim]
    decay, beta = decay.transpose(1, 2), beta.transpose(1, 2)  # [num_chunks, num_heads, chunk]
    since_start = decay.cumsum(dim=-1)  # logarithm of the decay from before the chunk to after each of its tokens
    later = torch.ones(chunk, chunk, dtype=torch.bool).triu_(1)
    pairs = (since_start.unsqueeze(-1) - since_start.unsqueeze(-2)).masked_fill_(later, float("-inf")).exp_()  # from token j to token i, 0 for j > i
    # Products of queries and keys are the same for all heads that share a key head.
    key_products, query_products = (x @ key.transpose(-1, -2) for x in (key, query))  # [num_chunks, num_key_heads, chunk, chunk]
    # (1 + lower triangle) corrections = beta values - beta decayed keys S: solved for both right sides, before S is known.
    system = key_products[:, key_heads].mul_(pairs).mul_(beta.unsqueeze(-1))
    scale = beta * since_start.exp()
    sides = torch.cat([value * beta.unsqueeze(-1), key[:, key_heads] * scale.unsqueeze(-1)], dim=-1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)  # ignores the diagonal and what is above it
    from_values, from_state = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    within = query_products[:, key_heads].mul_(pairs)
    decayed_query = query[:, key_heads] * since_start.exp().unsqueeze(-1)
    decayed_key = key[:, key_heads] * (since_start[..., -1:] - since_start).exp().unsqueeze(-1)
    over_chunk = since_start[..., -1].exp()[..., None, None]
    read = torch.empty_like(from_values, memory_format=torch.contiguous_format)
    for place in range(query.shape[0]):
        corrections = torch.baddbmm(from_values[place], from_state[place], state, alpha=-1)  # [num_heads, chunk, value_dim]
        torch.baddbmm(decayed_query[place] @ state, within[place], corrections, out=read[place])
        state.mul_(over_chunk[place]).baddbmm_(decayed_key[place].transpose(-1, -2), corrections)
    return read.transpose(1, 2).flatten(0, 1)


def gated_rms_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dimension; x and gate [..., size] float32, weight [size]."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight * F.silu(gate)


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Vectors of the last dimension, brought to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
