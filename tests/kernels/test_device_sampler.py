"""What the rows of a step ask for, on its way to the device and back; and log probabilities there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.device_sampler import NOT_FINITE, NOTHING_ALLOWED, DeviceSampler
from pocketllm.torch_engine.kernels.logprobs import device_logprobs
from pocketllm.torch_engine.kernels.sampler import LastIds, sample_tokens
from pocketllm.torch_engine.logprobs import LOWEST, rank
from pocketllm.torch_engine.sampler import sample


@pytest.fixture
def device(triton_device: str) -> torch.device:
    return torch.device(triton_device)


def request(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0, logprobs: int | None = None) -> EngineRequest:
    return EngineRequest("r", (1,), 1, temperature, top_p, top_k, seed, logprobs=logprobs)


@pytest.mark.parametrize(("vocab_size", "chunk"), [(700, 256), (5, 16), (64, 64), (300, 4)])
@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_log_probabilities_are_those_of_the_cpu(device: torch.device, vocab_size: int, chunk: int, num_top: int) -> None:
    logits = torch.randn(3, vocab_size) * 4
    logits[1] = torch.randint(0, 3, (vocab_size,)).float() * -0.5  # ties, of both zeros too
    logits[2, 2:] = float("-inf")
    ids = torch.tensor([vocab_size - 1, 0, 4])
    logprobs, top_ids, top = device_logprobs(logits.to(device), ids.to(device), num_top, chunk=chunk)
    for row in range(3):
        expected = rank(logits[row], int(ids[row]), num_top)
        assert float(logprobs[row]) == pytest.approx(expected.logprob, abs=2e-6)
        assert top_ids[row].tolist() == [token_id for token_id, _logprob in expected.top]
        assert top[row].tolist() == pytest.approx([logprob for _token_id, logprob in expected.top], abs=2e-6)
    assert float(logprobs[2]) == LOWEST


def test_some_rows_are_ranked(device: torch.device) -> None:
    logits, ids, rows = torch.randn(5, 300, device=device), torch.arange(5, device=device), torch.tensor([4, 1], device=device)
    some = device_logprobs(logits, ids, 3, rows, chunk=128)
    for part, every in zip(some, device_logprobs(logits, ids, 3, chunk=128), strict=True):
        assert torch.equal(part, every[rows])


def test_steps_follow_each_other(device: torch.device) -> None:
    """More steps than there are stages, of other rows each, and nothing of a step stays for the next."""
    sampler = DeviceSampler(6, 200, device)
    generator = torch.Generator().manual_seed(4)
    for step in range(5):
        count = (3, 6, 1, 2, 4)[step]
        logits = torch.randn(count, 200, generator=generator)
        requests = [request(0.0 if (row + step) % 3 == 0 else 0.8, 0.9, 30, seed=row, logprobs=None if row % 2 else row) for row in range(count)]
        masks = {row: np.full(7, 0x0F0F0F0F, np.uint32) for row in range(count) if (row + step) % 2}
        sampler.prepare(requests, [step] * count, masks)
        drawn = sampler.draw(logits.to(device))
        ids, status = drawn.wait()
        assert ids == drawn.ids.tolist()
        assert status == [0] * count
        assert ids == sample(logits, requests, [step] * count, masks)
        for row, asked in enumerate(requests):
            if asked.logprobs is not None:
                found, expected = drawn.logprobs(row, asked.logprobs), rank(logits[row], ids[row], asked.logprobs)
                assert found.logprob == pytest.approx(expected.logprob, abs=2e-6)
                assert [token_id for token_id, _logprob in found.top] == [token_id for token_id, _logprob in expected.top]


def test_rows_that_draw_nothing_say_why(device: torch.device) -> None:
    sampler = DeviceSampler(3, 100, device)
    logits = torch.randn(3, 100)
    logits[0, 5] = float("nan")
    sampler.prepare([request(0.0), request(1e308, seed=3), request()], [0, 0, 0], {2: np.zeros(4, np.uint32)})
    ids, status = sampler.draw(logits.to(device)).wait()
    assert status == [NOT_FINITE, 0, NOTHING_ALLOWED]
    assert ids[0] == ids[2] == 0


def test_ids_are_kept_by_slot_and_greedy_steps_follow_any_other(device: torch.device) -> None:
    """Of a greedy step after a greedy one nothing is sent to the device."""
    sampler = DeviceSampler(3, 100, device)
    keep = LastIds(torch.full((4,), -1, dtype=torch.int64, device=device), torch.tensor([2, 0], device=device))
    generator = torch.Generator().manual_seed(5)
    for step, heat in enumerate((0.0, 0.0, 1.0, 0.0, 0.0, 0.7)):
        logits = torch.randn(2, 100, generator=generator)
        requests = [request(heat, seed=row) for row in range(2)]
        sampler.prepare(requests, [step] * 2)
        ids, _status = sampler.draw(logits.to(device), keep).wait()
        assert ids == sample(logits, requests, [step] * 2, {})
        assert keep.ids.tolist() == [ids[1], -1, ids[0], -1]


def test_a_graph_of_more_rows_reads_the_same_tensors(device: torch.device) -> None:
    """Rows after those of the step are greedy, whatever they were in the step before."""
    sampler = DeviceSampler(4, 100, device)
    tensors = sampler.tensors()
    logits = torch.randn(4, 100)
    sampler.prepare([request(seed=row, top_k=5) for row in range(4)], [1] * 4, {3: np.full(4, 1, np.uint32)})
    sampler.prepare([request(seed=9, top_k=5)], [7])
    ids, _status = sample_tokens(logits.to(device), tensors).unbind(1)
    assert ids.tolist() == [*sample(logits[:1], [request(seed=9, top_k=5)], [7]), *logits[1:].argmax(-1).tolist()]
