"""Draws of many rows on the device against the float64 reference and the CPU's sampler: exact but for float32 rounding."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed: pip install triton")

import triton
import triton.language as tl

from pocketllm.backends.base import EngineRequest
from pocketllm.splitmix import splitmix64
from pocketllm.torch_engine.kernels import sampler
from pocketllm.torch_engine.kernels.sampler import NOT_FINITE, NOTHING_ALLOWED, SamplingTensors, sample_reference, sample_tokens
from pocketllm.torch_engine.sampler import gumbel, sample

TILE = 256  # of the small vocabularies here; several a row


@pytest.fixture
def device(triton_device: str) -> str:
    return triton_device


def tensors(device: str, rows: list[tuple[float, int, float, int, int]], masks: dict[int, np.ndarray] | None = None) -> SamplingTensors:
    """From (temperature, top_k, top_p, seed, draw) of each row, and masks by row."""
    columns = list(zip(*rows, strict=True))
    made = [torch.tensor(column, dtype=dtype, device=device) for column, dtype in zip(columns, (torch.float32, torch.int32, torch.float32), strict=False)]
    made += [torch.tensor(column, dtype=torch.int64, device=device) for column in columns[3:]]
    if not masks:
        return SamplingTensors(*made)
    lines = torch.full((len(rows),), -1, dtype=torch.int32)
    for line, row in enumerate(masks):
        lines[row] = line
    words = torch.from_numpy(np.stack(list(masks.values())).view(np.int32))
    return SamplingTensors(*made, words.to(device), lines.to(device))


def mask_of(allowed: np.ndarray) -> np.ndarray:
    """Words of bits from [vocab_size] bool."""
    padded = np.zeros(-(-len(allowed) // 32) * 32, bool)
    padded[: len(allowed)] = allowed
    return np.packbits(padded, bitorder="little").view(np.uint32)


def drawn(logits: torch.Tensor, how: SamplingTensors, **options: Any) -> tuple[list[int], list[int]]:
    ids, status = sample_tokens(logits, how, **{"tile": TILE, **options}).unbind(1)
    assert ids.dtype == status.dtype == torch.int64
    return ids.tolist(), status.tolist()


def random_rows(count: int, generator: np.random.Generator) -> list[tuple[float, int, float, int, int]]:
    return [
        (
            float(np.float32(generator.choice([0.3, 0.7, 1.0, 1.5, 20.0]))),
            int(generator.choice([0, 0, 2, 5, 40, 300, 5000])),
            float(np.float32(generator.choice([1.0, 1.0, 0.05, 0.5, 0.9, 0.99, 0.999999]))),
            int(generator.integers(0, 2**62)),
            int(generator.integers(0, 1000)),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("vocab_size", [1, 5, 32, 255, 256, 257, 1000])
def test_greedy_is_the_first_of_the_largest(device: str, vocab_size: int) -> None:
    logits = torch.randint(0, 3, (5, vocab_size)).float()
    logits[3] = torch.randn(vocab_size)
    first = [row.index(max(row)) for row in logits.tolist()]
    assert drawn(logits.to(device), tensors(device, [(0.0, 0, 1.0, 1, 1)] * 5)) == (first, [0] * 5)
    assert drawn(logits.to(device), tensors(device, [(0.8, 1, 1.0, 1, 1)] * 5), has_cuts=False) == (first, [0] * 5), "top_k 1 is greedy, ties included"
    assert drawn(logits.to(device), tensors(device, [(0.0, 7, 0.1, 1, 1)] * 5), chunk=2 * TILE)[0] == first, "greedy reads nothing else"
    assert drawn(logits.to(device), tensors(device, [(1e-30, 0, 0.5, 1, 1)] * 5))[0] == first, "so cold is greedy"


@pytest.mark.parametrize("list_size", [8192, 32])
@pytest.mark.parametrize("spread", [0.02, 3.0])
def test_random_rows_draw_what_the_reference_draws(device: str, spread: float, list_size: int) -> None:
    generator = np.random.default_rng(int(spread * 100) + list_size)
    count = 5 if device == "cpu" else 200
    rows = random_rows(count, generator)
    logits = torch.from_numpy((generator.standard_normal((count, 900)) * spread).astype(np.float32))
    expected = [sample_reference(line.numpy(), *row[:3], *row[3:])[0] for line, row in zip(logits, rows, strict=True)]
    assert drawn(logits.to(device), tensors(device, rows), list_size=list_size) == (expected, [0] * count)


def test_cut_draws_are_those_of_the_cpu(device: str) -> None:
    """Draws from all ids are not: there the CPU's sampler lets the ids beyond 256 share one noise."""
    generator = np.random.default_rng(5)
    rows = [row for row in random_rows(40, generator) if 0 < row[1] < 700 or row[2] < 1][: 6 if device == "cpu" else 40]
    rows += [(0.0, 0, 1.0, 1, 1), (1.0, 1, 0.5, 1, 1)]
    logits = torch.from_numpy((generator.standard_normal((len(rows), 700)) * 2).astype(np.float32))
    requests = [EngineRequest("r", (1,), 1, temperature, top_p, top_k, seed) for temperature, top_k, top_p, seed, _draw in rows]
    assert drawn(logits.to(device), tensors(device, rows))[0] == sample(logits, requests, [row[4] for row in rows])


