"""The sampler against a plain numpy reference: exact where it can be, by chi-square where it draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.sampler import gumbel, sample

DRAWS = 2000


def request(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> EngineRequest:
    return EngineRequest("r", (1,), 1, temperature, top_p, top_k, seed)


def reference(logits: np.ndarray, temperature: float, top_p: float, top_k: int) -> np.ndarray:
    """Probabilities [vocab_size] float64 of one row: temperature, then the top_k largest, then the smallest set with mass top_p."""
    order = np.argsort(-logits, kind="stable")
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    probs = np.exp(scaled)
    if top_k > 0:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    kept, mass = 0, 0.0
    while mass < top_p and kept < len(probs):
        mass += probs[order[kept]]
        kept += 1
    if top_p < 1:
        probs[order[kept:]] = 0
    return probs / probs.sum()


def counts(logits: torch.Tensor, one: EngineRequest, draws: int = DRAWS) -> np.ndarray:
    """How often each id is drawn in draws 0, 1, 2, ... of one row's stream."""
    ids = sample(logits.expand(draws, -1), [one] * draws, range(draws))
    return np.bincount([token_id for token_id in ids if token_id is not None], minlength=logits.shape[0])


def assert_distribution(found: np.ndarray, probs: np.ndarray) -> None:
    """Chi-square below its mean by six standard deviations, over ids expected five times or more; ids of probability 0 never occur."""
    assert found[probs == 0].sum() == 0, "an id outside the candidates was drawn"
    total = found.sum()
    expected = probs * total
    often = expected >= 5
    groups_found = np.append(found[often], found[~often].sum())
    groups_expected = np.append(expected[often], expected[~often].sum())
    used = groups_expected > 0
    chi_square = (((groups_found - groups_expected)[used]) ** 2 / groups_expected[used]).sum()
    freedom = max(1, int(used.sum()) - 1)
    assert chi_square < freedom + 6 * np.sqrt(2 * freedom) + 6, f"chi-square {chi_square:.1f} with {freedom} degrees of freedom"


def test_greedy_is_the_argmax() -> None:
    logits = torch.randn(64, 500)
    assert sample(logits, [request(temperature=0)] * 64, [0] * 64) == logits.argmax(-1).tolist()


@pytest.mark.parametrize("vocab_size", [2, 7, 64, 1000, 49152])
def test_ties_go_to_the_first_id(vocab_size: int) -> None:
    logits = torch.randint(0, 3, (20, vocab_size)).float()
    first = [row.index(max(row)) for row in logits.tolist()]
    assert sample(logits, [request(temperature=0)] * 20, [0] * 20) == first
    assert sample(logits, [request(temperature=0.7, top_k=1)] * 20, range(20)) == first, "top_k 1 is greedy, ties included"


def test_greedy_reads_nothing_else() -> None:
    logits = torch.randn(1, 50)
    best = logits.argmax().item()
    for top_p, top_k, seed in [(0.1, 3, 5), (1.0, 0, 9), (0.9, 50, 2**63 - 1)]:
        assert sample(logits, [request(0.0, top_p, top_k, seed)], [3]) == [best]


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, 0),
        (0.5, 1.0, 0),
        (2.5, 1.0, 0),
        (1.0, 1.0, 5),
        (1.0, 1.0, 19),
        (1.0, 1.0, 20),
        (1.0, 1.0, 1000),
        (1.0, 0.9, 0),
        (1.0, 0.5, 0),
        (0.7, 0.3, 0),
        (1.0, 0.8, 6),
        (1.7, 0.95, 12),
        (1.0, 0.8, 1000),
        (100.0, 1.0, 0),
        (100.0, 0.5, 0),
    ],
)
def test_draws_follow_the_reference(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3)) * 2
    probs = reference(logits.numpy(), temperature, top_p, top_k)
    assert_distribution(counts(logits, request(temperature, top_p, top_k, seed=11)), probs)


