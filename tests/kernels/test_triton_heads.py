"""Normalising, rotating and storing heads by Triton's kernel, against float32 in torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels.heads import prepare_heads, prepare_heads_reference
from pocketllm.torch_engine.layers.rope import RotaryEmbedding

TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check(
    device: str, dtype: torch.dtype, cache_dtype: torch.dtype, head_dim: int, rotary_dim: int, *, norm: bool, first_query: int = 0, num_tokens: int = 5
) -> None:
    num_heads, num_kv_heads = 2, 1
    width = first_query + (num_heads + 2 * num_kv_heads) * head_dim
    heads = torch.randn(num_tokens, width + 16).to(device, dtype)[:, :width]
    positions = torch.randint(0, 50, (num_tokens,), dtype=torch.int32, device=device)
    cos, sin = (turns[:, 0].contiguous().to(device) for turns in RotaryEmbedding(rotary_dim, 1e4, 50).at(torch.arange(50)))
    num_blocks = -(-num_tokens // 16) + 1
    slot_mapping = torch.randperm(num_blocks * 16)[:num_tokens].to(device, torch.int32)
    slot_mapping[1::3] = -1
    weights = [torch.rand(head_dim).to(device) + 0.5 for _ in range(2)] if norm else [None, None]
    expected_layer, layer = (torch.full((num_blocks, 16, 2, num_kv_heads, head_dim), 7.0).to(device, cache_dtype) for _ in range(2))
    arguments = (heads, first_query, num_heads, num_kv_heads, head_dim, *weights, 1e-6, cos, sin, positions, slot_mapping)
    expected = prepare_heads_reference(*arguments, expected_layer)
    result = prepare_heads(*arguments, layer)
    assert result.dtype == cache_dtype
    tolerance = max(TOLERANCES[dtype], TOLERANCES[cache_dtype])
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(layer, expected_layer, rtol=tolerance, atol=tolerance)
    assert (layer == 7).flatten(2).all(-1).sum() == num_blocks * 16 - (slot_mapping >= 0).sum()  # no other slot is touched


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 16), (80, 20), (96, 72), (256, 64)])
def test_shapes(triton_device: str, head_dim: int, rotary_dim: int, norm: bool) -> None:
    check(triton_device, torch.float32, torch.float32, head_dim, rotary_dim, norm=norm, first_query=2 * head_dim)


@pytest.mark.parametrize("cache_dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_dtypes(triton_device: str, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    check(triton_device, dtype, cache_dtype, 32, 32, norm=True)


@pytest.mark.parametrize("num_tokens", [0, 1, 258])
def test_tokens(triton_device: str, num_tokens: int) -> None:
    """Many tokens are cut otherwise than few."""
    check(triton_device, torch.float32, torch.float32, 16, 8, norm=True, num_tokens=num_tokens)
