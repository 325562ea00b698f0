"""What benchmarks/random_checkpoint.py writes is a checkpoint: it loads, answers as transformers does, and its tokenizer spells prompts of any length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.tokenizer import load_tokenizer
from tests.gpu.door import ask, check, opened
from tests.models import plain_torch  # noqa: F401  # before transformers builds a model
from tests.models.tiny import PROMPTS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # its programs import each other by file name

from random_checkpoint import SHAPES, write_random_checkpoint


@pytest.mark.parametrize("weights", ["bf16", "fp8"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-qwen3"])
def test_weights(shape: str, weights: str, tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, SHAPES[shape], weights, "cpu")
    with opened(tmp_path, "cpu", max_model_len=256) as backend:
        answers = ask(backend, PROMPTS, 8)
    assert len({tuple(answer.ids) for answer in answers}) == len(PROMPTS)
    if weights == "bf16":  # transformers reads FP8 on a GPU alone
        check(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), PROMPTS, answers, 8)


def test_tokenizer(tmp_path: Path) -> None:
    write_random_checkpoint(tmp_path, SHAPES["tiny"], "bf16", "cpu")
    checkpoint = open_checkpoint(tmp_path)
    tokenizer = load_tokenizer(checkpoint, None)
    assert tokenizer.vocab_size == checkpoint.config["vocab_size"]
    assert len(tokenizer.encode("a" * 77, add_special_tokens=True)) == 77
    assert tokenizer.decode(range(256, 259)) == "aaaaaaabaaac"
    assert checkpoint.generation_defaults.eos_token_ids == ()