@pytest.mark.parametrize(
    ("top_k", "top_p", "list_size"),
    [
        (top_k, top_p, list_size)
        for top_k, top_p in ((7, 1.0), (300, 1.0), (0, 0.02), (0, 0.5), (40, 0.7), (450, 0.6))
        for list_size in (512, 16)
        if torch.cuda.is_available() or (list_size == 16) == (top_k in (0, 300, 450))  # a list that is long enough, or one that is mostly too short
    ],
)
def test_the_kept_set_is_exact(device: str, top_k: int, top_p: float, list_size: int) -> None:
    """A draw at which the last kept id wins finds a set that lacks it; one at which the first id after it would win finds a set that has it."""
    logits = torch.randn(500, generator=torch.Generator().manual_seed(top_k)) * 0.1  # flat, so that both are common
    order = np.argsort(-logits.numpy(), kind="stable")
    kept = sample_reference(logits.numpy(), 1.0, top_k, top_p, 0, 0)[1]
    assert kept.tolist() == order[: len(kept)].tolist()
    more = order[: len(kept) + 1]
    winners = [int(more[(logits.numpy()[more] + gumbel(1, draw, more)).argmax()]) for draw in range(20 * len(more))]
    draws = [winners.index(more[-2]), winners.index(more[-1])]
    rows = [(1.0, top_k, top_p, 1, draw) for draw in draws]
    ids, _status = drawn(logits.expand(2, -1).contiguous().to(device), tensors(device, rows), list_size=list_size)
    assert ids == [sample_reference(logits.numpy(), *row)[0] for row in rows]
    assert ids[0] == kept[-1]
    assert ids[1] in kept


@pytest.mark.parametrize("list_size", [1024, 16])
def test_of_equal_logits_the_lower_ids_are_kept(device: str, list_size: int) -> None:
    logits = torch.zeros(6, 600)
    logits[3:] = torch.randint(-2, 2, (3, 600)).float() * torch.tensor([1.0, -0.0, 1.0]).view(3, 1)
    rows = [(1.0, 10, 1.0, 1, 0), (1.0, 0, 0.1, 2, 0), (1.0, 400, 0.5, 3, 0), (1.0, 100, 1.0, 4, 0), (1.0, 50, 0.5, 5, 0), (1.0, 0, 0.3, 6, 0)]
    expected = [sample_reference(line.numpy() + 0.0, *row)[0] for line, row in zip(logits, rows, strict=True)]
    assert drawn(logits.to(device), tensors(device, rows), list_size=list_size)[0] == expected
    assert expected[0] < 10
    assert expected[1] < 61


