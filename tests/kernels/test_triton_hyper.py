"""Hyper-connections on a GPU, against torch's."""

from __future__ import annotations

import pytest
import torch

from pocketllm.torch_engine.layers.device import Norm
from pocketllm.torch_engine.layers.hyper_connection import HyperConnection, HyperHead, HyperWeights, Lanes

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.torch_engine.layers.gpu_hyper import GpuHyperConnection, GpuHyperHead


def random_weights(count: int, scales: int, hidden: int, device: str, generator: torch.Generator) -> HyperWeights:
    matrix, base, scale = (torch.randn(*size, generator=generator).to(device) for size in ((count, 4 * hidden), (count,), (scales,)))
    return HyperWeights(matrix / (4 * hidden) ** 0.5, base, scale, 1e-6, 1e-4)


@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 64), (3, 80)])
def test_two_sites_and_the_head(num_tokens: int, hidden: int, triton_device: str) -> None:
    """80 is no multiple of the columns of a program."""
    generator = torch.Generator().manual_seed(num_tokens)
    weights = [random_weights(24, 3, hidden, triton_device, generator) for _ in range(2)]
    last = random_weights(4, 1, hidden, triton_device, generator)
    norm = Norm(torch.rand(hidden, generator=generator).to(triton_device) + 0.5, 1e-5)
    embedding = torch.randn(num_tokens, hidden, generator=generator).to(triton_device)
    outputs = [torch.randn(num_tokens, hidden, generator=generator).to(triton_device) for _ in range(2)]
    wanted = run(Lanes.of(embedding, 4), [HyperConnection(one, norm, torch.float32, 4, 7) for one in weights], HyperHead(last), outputs)
    found = run(Lanes.of(embedding, 4), [GpuHyperConnection(one, norm, torch.float32, 4, 7) for one in weights], GpuHyperHead(last), outputs)
    for one, other in zip(found, wanted, strict=True):
        assert one.shape == other.shape
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


def run(lanes: Lanes, sites: list[HyperConnection], head: HyperHead, outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = []
    for site, output in zip(sites, outputs, strict=True):
        found.append(site.gather(lanes))
        lanes.add(output)
    return [*found, head(lanes)]
