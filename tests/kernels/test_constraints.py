"""Constraints from the sampler to the whole torch plane; one with the grammar engine that the product uses."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from test_sampler import assert_distribution, reference
from tiny_backend import tiny_backend
from tiny_llama import tiny_tensors

from pocketllm.backends.base import EngineRequest
from pocketllm.errors import PocketLLMError
from pocketllm.torch_engine.sampler import sample
from tests.id_constraint import IdConstraint
from tests.row_listener import Listener, run

SAMPLINGS = [(0.0, 1.0, 0), (1.0, 1.0, 0), (1.0, 0.9, 0), (1.0, 1.0, 3), (0.8, 0.7, 4), (1.0, 1.0, 1)]


def mask_of(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    mask = np.zeros(-(-vocab_size // 32), np.uint32)
    IdConstraint(ids).fill(mask)
    return mask


def request(temperature: float, top_p: float, top_k: int, seed: int = 0) -> EngineRequest:
    return EngineRequest("r", (1,), 1, temperature, top_p, top_k, seed)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SAMPLINGS)
def test_draws_follow_the_distribution_over_the_allowed_ids(temperature: float, top_p: float, top_k: int) -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 2
    ids = [0, 3, 7, 8, 31, 32, 40, 49]
    draws, before = 1500, logits.clone()
    masks = dict.fromkeys(range(draws), mask_of(ids, 50))
    drawn = sample(logits.expand(draws, -1), [request(temperature, top_p, top_k, 11)] * draws, range(draws), masks)
    assert torch.equal(logits, before)
    assert set(drawn) <= set(ids)
    if temperature == 0 or top_k == 1:
        assert set(drawn) == {max(ids, key=lambda token_id: float(logits[token_id]))}
        return
    found = np.array([drawn.count(token_id) for token_id in ids])
    assert_distribution(found, reference(logits[ids].numpy(), temperature, top_p, top_k))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 50, 1000, 49152])
@pytest.mark.parametrize(("temperature", "top_p", "top_k"), SAMPLINGS)
def test_every_bit_is_its_own_id(vocab_size: int, temperature: float, top_p: float, top_k: int) -> None:
    ids = sorted({0, 1, 7, 8, 30, 31, 32, 33, vocab_size - 1, vocab_size // 2} & set(range(vocab_size)))
    logits = torch.randn(len(ids), vocab_size)
    masks = {row: mask_of([token_id], vocab_size) for row, token_id in enumerate(ids)}
    assert sample(logits, [request(temperature, top_p, top_k)] * len(ids), range(len(ids)), masks) == ids


def test_ties_among_allowed_ids_go_to_the_first() -> None:
    assert sample(torch.zeros(1, 100), [request(0.0, 1.0, 0)], [0], {0: mask_of([70, 41, 99], 100)}) == [41]


def test_bits_behind_the_vocabulary_allow_nothing() -> None:
    assert sample(torch.zeros(1, 40), [request(1.0, 1.0, 0)], [0], {0: np.array([0, 0xFFFFFF00], np.uint32)}) == [None]


def test_a_constrained_row_leaves_the_others_alone() -> None:
    logits = torch.randn(6, 1000) * 3
    requests = [request(*SAMPLINGS[row], seed=row) for row in range(6)]
    plain = sample(logits, requests, range(6))
    masks = {row: mask_of(range(row, 1000, 7), 1000) for row in (1, 4)}
    together = sample(logits, requests, range(6), masks)
    assert [together[row] for row in (0, 2, 3, 5)] == [plain[row] for row in (0, 2, 3, 5)]
    for row in (1, 4):
        assert together[row] in range(row, 1000, 7)
        assert sample(logits[row : row + 1], [requests[row]], [row], {0: masks[row]}) == [together[row]]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_forbidden_id_that_is_not_finite_still_fails_the_row(value: float) -> None:
    logits = torch.randn(2, 100)
    logits[1, 50] = value
    assert sample(logits, [request(1.0, 1.0, 0)] * 2, [0, 0], {0: mask_of([3], 100), 1: mask_of([3], 100)}) == [3, None]


def constrained(name: str, constraint: IdConstraint, place: int, **options: object) -> EngineRequest:
    temperature, top_p, top_k = SAMPLINGS[place % len(SAMPLINGS)]
    return EngineRequest(name, (place + 1, 2, 3), 12, temperature, top_p, top_k, place, constraint=constraint, **options)  # type: ignore[arg-type]


def odd_then_even(accepted: Sequence[int]) -> range:
    return range(1 - len(accepted) % 2, 50, 2)


def test_constrained_rows_draw_the_same_alone_and_in_mixed_batches(tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        alone = [run(backend, constrained("a", IdConstraint(odd_then_even), place))[0].token_ids for place in range(6)]
        plain = [run(backend, EngineRequest("a", (place + 1, 9), 12, 0.9, seed=place))[0].token_ids for place in range(4)]
        assert all([token_id % 2 for token_id in ids] == [1, 0] * 6 for ids in alone)
        answers = run(
            backend,
            *(constrained(f"c{place}", IdConstraint(odd_then_even), place, logprobs=place % 3 or None) for place in range(6)),
            *(EngineRequest(f"p{place}", (place + 1, 9), 12, 0.9, seed=place) for place in range(4)),
        )
    assert [answer.token_ids for answer in answers] == alone + plain


def test_a_mask_of_everything_changes_nothing(tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        for place, (temperature, top_p, top_k) in enumerate(SAMPLINGS):
            plain, free = (
                run(backend, EngineRequest("a", (4, 5), 10, temperature, top_p, top_k, place, constraint=constraint))[0].token_ids
                for constraint in (None, IdConstraint(range(50)))
            )
            assert plain == free


def test_where_nothing_is_allowed_the_row_fails_and_says_so(tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        stuck = IdConstraint(lambda accepted: [] if len(accepted) == 2 else [5, 6, 7])
        bad, good = run(backend, EngineRequest("bad", (1, 2), 9, logprobs=2, constraint=stuck), EngineRequest("good", (1, 2), 9))
    assert (bad.end().finish_reason, bad.token_ids) == ("error", stuck.accepted)
    assert isinstance(bad.end().error, PocketLLMError)
    assert "allows no token" in str(bad.end().error)
    assert good.end().finish_reason == "length"


def test_logits_that_are_not_finite_are_not_blamed_on_the_constraint(tmp_path: Path) -> None:
    tensors = tiny_tensors()
    tensors["model.embed_tokens.weight"][30] = math.nan
    with tiny_backend(tmp_path, tensors) as backend:
        bad, good = run(backend, EngineRequest("a", (30,), 3, constraint=IdConstraint([4])), EngineRequest("b", (1,), 3, constraint=IdConstraint([4])))
    assert "not finite" in str(bad.end().error)
    assert good.token_ids == [4, 4, 4]


class Grammar:
    """A regex over the letters of a tiny vocabulary, by llguidance."""

    LETTERS = tuple(bytes([byte]) for byte in b"abcdefghijklmnopqrstuvwxyz0123456789-")
    TOKENS = (*LETTERS, b"ab", b"cde", b"12", b"2024", b"-0", b"x-", b"yz9", b"", b"", b"", b"", b"", b"<end>")
    EOS = 49

    def __init__(self, regex: str) -> None:
        llguidance = pytest.importorskip("llguidance")
        tokens = self.TOKENS

        class Vocabulary:
            eos_token_id, bos_token_id = Grammar.EOS, None

            def __init__(self) -> None:
                self.tokens = list(tokens)
                self.special_token_ids = [Grammar.EOS]

            def __call__(self, text: str | bytes) -> list[int]:
                return [tokens.index(bytes([byte])) for byte in (text.encode() if isinstance(text, str) else text)]

        tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Vocabulary()))
        self.matcher = llguidance.LLMatcher(tokenizer, llguidance.LLMatcher.grammar_from_regex(regex))
        assert not self.matcher.is_error(), self.matcher.get_error()

    def fill(self, mask: npt.NDArray[np.uint32]) -> None:
        self.matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

    def accept(self, token_id: int) -> None:
        assert self.matcher.consume_token(token_id), self.matcher.get_error()

    @property
    def is_complete(self) -> bool:
        return self.matcher.is_stopped()

    @classmethod
    def text(cls, answer: Listener) -> str:
        return b"".join(cls.TOKENS[token_id] for token_id in answer.token_ids).decode()


@pytest.mark.parametrize("regex", [r"[a-f]{3}-[0-9]{4}", r"(ab|cde)+x-12", r"[a-z]{2,5}", r"2024-0[1-9]"])
def test_answers_match_a_regex(regex: str, tmp_path: Path) -> None:
    with tiny_backend(tmp_path) as backend:
        requests = [
            EngineRequest(str(place), (place + 1, 2), 50, temperature, top_p, top_k, place, frozenset([Grammar.EOS]), 2, Grammar(regex))
            for place, (temperature, top_p, top_k) in enumerate(SAMPLINGS)
        ]
        for answer in run(backend, *requests):
            assert answer.end().finish_reason in ("stop", "length")
            if answer.end().finish_reason == "stop":
                assert re.fullmatch(regex, Grammar.text(answer)), Grammar.text(answer)
            else:
                assert "+" in regex, "the others end by themselves"
