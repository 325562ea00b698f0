"""deepseek_v4 against transformers on random weights in float32: logits, greedy ids, chunks, batches, preemption, reuse of prefixes."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepped_plane import Plane, assert_logits, greedy
from tiny_deepseek_v4 import KINDS, SIZES, load, published_names, write_tiny

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.models.deepseek_v4 import DeepseekV4

LENGTHS = [1, 3, 37, 131]  # ragged; the window is 8, entries stand for 4 and 16 tokens, and the best 6 of the former are seen
ANSWER = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("deepseek_v4")
    return directory, write_tiny(directory)


@pytest.fixture(scope="module")
def model(checkpoint: tuple[Path, Any]) -> DeepseekV4:
    return load(checkpoint[0])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(f"{length} {seed}")
    return [chooser.randrange(SIZES["vocab_size"]) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any], model: DeepseekV4) -> dict[int, list[int]]:
    """The answer to the prompt of each length, each computed by itself, and each id the best one of transformers after those before it."""
    answers = {}
    for length in LENGTHS:
        plane = Plane(model, caching=False)
        plane.add("a", prompt_of(length), ANSWER if length == 37 else 16)
        plane.run()
        assert_logits(plane, "a", checkpoint[1], prompt_of(length))
        answers[length] = plane.answers["a"]
        with torch.no_grad():
            best = checkpoint[1](torch.tensor([prompt_of(length) + answers[length]])).logits[0, length - 1 : -1].argmax(-1)
        assert answers[length] == best.tolist()
    assert len(set(answers[37])) > 16, "the model repeats itself, which proves little"
    return answers


def test_64_greedy_ids_of_transformers(checkpoint: tuple[Path, Any], expected: dict[int, list[int]]) -> None:
    """Generated with its own cache."""
    assert greedy(checkpoint[1], prompt_of(37), ANSWER) == expected[37]


def test_chunked_prefill(checkpoint: tuple[Path, Any], model: DeepseekV4, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, chunk=5)
    plane.add("a", prompt_of(131), 16)
    plane.run()
    assert plane.answers["a"] == expected[131][:16]
    assert_logits(plane, "a", checkpoint[1], prompt_of(131))


@pytest.mark.parametrize("block_size", [16, 6])
def test_a_ragged_batch(block_size: int, model: DeepseekV4, expected: dict[int, list[int]]) -> None:
    """Blocks of more tokens than an entry stands for, and of a number that none divides; the other tests have blocks of as many."""
    plane = Plane(model, num_blocks=160, block_size=block_size, chunk=48)
    for length in LENGTHS:
        plane.add(str(length), prompt_of(length), 16)
    plane.run()
    assert plane.answers == {str(length): expected[length][:16] for length in LENGTHS}


def test_rows_that_join_and_leave(model: DeepseekV4, expected: dict[int, list[int]]) -> None:
    """Slots pass from row to row, two at a time."""
    plane = Plane(model, num_blocks=160, chunk=32, slots=2)
    for length in LENGTHS:
        plane.add(str(length), prompt_of(length), 5 + length % 7)
        plane.step()
    plane.run()
    assert plane.answers == {str(length): expected[length][: 5 + length % 7] for length in LENGTHS}


def test_preemption(model: DeepseekV4, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, num_blocks=52, chunk=16)
    for length in LENGTHS:
        plane.add(str(length), prompt_of(length), 16)
    plane.run()
    assert plane.scheduler.num_preemptions > 0
    assert plane.answers == {str(length): expected[length][:16] for length in LENGTHS}


def test_conversations_reuse_what_they_may(model: DeepseekV4) -> None:
    warm = Plane(model, num_blocks=400, snapshots=100)
    length = 17
    first = prompt_of(length, 1)
    answer, _ = Plane(model).ask(first, 6)
    turns = [first, first, first + answer + prompt_of(9, 2), first + answer[:4] + prompt_of(6, 3), first[: length // 2] + prompt_of(21, 4)]
    hits = 0
    for prompt in turns:
        cold, _ = Plane(model, caching=False).ask(prompt, 6)
        got, cached = warm.ask(prompt, 6)
        assert got == cold
        hits += cached > 0
    assert hits >= 3


def test_few_snapshots_and_few_blocks(model: DeepseekV4) -> None:
    """What is evicted is computed again; ids never change."""
    warm, chooser = Plane(model, num_blocks=30, snapshots=3, chunk=16), random.Random(3)
    history, hits = prompt_of(20, 6), 0
    for turn in range(5):
        prompt = history[: chooser.randrange(1, len(history) + 1)] + prompt_of(chooser.randrange(1, 9), turn)
        cold, _ = Plane(model, caching=False).ask(prompt, 5)
        got, cached = warm.ask(prompt, 5)
        assert got == cold
        hits += cached > 0
        history = (prompt + got)[:70]
    assert hits > 0


def test_a_row_cancelled_in_the_middle(model: DeepseekV4, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, num_blocks=200, chunk=16)
    plane.add("gone", prompt_of(131), ANSWER)
    plane.add("stays", prompt_of(37), 16)
    for _ in range(5):
        plane.step()
    plane.scheduler.remove(plane.rows["gone"])
    plane.run()
    assert plane.answers["stays"] == expected[37][:16]
    again, cached = plane.ask(prompt_of(131), 16)
    assert again == expected[131][:16]
    assert cached > 0


def test_a_row_that_is_not_finite_leaves_nothing_behind(model: DeepseekV4, expected: dict[int, list[int]]) -> None:
    """Its entries and its state are given to another row next."""
    plane = Plane(model, num_blocks=60, slots=1, caching=False)
    cache: Any = plane.runner.cache
    plane.add("broken", prompt_of(131), 4)
    table: Any = model._embedding
    kept = table._table
    table._table = kept.clone()
    table._table[prompt_of(131)[0]] = float("nan")
    try:
        step = plane.scheduler.schedule()
        assert plane.runner.execute(step, plane.masks, plane.scheduler.take_copies())
    finally:
        table._table = kept
    plane.scheduler.remove(plane.rows["broken"])
    assert all(bool(torch.isfinite(one).all()) for layer in cache.entries for one in layer)
    assert plane.ask(prompt_of(131), 16)[0] == expected[131][:16]


def test_published_names(checkpoint: tuple[Path, Any], expected: dict[int, list[int]], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The names, and the spelling of config.json, of the published checkpoints, with a layer that predicts further tokens."""
    published_names(checkpoint[0], tmp_path)
    with caplog.at_level(logging.INFO):
        plane = Plane(load(tmp_path))
    assert any("predicts further tokens (2 tensors), which is skipped" in record.message for record in caplog.records)
    assert plane.ask(prompt_of(37), 16)[0] == expected[37][:16]


