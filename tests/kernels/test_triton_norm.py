"""RMS norms and gated activations on the GPU against torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels.activation import gated_activation, gated_activation_reference
from pocketllm.torch_engine.kernels.norm import add_rms_norm, add_rms_norm_reference, rms_norm, rms_norm_reference

TOLERANCES = {torch.float32: (1e-5, 1e-6), torch.float16: (2e-3, 1e-4), torch.bfloat16: (1.6e-2, 1e-3)}
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def skip_what_the_gpu_lacks(triton_device: str, request: pytest.FixtureRequest) -> None:
    wanted = request.node.callspec.params.values() if hasattr(request.node, "callspec") else ()
    if torch.bfloat16 in wanted and triton_device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16")


def check(found: torch.Tensor, wanted: torch.Tensor) -> None:
    assert found.dtype == wanted.dtype
    rtol, atol = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.float(), wanted.float(), rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (3, 100), (5, 1000), (0, 64)], ids=str)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, triton_device: str) -> None:
    wide = 5 * torch.randn(shape[0], shape[1] + 9, device=triton_device)
    x, weight = wide[:, 4:-5], torch.rand(shape[1], device=triton_device) + 0.5
    check(rms_norm(x, weight, 1e-5, dtype), rms_norm_reference(x, weight, 1e-5, dtype))


def test_the_norm_of_small_rows_is_ruled_by_eps(triton_device: str) -> None:
    x, weight = 1e-4 * torch.randn(2, 64, device=triton_device), torch.ones(64, device=triton_device)
    check(rms_norm(x, weight, 1e-2, torch.float32), rms_norm_reference(x, weight, 1e-2, torch.float32))
    assert bool((rms_norm(torch.zeros_like(x), weight, 1e-6, torch.float32) == 0).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 64), (4, 100)], ids=str)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, triton_device: str) -> None:
    hidden, weight = torch.randn(*shape, device=triton_device), torch.rand(shape[1], device=triton_device)
    delta = torch.randn(shape[0], 2 * shape[1], device=triton_device).to(dtype)[:, 3 : 3 + shape[1]]
    sum_wanted = hidden.clone()
    wanted = add_rms_norm_reference(sum_wanted, delta, weight, 1e-6, dtype)
    check(add_rms_norm(hidden, delta, weight, 1e-6, dtype), wanted)
    assert torch.equal(hidden, sum_wanted)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "size"), [(1, 64), (3, 100), (2, 2500), (0, 8)])
def test_gated_activation(rows: int, size: int, dtype: torch.dtype, activation: str, triton_device: str) -> None:
    x = (4 * torch.randn(rows, 2 * size + 5, device=triton_device)).to(dtype)[:, 2:-3]
    check(gated_activation(x, activation), gated_activation_reference(x, activation))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_large_gates_neither_overflow_nor_leak(activation: str, triton_device: str) -> None:
    gate = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1e4]], device=triton_device)
    found = gated_activation(torch.cat([gate, torch.ones_like(gate)], dim=1), activation)
    assert found.tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]
