"""Gated DeltaNet against transformers' own torch functions, and its two forms against each other."""

from __future__ import annotations

import pytest
import torch
from transformers.models.qwen3_5 import modeling_qwen3_5 as oracle

from pocketllm.torch_engine.layers.gated_delta_net import CHUNK, causal_conv, chunked_delta_rule, delta_rule_step, gated_rms_norm

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM = 2, 6, 16, 12
GROUPED = torch.arange(HEADS) // (HEADS // KEY_HEADS)
LENGTHS = [1, 2, 3, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 16 * CHUNK + 5, 17 * CHUNK]


def inputs(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """query, key, value, decay, beta of one row; query and key as the layer makes them."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(num_tokens, *shape, generator=generator)

    query, key = (oracle.l2norm(normal(KEY_HEADS, KEY_DIM)) for _ in range(2))
    return query * KEY_DIM**-0.5, key, normal(HEADS, VALUE_DIM), -normal(HEADS).exp() / 4, normal(HEADS).sigmoid()


def random_state(seed: int = 1) -> torch.Tensor:
    return torch.randn(HEADS, KEY_DIM, VALUE_DIM, generator=torch.Generator().manual_seed(seed))


def reference(tensors: tuple[torch.Tensor, ...], state: torch.Tensor, *, chunked: bool) -> tuple[torch.Tensor, torch.Tensor]:
    query, key, value, decay, beta = (tensor.unsqueeze(0) for tensor in tensors)
    rule = oracle.torch_chunk_gated_delta_rule if chunked else oracle.torch_recurrent_gated_delta_rule
    read, after = rule(query * KEY_DIM**0.5, key, value, g=decay, beta=beta, initial_state=state.unsqueeze(0), output_final_state=True)
    return read[0], after[0]


@pytest.mark.parametrize("num_tokens", LENGTHS)
@pytest.mark.parametrize("chunked", [True, False])
def test_chunked_form(num_tokens: int, chunked: bool) -> None:
    tensors, state = inputs(num_tokens), random_state()
    wanted, state_after = reference(tensors, state, chunked=chunked)
    read = chunked_delta_rule(*tensors, state, GROUPED)
    torch.testing.assert_close(read, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, state_after, rtol=1e-4, atol=1e-5)


def test_strong_decay_neither_overflows_nor_leaves_nan() -> None:
    query, key, value, decay, beta = inputs(2 * CHUNK)
    tensors, state = (query, key, value, decay * 200, beta), random_state()
    wanted, state_after = reference(tensors, state, chunked=False)
    torch.testing.assert_close(chunked_delta_rule(*tensors, state, GROUPED), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(state, state_after, rtol=1e-4, atol=1e-5)


def test_one_token_of_several_rows() -> None:
    rows = [inputs(1, seed) for seed in range(5)]
    states = torch.stack([random_state(seed) for seed in range(5)])
    wanted = [reference(row, state.clone(), chunked=False) for row, state in zip(rows, states, strict=True)]
    query, key, value, decay, beta = (torch.cat(parts) for parts in zip(*rows, strict=True))
    read = delta_rule_step(query[:, GROUPED], key[:, GROUPED], value, decay, beta, states)
    torch.testing.assert_close(read, torch.cat([one for one, _ in wanted]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(states, torch.stack([state for _, state in wanted]), rtol=1e-5, atol=1e-6)


def test_tiled_heads_are_grouped_heads_in_another_order() -> None:
    query, key, value, decay, beta = inputs(CHUNK + 9)
    order = torch.arange(HEADS).view(KEY_HEADS, -1).T.flatten()  # place of a tiled head among grouped ones
    state = random_state()
    tiled_state = state[order].clone()
    grouped = chunked_delta_rule(query, key, value, decay, beta, state, GROUPED)
    tiled = chunked_delta_rule(query, key, value[:, order], decay[:, order], beta[:, order], tiled_state, torch.arange(HEADS) % KEY_HEADS)
    torch.testing.assert_close(tiled, grouped[:, order])
    torch.testing.assert_close(tiled_state, state[order])


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 9])
def test_causal_conv(num_tokens: int) -> None:
    generator = torch.Generator().manual_seed(3)
    channels, kernel = 7, 4
    x, tails = torch.randn(2, num_tokens, channels, generator=generator), torch.randn(2, kernel - 1, channels, generator=generator)
    weight = torch.randn(channels, kernel, generator=generator)
    oracle_tails = tails.transpose(1, 2).contiguous()
    wanted = oracle.causal_conv1d_update(x.transpose(1, 2), oracle_tails, weight, None, "silu").transpose(1, 2)
    whole = causal_conv(x, tails_after := tails.clone(), weight.T)
    torch.testing.assert_close(whole, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(tails_after, oracle_tails.transpose(1, 2))
    pieces = [causal_conv(x[:, place : place + 1], tails, weight.T) for place in range(num_tokens)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    assert torch.equal(tails, tails_after)


def test_gated_norm() -> None:
    generator = torch.Generator().manual_seed(4)
    x, gate = torch.randn(5, 3, 8, generator=generator), torch.randn(5, 3, 8, generator=generator)
    norm = oracle.Qwen3_5RMSNormGated(8, eps=1e-6)
    norm.weight.data = torch.randn(8, generator=generator)
    torch.testing.assert_close(gated_rms_norm(x, gate, norm.weight.data, 1e-6), norm(x, gate).detach())
