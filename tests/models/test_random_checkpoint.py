"""What benchmarks/random_checkpoint.py writes is a checkpoint: it loads, answers as transformers does, and its tokenizer spells prompts of any length."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pocketllm.bench.limits import token_costs
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


def test_deepseek_v4(tmp_path: Path) -> None:
    """Every kind of layer in the formats of the published checkpoints; and what a token costs of it."""
    shape = SHAPES["tiny-deepseek-v4"]
    write_random_checkpoint(tmp_path, shape, "fp4", "cpu")
    checkpoint = open_checkpoint(tmp_path)
    assert {tensor.type for tensor in checkpoint.tensors} == {"BF16", "F32", "I8", "F8_E4M3", "F8_E8M0", "I64"}
    prompts = [prompt for prompt in PROMPTS if len(prompt) < 100]
    with opened(tmp_path, "cpu", max_model_len=256) as backend:
        answers = ask(backend, prompts, 4)
    assert len({tuple(answer.ids) for answer in answers}) == len(prompts)
    costs, active, config = token_costs(checkpoint), 3 / 8, shape.config
    experts = 4 * 8 * 3 * config["hidden_size"] * config["moe_intermediate_size"]
    embeddings = 2 * config["vocab_size"] * config["hidden_size"]
    table = 8 * config["vocab_size"] * config["num_experts_per_tok"]
    assert costs["bytes_per_token"] == checkpoint.num_bytes - embeddings - table - experts * (1 / 2 + 1 / 32) * (1 - active)
    with pytest.raises(ValueError, match="fp4 is for deepseek_v4"):
        write_random_checkpoint(tmp_path, shape, "fp8", "cpu")
