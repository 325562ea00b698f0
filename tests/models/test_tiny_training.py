"""tools/train_tiny_qwen3_5.py: its quick forms of transformers' functions are those functions, and what it writes is a checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.qwen3_5 import modeling_qwen3_5

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.chat_template import load_chat_template
from pocketllm.text.tokenizer import load_tokenizer
from tests.gpu.door import ask, check, opened
from tests.models import plain_torch  # noqa: F401  # before transformers builds a model

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # where its program runs

from tiny_training.conversation import draw_conversation
from tiny_training.delta_rule import causal_conv, chunked_delta_rule
from tiny_training.source import Source
from tiny_training.vocabulary import render

ROOT = Path(__file__).parents[2]


def with_gradients(function: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    given = [tensor.clone().requires_grad_() for tensor in inputs]
    output = function(*given)
    (output * torch.randn(output.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    return [output.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)]


@pytest.mark.parametrize("width", [1, 64, 150])
def test_the_delta_rule_and_its_gradients_are_the_token_by_token_ones(width: int) -> None:
    torch.manual_seed(0)
    heads = torch.randn(2, width, 2, 16), torch.randn(2, width, 2, 16), torch.randn(2, width, 6, 8)
    inputs = [*heads, -3 * torch.rand(2, width, 6) * torch.rand(6), torch.rand(2, width, 6)]

    def recurrent(query: Any, key: Any, value: Any, decay: Any, beta: Any) -> Any:
        return modeling_qwen3_5.torch_recurrent_gated_delta_rule(query, key, value, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    for ours, theirs in zip(with_gradients(chunked_delta_rule, inputs), with_gradients(recurrent, inputs), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_the_convolution_and_its_gradients_are_transformers_own() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(2, 12, 30), torch.randn(12, 4)]
    ours, theirs = (with_gradients(partial(function, activation="silu"), inputs) for function in (causal_conv, modeling_qwen3_5.causal_conv1d_fn))
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_a_short_run_writes_a_checkpoint(tmp_path: Path) -> None:
    """Through the program itself: what it writes loads in transformers and in the torch plane, which give the same ids."""
    options = ["--device", "cpu", "--steps", "2", "--minutes", "5", "--rows", "3", "--problems", "1", "--workers", "1"]
    command = [sys.executable, str(ROOT / "tools" / "train_tiny_qwen3_5.py"), "--out", str(tmp_path), *options]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 8_000_000
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["steps"] == 2
    assert set(record["scores"]) == {"sum", "copy", "json", "count", "talk", "call", "result", "think"}

    checkpoint = open_checkpoint(tmp_path)
    template, tokenizer = load_chat_template(checkpoint), load_tokenizer(checkpoint)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    prompts = []
    for index in range(20):
        conversation = draw_conversation(Source(index))
        text = render(template, conversation, prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        messages, tools = list(conversation.messages), list(conversation.tools) or None
        assert ids == theirs.apply_chat_template(messages, tools=tools, enable_thinking=conversation.thinking, add_generation_prompt=True)["input_ids"]
        prompts.append(ids)
    ends = checkpoint.generation_defaults.eos_token_ids
    assert [tokenizer.token(id_) for id_ in ends] == ["<|im_end|>", "<|endoftext|>"]
    with opened(tmp_path, "cpu", max_model_len=1024) as backend:
        answers = ask(backend, prompts[:3], 8)
    check(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), prompts[:3], answers, 8)