def test_the_check_itself_notices_another_distribution() -> None:
    logits = torch.randn(20, generator=torch.Generator().manual_seed(3)) * 2
    with pytest.raises(AssertionError, match="chi-square"):
        assert_distribution(counts(logits, request(1.2, seed=11)), reference(logits.numpy(), 1.0, 1.0, 0))


def test_top_k_comes_before_top_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two largest, the first has 4/7 > 0.55 of the mass: it is alone. Before top-k it had 0.4, and the second would join.
    assert counts(logits, request(1.0, 0.55, 2), 200).tolist() == [200, 0, 0, 0]
    assert counts(logits, request(1.0, 0.55, 0), 200)[1] > 0


def test_the_id_that_crosses_top_p_is_kept() -> None:
    found = counts(torch.tensor([0.5, 0.25, 0.125, 0.125]).log(), request(1.0, 0.6), 300)
    assert found[0] > 0
    assert found[1] > 0
    assert found[2:].sum() == 0


def test_a_tiny_top_p_is_greedy() -> None:
    logits = torch.randn(3000)
    for temperature in (0.3, 1.0, 100.0):
        assert counts(logits, request(temperature, 1e-9), 50)[logits.argmax()] == 50


def test_a_nucleus_larger_than_the_first_guess() -> None:
    logits = torch.randn(2000, generator=torch.Generator().manual_seed(5)) * 0.1
    probs = reference(logits.numpy(), 1.0, 0.9, 0)
    assert (probs > 0).sum() > 1000
    found = counts(logits, request(1.0, 0.9, seed=4))
    assert found[probs == 0].sum() == 0
    kept = np.flatnonzero(probs)
    groups = np.array_split(kept[np.argsort(-probs[kept])], 20)  # 100 draws a group
    assert_distribution(np.array([found[group].sum() for group in groups]), np.array([probs[group].sum() for group in groups]))
    assert found[kept[256:]].sum() > 0


def test_the_nucleus_search_agrees_at_its_border() -> None:
    logits = -torch.arange(1000) * 1e-3  # no two are equal: which of two equal ones is kept is not defined
    logits[:256] += 10.0  # the guess holds almost all of the mass, and then a little less than is asked for
    for top_p in (0.5, 0.97, 0.9999999):
        probs = reference(logits.numpy(), 1.0, top_p, 0)
        assert counts(logits, request(1.0, top_p), 400)[probs == 0].sum() == 0


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-300, 5e-324])
@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 4), (0.9, 4)])
def test_a_very_small_temperature_is_greedy(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(5, 300) * 30
    ids = sample(logits, [request(temperature, top_p, top_k)] * 5, range(5))
    assert ids == logits.argmax(-1).tolist()


@pytest.mark.parametrize("temperature", [100.0, 1e30, 1.7e308])
def test_a_very_large_temperature_is_uniform(temperature: float) -> None:
    logits = torch.randn(10) * 0.01
    assert_distribution(counts(logits, request(temperature, seed=2)), np.full(10, 0.1))


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.9, 0), (1.0, 4)])
def test_large_logits_do_not_overflow(top_p: float, top_k: int) -> None:
    logits = torch.full((1, 300), -3e38)
    logits[0, 7] = 3e38
    assert sample(logits, [request(0.01, top_p, top_k)], [0]) == [7]


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.99, 0), (1.0, 290), (0.99, 290)])
def test_ids_of_minus_infinity_are_never_drawn(top_p: float, top_k: int) -> None:
    logits = torch.full((300,), float("-inf"))
    logits[[3, 100, 299]] = torch.tensor([1.0, 2.0, 1.5])
    found = counts(logits, request(5.0, top_p, top_k), 500)
    assert sorted(np.flatnonzero(found)) == [3, 100, 299]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_is_none_and_alone(value: float, temperature: float) -> None:
    logits = torch.randn(3, 400)
    requests = [request(temperature, seed=seed) for seed in range(3)]
    before = sample(logits, requests, [0, 1, 2])
    logits[1, 123] = value
    assert sample(logits, requests, [0, 1, 2]) == [before[0], None, before[2]]


