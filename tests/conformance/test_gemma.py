"""Gemma 3 270M from its own GGUF (Q5_0, Q4_K, Q6_K, Q8_0; SentencePiece; local and global layers) against ids that llama.cpp gave."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.tokenizer import load_tokenizer
from tests.conformance.gemma_file import GREEDY, NEW_TOKENS, GemmaUnavailableError, fetch_gemma
from tests.conformance.test_greedy import alone, opened, staggered

RECORDED: dict[str, list[dict[str, Any]]] = json.loads(GREEDY.read_text(encoding="utf-8"))
CASES = RECORDED["cases"]
PROMPTS = [case["prompt_ids"] for case in CASES]
EXPECTED = [case["ids"] for case in CASES]


@pytest.fixture(scope="module")
def gemma() -> Path:
    try:
        return fetch_gemma()
    except GemmaUnavailableError as error:
        pytest.skip(str(error))


def test_the_recorded_answers_are_what_the_tests_take_them_for() -> None:
    assert len(CASES) == 10
    assert {len(ids) for ids in EXPECTED} == {NEW_TOKENS}
    assert max(map(len, PROMPTS)) > 512  # beyond the local layers' window
    assert min(case["least_lead"] for case in CASES) >= 1


def test_texts_have_the_ids_that_llama_cpp_gives_them(gemma: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(gemma))
    texts = [(row["text"], row["ids"]) for row in RECORDED["tokenized"]] + [(case["prompt"], case["prompt_ids"]) for case in CASES]
    assert len(texts) > 30
    for text, ids in texts:
        assert tokenizer.encode(text, add_special_tokens=True) == ids
        assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("compute", ["float32", "auto"])
def test_greedy_ids_are_llama_cpps(gemma: Path, compute: str) -> None:
    with opened(gemma, compute) as service:
        assert alone(service, PROMPTS) == EXPECTED


def test_greedy_ids_in_a_batch_with_chunked_prompts(gemma: Path) -> None:
    with opened(gemma, "auto", prefill_chunk_tokens=64, max_batch_size=8) as service:
        assert staggered(service, PROMPTS) == EXPECTED