def test_the_published_ratios(tmp_path: Path) -> None:
    """Entries of 128 tokens, as config.json's compress_ratios has them, over more than one of them."""
    oracle = write_tiny(tmp_path / "saved", compress_rates={KINDS[1]: 4, KINDS[2]: 128}, sliding_window=128)
    published_names(tmp_path / "saved", tmp_path, ratios=[0, 4, 128, 4, 0])
    plane = Plane(load(tmp_path), num_blocks=160, chunk=100)
    plane.add("a", prompt_of(300), 12)
    plane.run()
    assert plane.answers["a"] == greedy(oracle, prompt_of(300), 12)
    assert_logits(plane, "a", oracle, prompt_of(300))


@pytest.mark.parametrize(
    ("change", "says", "kind"),
    [
        ({"hidden_act": "gelu"}, "has hidden_act = 'gelu', which is not supported", UnsupportedFeatureError),
        ({"scoring_func": "sigmoid"}, "has scoring_func = 'sigmoid', which is not supported", UnsupportedFeatureError),
        ({"n_shared_experts": 2}, "has n_shared_experts = 2, which is not supported", UnsupportedFeatureError),
        ({"layer_types": ["full_attention"] * 4}, "has 'full_attention' in layer_types, which is not supported", UnsupportedFeatureError),
        ({"layer_types": KINDS[:3]}, "which should be a list of 4", ConfigurationError),
        ({"mlp_layer_types": ["dense"] * 4}, "has 'dense' in mlp_layer_types", UnsupportedFeatureError),
        ({"compress_rates": {KINDS[1]: 0}}, "a whole number above 0 for", ConfigurationError),
        ({"o_groups": 3}, "has o_groups = 3, which should be a divisor of num_attention_heads = 4", ConfigurationError),
        ({"num_experts_per_tok": 7}, "which should be at most n_routed_experts = 6", ConfigurationError),
        ({"index_head_dim": 4}, "at least the 8 values", ConfigurationError),
        ({"q_lora_rank": None}, "lacks the key q_lora_rank", ConfigurationError),
        ({"hc_eps": 0}, "has hc_eps = 0, which should be a number above 0", ConfigurationError),
        ({"moe_intermediate_size": 16}, "has the shape", ConfigurationError),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(
    change: dict[str, Any], says: str, kind: type[Exception], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    (tmp_path / "model.safetensors").symlink_to(checkpoint[0] / "model.safetensors")
    config = json.loads((checkpoint[0] / "config.json").read_text()) | change
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=says) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["model.layers.0.attn.attn_sink", "model.layers.3.attn.indexer.compressor.ape", "model.hc_head.hc_fn"])
def test_missing_and_left_over_tensors_are_named(name: str, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    tensors = load_file(checkpoint[0] / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=f"lacks the tensor {name}"):
        load(tmp_path)
    save_file({**tensors, f"{name}.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=f"holds the tensor {name}.extra"):
        load(tmp_path)


def test_a_table_of_experts_that_there_are_not(checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    tensors = load_file(checkpoint[0] / "model.safetensors")
    tensors["model.layers.1.ffn.gate.tid2eid"][5, 1] = 6
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"model\.layers\.1\.ffn\.gate\.tid2eid of .* holds numbers outside \[0, 6\)"):
        load(tmp_path)