def test_a_row_of_minus_infinity_is_none() -> None:
    assert sample(torch.full((1, 10), float("-inf")), [request(0.0)], [0]) == [None]


def test_the_rest_of_the_batch_changes_nothing() -> None:
    logits = torch.randn(6, 1000) * 3
    requests = [request(0.9, 0.9, 0, 1), request(1.0, 1.0, 40, 2), request(0.0), request(1.3, 1.0, 0, 3), request(0.7, 0.95, 20, 4), request(1.0, 0.999, 0, 5)]
    draws = [5, 0, 3, 17, 2, 1]
    together = sample(logits, requests, draws)
    order = [3, 5, 0, 4, 2, 1]
    shuffled = sample(logits[order], [requests[row] for row in order], [draws[row] for row in order])
    assert [shuffled[order.index(row)] for row in range(6)] == together
    for row in range(6):
        assert sample(logits[row : row + 1], [requests[row]], [draws[row]]) == [together[row]]


def test_a_seed_reproduces_and_another_differs() -> None:
    logits = torch.zeros(30, 5000)
    streams = [sample(logits, [request(seed=seed)] * 30, range(30)) for seed in (1, 1, 2)]
    assert streams[0] == streams[1]
    assert streams[0] != streams[2]
    assert len(set(streams[0])) > 25, "the draws of one stream differ"


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1])
def test_noise_is_gumbels(seed: int) -> None:
    noise = np.stack([gumbel(seed, draw, np.arange(100)) for draw in range(200)])
    even = np.exp(-np.exp(-noise))  # its distribution function makes it even in (0, 1)
    assert np.isfinite(noise).all()
    assert len(np.unique(noise)) == noise.size
    assert abs(even.mean() - 0.5) < 6 / np.sqrt(12 * even.size)
    assert_distribution(np.histogram(even, 50, (0, 1))[0], np.full(50, 0.02))
    for one, other in ((even[:-1], even[1:]), (even[:, :-1], even[:, 1:])):
        assert abs(np.corrcoef(one.ravel(), other.ravel())[0, 1]) < 6 / np.sqrt(one.size)


def test_neighbouring_seeds_are_not_related() -> None:
    one, two = (np.stack([gumbel(seed, draw, np.arange(10)) for draw in range(200)]) for seed in (41, 42))
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 6 / np.sqrt(one.size)
    assert not np.isin(one[1:], two).any()


def test_noise_of_an_id_is_its_own() -> None:
    assert gumbel(5, 3, np.array([7, 9, 200])).tolist() == gumbel(5, 3, np.arange(300))[[7, 9, 200]].tolist()


@pytest.mark.parametrize("spread", [0.05, 3.0])
def test_draws_beyond_the_candidates_follow_the_reference(spread: float) -> None:
    logits = torch.randn(3000, generator=torch.Generator().manual_seed(5)) * spread
    probs = reference(logits.numpy(), 1.0, 1.0, 0)
    order = np.argsort(-probs)
    groups = [order[:64], order[64:256], *np.array_split(order[256:], 10)]
    found = counts(logits, request(seed=8))
    assert_distribution(np.array([found[group].sum() for group in groups]), np.array([probs[group].sum() for group in groups]))


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.95, 0), (1.0, 40)])
def test_the_last_digits_of_logits_hardly_ever_change_a_draw(top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2000, 5000, generator=generator) * 3
    moved = logits + torch.randn(logits.shape, generator=generator) * 1e-3
    requests = [request(1.0, top_p, top_k, seed=3)] * 2000
    before, after = (sample(rows, requests, range(2000)) for rows in (logits, moved))
    assert sum(one != other for one, other in zip(before, after, strict=True)) < 20
