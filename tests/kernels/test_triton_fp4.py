"""Experts in FP4: the kernels against the formula, and GGUF's blocks against the gguf package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from pocketllm.torch_engine.quant.fp4 import dequantize_fp4, unpack_mxfp4

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels.fp4_experts import Fp4Experts, fp4_experts, fp4_experts_reference
from pocketllm.torch_engine.kernels.fp4_rows import fp4_down_rows, fp4_gate_up_rows
from pocketllm.torch_engine.kernels.fp8 import Fp8Weight
from pocketllm.torch_engine.kernels.grouped_linear import clamped_gated_row
from pocketllm.torch_engine.kernels.linear import linear_reference
from pocketllm.torch_engine.kernels.route import clamped_gate, route_by_softplus
from pocketllm.torch_engine.layers.routed_experts import ClampedSwiGLU, Router


def random_experts(count: int, rows: int, columns: int, device: str, seed: int) -> Fp4Experts:
    """Every byte, and scales around 1 / 16."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(0, 256, (count, rows, columns // 2), generator=generator, dtype=torch.uint8)
    scales = torch.randint(121, 126, (count, rows, columns // 32), generator=generator, dtype=torch.uint8)
    return Fp4Experts(values.to(device), scales.to(device))


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, torch.float32), (7, torch.float32), (3, torch.bfloat16)])
def test_experts(num_tokens: int, dtype: torch.dtype, triton_device: str) -> None:
    """96 and 64 are no multiples of the tiles' 128 values and 64 columns."""
    gate_up, down = random_experts(4, 2 * 96, 64, triton_device, 1), random_experts(4, 64, 96, triton_device, 2)
    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, 64, generator=generator).to(triton_device, dtype)
    chosen = torch.rand(num_tokens, 4, generator=generator).argsort(-1)[:, :2].to(triton_device)
    shares = torch.rand(num_tokens, 2, generator=generator).to(triton_device)
    found = fp4_experts(x, chosen, shares, gate_up, down, 1.5)
    wanted = fp4_experts_reference(x, chosen, shares, gate_up, down, 1.5)
    assert found.dtype == dtype
    assert (found.float() - wanted).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-2) * wanted.abs().max()


def test_no_tokens(triton_device: str) -> None:
    gate_up, down = random_experts(2, 64, 32, triton_device, 1), random_experts(2, 32, 32, triton_device, 2)
    none = torch.zeros(0, 2, device=triton_device)
    assert fp4_experts(torch.zeros(0, 32, device=triton_device), none.long(), none, gate_up, down, 1.0).shape == (0, 32)


def test_scales_of_another_shape() -> None:
    with pytest.raises(ValueError, match="a scale for each 16 bytes of a row"):
        Fp4Experts(torch.zeros(1, 4, 32, dtype=torch.uint8), torch.zeros(1, 4, 1, dtype=torch.uint8))


def test_blocks_of_a_gguf() -> None:
    """Repacked values and scales are those of the gguf package, bit for bit."""
    blocks = np.random.default_rng(3).integers(0, 256, (5, 3 * 17), dtype=np.uint8)
    blocks[:, ::17] = np.random.default_rng(4).integers(100, 140, (5, 3))  # exponents
    out = torch.empty(5, 96)
    dequantize_fp4(*unpack_mxfp4(blocks), out)
    assert torch.equal(out, torch.from_numpy(gguf.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)))


