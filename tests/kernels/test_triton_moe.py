"""The grouped mixture of experts against the layer of the CPU and a plain loop."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.kernels.moe import GroupedConfig, choose_configs, mixture_of_experts, mixture_of_experts_reference, route, sort_by_expert
from pocketllm.torch_engine.layers.activation import silu_and_mul
from pocketllm.torch_engine.layers.feed_forward import GatedFeedForward, MixtureOfExperts
from pocketllm.torch_engine.layers.linear import Float32Linear

SMALL = GroupedConfig(16, 16, 32, 1, 2)


@pytest.fixture
def device(triton_device: str) -> str:
    return triton_device


def weights(E: int, N: int, K: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(E)
    router = torch.randn(E, K, generator=generator) * K**-0.5
    gate_up = torch.randn(E, 2 * N, K, generator=generator) * K**-0.5
    return router, gate_up.to(dtype), (torch.randn(E, K, N, generator=generator) * N**-0.5).to(dtype)


@pytest.mark.parametrize(
    ("T", "E", "N", "K", "top_k", "normalize"),
    [(1, 4, 32, 64, 2, True), (5, 8, 40, 72, 3, False), (50, 3, 24, 33, 2, True), (7, 6, 16, 16, 1, False), (3, 5, 16, 48, 5, True), (12, 33, 16, 32, 8, True)],
)
def test_it_is_the_layer_of_the_cpu(device: str, T: int, E: int, N: int, K: int, top_k: int, normalize: bool) -> None:
    x, parts = torch.randn(T, K), weights(E, N, K)
    experts = [GatedFeedForward(Float32Linear(gate_up), Float32Linear(down), silu_and_mul) for gate_up, down in zip(parts[1], parts[2], strict=True)]
    expected = MixtureOfExperts(parts[0], experts, top_k, normalize=normalize)(x)
    found = mixture_of_experts(
        x.to(device), *(part.to(device) for part in parts), top_k, normalize=normalize, activation="silu", configs=(SMALL, GroupedConfig(16, 32, 16, 1, 2))
    )
    assert found.dtype == x.dtype
    torch.testing.assert_close(found.cpu(), expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("dtype", "activation"), [(torch.float32, "gelu_tanh"), (torch.float16, "silu"), (torch.bfloat16, "gelu_tanh")], ids=str)
def test_dtypes_strides_and_a_residual(device: str, dtype: torch.dtype, activation: str) -> None:
    if device == "cuda" and dtype == torch.bfloat16 and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("this GPU has no bfloat16")
    x, parts = torch.randn(9, 100).to(dtype)[:, 20:84], weights(6, 48, 64, dtype)
    expected = mixture_of_experts_reference(x, *parts, 2, normalize=True, activation=activation)
    moved = [part.to(device) for part in parts]
    wide = torch.randn(9, 70)
    hidden = wide.to(device, copy=True)[:, :64]
    result = mixture_of_experts(x.to(device), *moved, 2, normalize=True, activation=activation)
    added = mixture_of_experts(x.to(device), *moved, 2, normalize=True, activation=activation, add_to=hidden)
    assert added is hidden
    tolerance = 2e-5 if dtype == torch.float32 else 2**-8 if dtype == torch.float16 else 2**-5
    torch.testing.assert_close(result.float().cpu(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(hidden.cpu(), wide[:, :64] + expected, rtol=tolerance, atol=tolerance)


def test_a_token_does_not_depend_on_the_others(device: str) -> None:
    x, parts = torch.randn(20, 32, device=device), [part.to(device) for part in weights(5, 16, 32)]
    together = mixture_of_experts(x, *parts, 2, normalize=True, activation="silu", configs=(SMALL, SMALL))
    for rows in (slice(3, 4), slice(7, 20)):
        alone = mixture_of_experts(x[rows], *parts, 2, normalize=True, activation="silu", configs=(SMALL, SMALL))
        torch.testing.assert_close(alone, together[rows], rtol=1e-5, atol=1e-6)  # the router's product may round by its shape


@pytest.mark.parametrize(("T", "E", "top_k", "block_m"), [(1, 1, 1, 16), (1, 128, 8, 16), (300, 5, 4, 32), (64, 40, 3, 16), (17, 4, 1, 128)])
def test_pairs_are_sorted_in_blocks_of_one_expert(device: str, T: int, E: int, top_k: int, block_m: int) -> None:
    chosen = torch.rand(T, E).argsort(dim=-1)[:, :top_k].int()
    chosen[: T // 2] = torch.arange(top_k, dtype=torch.int32)  # experts with many pairs beside such with none
    pairs, experts = sort_by_expert(chosen.contiguous().to(device), E, block_m)
    flat, found = chosen.flatten().tolist(), {expert: [] for expert in range(E)}
    used = [block for block, expert in enumerate(experts.tolist()) if expert >= 0]
    assert used == list(range(len(used)))
    for block in used:
        found[int(experts[block])] += pairs[block * block_m : (block + 1) * block_m].tolist()
    for expert in range(E):
        own = [pair for pair, one in enumerate(flat) if one == expert]
        assert found[expert] == own + [len(flat)] * (-len(own) % block_m)


def test_routing_takes_the_first_of_equals(device: str) -> None:
    scores = torch.tensor([[0.0, 2.0, 2.0, -1.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0], [float("nan")] * 5, [1e4, -1e4, 0.0, float("-inf"), 9e3]])
    shares, chosen = route(scores.to(device), 2, normalize=False)
    assert chosen[[0, 1, 3]].tolist() == [[1, 2], [0, 1], [0, 4]]
    assert ((chosen >= 0) & (chosen < 5)).all()
    torch.testing.assert_close(shares[[0, 1, 3]].cpu(), scores.softmax(-1)[[0, 1, 3]].gather(1, chosen[[0, 1, 3]].long().cpu()))
    assert route(scores[:2].to(device), 5, normalize=True)[0].sum(-1).tolist() == pytest.approx([1.0, 1.0])


def test_tiles_grow_with_the_tokens_of_an_expert() -> None:
    sizes = [choose_configs(num_tokens, 128, 8, 2)[0].block_m for num_tokens in (1, 64, 128, 512, 1024, 8192)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 16
    assert sizes[-1] == 128