@pytest.mark.parametrize("has_masks", [False, True])
def test_each_row_is_alone(device: str, has_masks: bool) -> None:
    """Any batch, order, tiling and list gives a row the same id."""
    generator = np.random.default_rng(8)
    rows = [*random_rows(6, generator), (0.0, 0, 1.0, 0, 0)]
    logits = torch.from_numpy((generator.standard_normal((7, 700)) * 2).astype(np.float32)).to(device)
    masks = {row: mask_of(generator.random(700) < 0.3) for row in (0, 2, 5, 6)} if has_masks else {}
    together = drawn(logits, tensors(device, rows, masks))[0]
    order = [3, 5, 0, 6, 4, 2, 1]
    shuffled = drawn(logits[order], tensors(device, [rows[row] for row in order], {order.index(row): mask for row, mask in masks.items()}), chunk=3 * TILE)[0]
    assert [shuffled[order.index(row)] for row in range(7)] == together
    for row in range(0, 7, 3):
        alone = tensors(device, rows[row : row + 1], {0: masks[row]} if row in masks else None)
        assert drawn(logits[row : row + 1], alone, tile=128, list_size=16)[0] == [together[row]]


def test_masks_come_before_the_cuts(device: str) -> None:
    generator = np.random.default_rng(9)
    rows = [(0.0, 0, 1.0, 1, 1), (1.0, 0, 1.0, 2, 2), (1.0, 20, 1.0, 3, 3), (0.7, 0, 0.8, 4, 4), (1.0, 20, 0.9, 5, 5), (1.0, 50, 1.0, 6, 6)]
    logits = (generator.standard_normal((6, 333)) * 2).astype(np.float32)
    allowed = generator.random((6, 333)) < 0.2
    allowed[5] = False
    allowed[5, [17, 320]] = True  # fewer than top_k
    masks = {row: mask_of(allowed[row]) for row in (0, 1, 2, 4, 5)}  # row 3 has none
    expected = [sample_reference(np.where(allowed[row] | (row == 3), logits[row], -np.inf), *rows[row])[0] for row in range(6)]
    assert drawn(torch.from_numpy(logits).to(device), tensors(device, rows, masks)) == (expected, [0] * 6)


def test_what_can_not_be_drawn_is_reported(device: str) -> None:
    logits = torch.randn(9, 400, generator=torch.Generator().manual_seed(1))
    logits[1, 123] = float("nan")
    logits[2, 399] = float("inf")
    logits[3] = float("-inf")
    logits[6, 0] = float("nan")
    logits[8, :399] = float("-inf")
    rows = [(1.0, 0, 1.0, 0, 0), (0.0, 0, 1.0, 0, 0), (1.0, 0, 0.9, 0, 0), (1.0, 5, 1.0, 0, 0), (0.0, 0, 1.0, 0, 0), (1.0, 0, 0.9, 0, 0)]
    rows += [(1.0, 0, 1.0, 0, 0), (0.0, 0, 1.0, 0, 0), (9.0, 6, 0.9, 0, 0)]
    nothing = np.zeros(13, np.uint32)
    ids, status = drawn(logits.to(device), tensors(device, rows, {4: nothing, 5: nothing, 6: nothing}))
    assert status == [0, NOT_FINITE, NOT_FINITE, NOT_FINITE, NOTHING_ALLOWED, NOTHING_ALLOWED, NOT_FINITE, 0, 0]
    assert ids[1:7] == [0] * 6, "an id that the next step's embedding has"
    assert ids[7] == logits[7].argmax()
    assert ids[8] == 399
    alone = tensors(device, rows[:1])
    assert drawn(logits[:1].to(device), alone)[0] == ids[:1]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (0, 0.9), (4, 1.0), (290, 0.99)])