@pytest.mark.parametrize(("num_tokens", "dtype"), [(1, torch.float32), (3, torch.bfloat16), (2, torch.float16)])
@pytest.mark.parametrize(("columns", "inner_columns"), [(160, 96), (256, 128)])
def test_rows_of_experts(columns: int, inner_columns: int, num_tokens: int, dtype: torch.dtype, triton_device: str) -> None:
    """Each token's experts by themselves; 90 rows are no multiple of a program's, 160 and 96 columns less than it takes at once.

    The other widths are those that 16 bits on a GPU multiply in pairs.
    """
    gate_up, down = random_experts(4, 2 * inner_columns, columns, triton_device, 1), random_experts(4, 90, inner_columns, triton_device, 2)
    generator = torch.Generator().manual_seed(num_tokens)
    x = (torch.randn(num_tokens, columns, generator=generator) * torch.logspace(-4, 0, columns)).to(triton_device, dtype)
    chosen = torch.rand(num_tokens, 4, generator=generator).argsort(-1)[:, :2].contiguous().to(triton_device)
    shares = torch.rand(num_tokens, 2, generator=generator).to(triton_device)
    inner = fp4_gate_up_rows(x, chosen, gate_up.values, gate_up.scales, 1.5)
    found = fp4_down_rows(inner, chosen, shares, down.values, down.scales, torch.ones(num_tokens, 90, device=triton_device))
    assert inner.dtype == dtype
    for token in range(num_tokens):
        wanted = torch.ones(90, device=triton_device)
        for number, expert in enumerate(chosen[token].tolist()):
            gate, up = (x[token].float() @ gate_up.matrix(expert).T).chunk(2)
            own = torch.nn.functional.silu(gate.clamp(max=1.5)) * up.clamp(-1.5, 1.5)
            assert (inner[token, number].float() - own).abs().max() <= (1e-5 if dtype == torch.float32 else 1e-2) * own.abs().max()
            wanted += shares[token, number] * (inner[token, number].float() @ down.matrix(expert).T)
        assert (found[token] - wanted).abs().max() <= (1e-5 if dtype == torch.float32 else 2e-3) * wanted.abs().max()


@pytest.mark.parametrize("by_token", [False, True])
def test_routes(by_token: bool, triton_device: str) -> None:
    """Scores from far below 0, whose shares are tiny, to far above; of equal ones the first is chosen."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.eye(11, device=triton_device)
    x = torch.randn(4, 11, generator=generator).mul(4).to(triton_device)
    x[1] = torch.linspace(-60, 40, 11)
    x[2, 3:7] = 9.0
    bias = None if by_token else torch.randn(11, generator=generator).to(triton_device)
    table = torch.rand(8, 11, generator=generator).argsort(-1)[:, :3].contiguous().to(triton_device) if by_token else None
    token_ids = torch.tensor([7, 0, 3, 3], device=triton_device)
    if bias is not None:
        bias[3:7] = 0.5
    router = Router(weight, bias, table, 3, 1.5)
    wanted, wanted_shares = router(x, token_ids)
    chosen, shares = route_by_softplus(x, bias, table, token_ids, 3, 1.5)
    for token in range(4):
        assert sorted(chosen[token].tolist()) == (sorted(wanted[token].tolist()) if token != 2 or by_token else [3, 4, 5])
        found = dict(zip(chosen[token].tolist(), shares[token].tolist(), strict=True))
        for expert, share in zip(wanted[token].tolist(), wanted_shares[token].tolist(), strict=True):
            if expert in found:
                assert found[expert] == pytest.approx(share, rel=1e-4)


def test_clamped_gate(triton_device: str) -> None:
    x = torch.randn(3, 2 * 70).mul(4).to(triton_device)
    assert torch.allclose(clamped_gate(x, 2.5), ClampedSwiGLU(2.5)(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rows", [24, 128])
def test_clamped_gated_row(rows: int, triton_device: str) -> None:
    """Gate and up rows that share a block of scales, and such that do not."""
    values = torch.randn(2 * rows, 64).to(triton_device).to(torch.float8_e4m3fn)
    weight = Fp8Weight(values, torch.rand(-(-2 * rows // 128), 1).to(triton_device) + 0.5, (128, 128))
    x = torch.randn(1, 64).to(triton_device)
    wanted = ClampedSwiGLU(2.5)(linear_reference(x, weight))
    assert (clamped_gated_row(x, weight, 2.5) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