def test_extreme_logits_and_temperatures(device: str, top_k: int, top_p: float) -> None:
    logits = torch.full((4, 300), -3e38)
    logits[0, 7] = 3e38
    logits[1] = torch.randn(300) * 30
    logits[2] = torch.randn(300)
    logits[2, 5:] = float("-inf")
    logits[3] = torch.randn(300)
    rows = [(temperature, top_k, top_p, seed, 0) for seed, temperature in enumerate((0.01, 1e-6, 1e30, 1e30))]
    with np.errstate(over="ignore"):  # the interpreter is numpy
        ids, status = drawn(logits.to(device), tensors(device, rows))
    assert status == [0] * 4
    assert ids[:2] == [7, logits[1].argmax()]
    assert ids[2] < 5
    assert ids[3] == sample_reference(logits[3].numpy(), *rows[3])[0]


def test_logits_may_be_a_view(device: str) -> None:
    logits = torch.randn(3, 400, device=device)
    rows = [(0.0, 0, 1.0, 0, 0), (1.0, 9, 1.0, 1, 0), (1.0, 0, 1.0, 2, 0)]
    before = logits.clone()
    assert drawn(logits[:, 10:310], tensors(device, rows)) == drawn(logits[:, 10:310].contiguous(), tensors(device, rows))
    assert torch.equal(logits, before)


def test_draws_follow_the_distribution(device: str) -> None:
    """By chi-square over the probabilities of a softmax."""
    count = 50 if device == "cpu" else 20000
    logits = torch.randn(8, generator=torch.Generator().manual_seed(3))
    how = tensors(device, [(1.4, 0, 1.0, 17, draw) for draw in range(count)])
    found = np.bincount(drawn(logits.expand(count, 8).contiguous().to(device), how, has_cuts=False, tile=32)[0], minlength=8)
    expected = (logits.double() / 1.4).softmax(-1).numpy() * count
    chi_square = ((found - expected) ** 2 / expected).sum()
    assert chi_square < 7 + 6 * np.sqrt(14) + 6, f"chi-square {chi_square:.1f} with 7 degrees of freedom"


@triton.jit
def _noise_of(starts, out, SIZE: tl.constexpr):
    lane = tl.arange(0, SIZE)
    tl.store(out + lane, sampler._noise(tl.load(starts + lane).to(tl.uint64), lane))


def _start_of(number: int, token_id: int) -> int:
    """The start of a stream whose noise of `token_id` is made from the 53-bit `number`: SplitMix64 backwards."""
    word = number << 11
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9), (30, 1)):
        whole = word
        for _ in range(64 // shift):
            whole = word ^ whole >> shift
        word = whole * pow(factor, -1, 2**64) % 2**64
    return (word - (token_id + 2) * 0x9E3779B97F4A7C15) % 2**64


def test_the_noise_is_precise_in_both_tails(device: str) -> None:
    numbers = [0, 1, 2, 1000, 2**30, 2**51, 2**52 - 1, 2**52, 2**52 + 1, 2**53 - 2**50, 2**53 - 2**40, 2**53 - 2**20, 2**53 - 1000, 2**53 - 2, 2**53 - 1]
    numbers += [int(number) for number in np.random.default_rng(0).integers(0, 2**53, 49)]
    starts = np.array([_start_of(number, token_id) for token_id, number in enumerate(numbers)], np.uint64)
    assert (splitmix64(starts, np.arange(1, 65, dtype=np.uint64)) >> np.uint64(11)).tolist() == numbers
    out = torch.empty(64, dtype=torch.float32, device=device)
    _noise_of[(1,)](torch.from_numpy(starts.view(np.int64)).to(device), out, SIZE=64)
    low = np.array([(number + 0.5) * 2.0**-53 for number in numbers])
    high = np.array([(2**53 - 1 - number + 0.5) * 2.0**-53 for number in numbers])
    exact = np.where(low < 0.5, -np.log(-np.log(np.minimum(low, 0.5))), -np.log(-np.log1p(-np.minimum(high, 0.5))))
    np.testing.assert_allclose(out.cpu().numpy(), exact, rtol=1e-6, atol=1e-6)
    assert 37 < out.max() < 38
