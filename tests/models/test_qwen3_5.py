"""qwen3_5 against transformers on random weights in float32: logits, greedy ids, chunks, batches, preemption, reuse of prefixes."""

from __future__ import annotations

import json
import logging
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from stepped_plane import Plane, assert_logits, greedy
from tiny_qwen3_5 import SIZES, fill, load, write_fp8, write_tiny, write_tiny_gguf, write_tiny_moe
from transformers import Qwen3_5Config, Qwen3_5TextConfig

from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.models.qwen3_5 import Qwen3_5
from tests.models.plain_torch import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration

LENGTHS = [1, 3, 37, 64, 131]  # ragged, around the chunk of 64
ANSWER = 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("qwen3_5_text")
    return directory, write_tiny(directory)


@pytest.fixture(scope="module")
def model(checkpoint: tuple[Path, Any]) -> Qwen3_5:
    return load(checkpoint[0])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(f"{length} {seed}")
    return [chooser.randrange(SIZES["vocab_size"]) for _ in range(length)]


@pytest.fixture(scope="module")
def expected(checkpoint: tuple[Path, Any]) -> dict[int, list[int]]:
    """transformers' answer to the prompt of each length."""
    answers = {length: greedy(checkpoint[1], prompt_of(length), ANSWER) for length in LENGTHS}
    assert all(len(set(answer)) > 8 for answer in answers.values()), "the model repeats itself, which proves little"
    return answers


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_and_ids_of_one_row(length: int, checkpoint: tuple[Path, Any], model: Qwen3_5, expected: dict[int, list[int]]) -> None:
    plane = Plane(model)
    plane.add("a", prompt_of(length), ANSWER)
    plane.run()
    assert plane.answers["a"] == expected[length]
    assert_logits(plane, "a", checkpoint[1], prompt_of(length))


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 0])
@pytest.mark.parametrize("caching", [True, False])
def test_chunked_prefill(chunk: int, caching: bool, checkpoint: tuple[Path, Any], model: Qwen3_5, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, chunk=chunk, caching=caching)
    plane.add("a", prompt_of(131), ANSWER)
    plane.run()
    assert plane.answers["a"] == expected[131]
    assert_logits(plane, "a", checkpoint[1], prompt_of(131))


@pytest.mark.parametrize("chunk", [0, 48])
def test_a_ragged_batch(chunk: int, model: Qwen3_5, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, num_blocks=160, chunk=chunk)
    for length in LENGTHS:
        plane.add(str(length), prompt_of(length), ANSWER)
    plane.run()
    assert plane.answers == {str(length): expected[length] for length in LENGTHS}


def test_rows_that_join_and_leave(model: Qwen3_5, expected: dict[int, list[int]]) -> None:
    """Slots pass from row to row, three at a time."""
    plane = Plane(model, num_blocks=160, chunk=32, slots=3)
    for length in LENGTHS:
        plane.add(str(length), prompt_of(length), 9 + length % 13)
        plane.step()
    plane.run()
    assert plane.answers == {str(length): expected[length][: 9 + length % 13] for length in LENGTHS}


@pytest.mark.parametrize("caching", [True, False])
def test_preemption(caching: bool, model: Qwen3_5, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, num_blocks=52, chunk=16, caching=caching)
    for length in LENGTHS:
        plane.add(str(length), prompt_of(length), ANSWER)
    plane.run()
    assert plane.scheduler.num_preemptions > 0
    assert plane.answers == {str(length): expected[length] for length in LENGTHS}


def test_a_preempted_row_goes_on_from_its_newest_snapshot(model: Qwen3_5, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, num_blocks=64)
    plane.add("a", prompt_of(37), 30)
    for _ in range(12):
        plane.step()
    row = plane.rows["a"]
    before = row.num_computed_tokens
    plane.scheduler.preempt(row)
    plane.scheduler.check_integrity()
    plane.step()
    assert row.num_computed_tokens == before + 1 or row.num_computed_tokens == before // 4 * 4
    plane.run()
    assert plane.computed["a"] <= 37 + 30 - 1 + 4
    assert plane.answers["a"] == expected[37][:30]


# block_size 4, a snapshot kept each 12 tokens: lengths around both.
TURNS = [1, 3, 4, 5, 11, 12, 13, 16, 17, 23, 24, 25, 35, 36, 37]


@pytest.mark.parametrize("length", TURNS)
def test_conversations_reuse_what_they_may(length: int, model: Qwen3_5) -> None:
    warm = Plane(model, num_blocks=400, snapshots=100)
    first = prompt_of(length, 1)
    answer, _ = Plane(model).ask(first, 10)
    turns = {
        "new": first,
        "repeated": first,
        "appended": first + answer + prompt_of(9, 2),
        "appended by one": first + answer + [5],
        "answer cut": first + answer[:4] + prompt_of(6, 3),
        "shortened": first[: max(1, length - 3)],
        "branching": first[: length // 2] + prompt_of(21, 4),
        "another": prompt_of(length + 5, 5),
    }
    known: list[list[int]] = []  # prefixes with a snapshot
    for what, prompt in turns.items():
        cold, _ = Plane(model, caching=False).ask(prompt, 10)
        got, cached = warm.ask(prompt, 10)
        assert got == cold, what
        short_of_last = (len(prompt) - 1) // 4 * 4
        assert cached == max([0, *(len(one) for one in known if len(one) <= short_of_last and prompt[: len(one)] == one)]), what
        computed = prompt + got[:-1]
        known += [computed[:place] for place in (*range(12, len(computed) + 1, 12), short_of_last, len(computed) // 4 * 4)]
    assert len(warm.states._snapshots) == len({tuple(one) for one in known if one}), "nothing else is kept"


@pytest.mark.parametrize("snapshots", [0, 1, 2, 3])
@pytest.mark.parametrize("num_blocks", [30, 400])
def test_few_snapshots_and_few_blocks(snapshots: int, num_blocks: int, model: Qwen3_5) -> None:
    """What is evicted is computed again; ids never change."""
    warm, chooser = Plane(model, num_blocks=num_blocks, snapshots=snapshots, chunk=16), random.Random(snapshots)
    history, hits = prompt_of(20, 6), 0
    for turn in range(14):
        prompt = history[: chooser.randrange(1, len(history) + 1)] + prompt_of(chooser.randrange(1, 9), turn)
        cold, _ = Plane(model, caching=False).ask(prompt, 8)
        got, cached = warm.ask(prompt, 8)
        assert got == cold
        assert cached % 4 == 0
        assert cached < len(prompt)
        hits += cached > 0
        history = (prompt + got)[:70]
        assert warm.states.num_snapshots <= snapshots
    assert (hits > 0) == (snapshots > 0)


def test_rows_of_one_batch_share_a_prefix(model: Qwen3_5) -> None:
    plane = Plane(model, num_blocks=200, chunk=24)
    stem = prompt_of(30, 7)
    prompts = {str(place): stem[: 30 - place] + prompt_of(5 + place, place) for place in range(5)}
    for _ in range(2):  # cold, then warm
        for name, prompt in prompts.items():
            plane.add(name, prompt, 12)
        plane.run()
        for name, prompt in prompts.items():
            assert plane.answers[name] == Plane(model, caching=False).ask(prompt, 12)[0]
    assert all((plane.rows[name].cached_tokens or 0) >= 24 for name in prompts)


@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_a_row_cancelled_in_the_middle(after: int, model: Qwen3_5, expected: dict[int, list[int]]) -> None:
    plane = Plane(model, num_blocks=200, chunk=16)
    plane.add("gone", prompt_of(131), ANSWER)
    plane.add("stays", prompt_of(37), 20)
    for _ in range(after):
        plane.step()
    plane.scheduler.remove(plane.rows["gone"])
    plane.scheduler.check_integrity()
    plane.run()
    assert plane.answers["stays"] == expected[37][:20]
    again, cached = plane.ask(prompt_of(131), ANSWER)
    assert again == expected[131]
    done = plane.computed["gone"]
    assert done // 4 * 4 - 4 <= cached <= done or cached == 128


def multimodal(directory: Path) -> Any:
    """A checkpoint with a vision tower, nested config, and tensors of a multi-token prediction head. Returns transformers' model of it."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16}
    text = Qwen3_5TextConfig(**SIZES).to_dict()
    oracle = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    fill(oracle)
    oracle.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(SIZES["hidden_size"], 2 * SIZES["hidden_size"])
    save_file(tensors, directory / "model.safetensors")
    return oracle


def test_a_multimodal_checkpoint_computes_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    oracle = multimodal(tmp_path)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    lines = [record.message for record in caplog.records]
    assert any("vision tower" in line and "skipped" in line for line in lines)
    assert any("multi-token prediction head (1 tensors)" in line for line in lines)
    plane = Plane(model)
    plane.add("a", prompt_of(37), ANSWER)
    plane.run()
    assert plane.answers["a"] == greedy(oracle, prompt_of(37), ANSWER)


def test_tied_embeddings(tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, tie_word_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    plane = Plane(load(tmp_path))
    plane.add("a", prompt_of(37), ANSWER)
    plane.run()
    assert plane.answers["a"] == greedy(oracle, prompt_of(37), ANSWER)


def test_a_stored_head_beside_tied_embeddings(tmp_path: Path) -> None:
    """It counts where it differs, as for transformers."""
    write_tiny(tmp_path, tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    for scale in (1.0, -1.0):
        save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] * scale}, tmp_path / "model.safetensors")
        oracle = Qwen3_5ForCausalLM.from_pretrained(tmp_path).eval()
        plane = Plane(load(tmp_path))
        plane.add("a", prompt_of(37), 16)
        plane.run()
        assert plane.answers["a"] == greedy(oracle, prompt_of(37), 16)


@pytest.mark.parametrize("matrix_type", ["F32", "Q8_0"])
def test_gguf(matrix_type: str, tmp_path: Path) -> None:
    """A GGUF has its value heads in another order, its norms complete, and its decay rates computed."""
    oracle = write_tiny(tmp_path, hidden_size=64, intermediate_size=96, linear_num_value_heads=4, linear_value_head_dim=32)
    write_tiny_gguf(path := tmp_path / "tiny.gguf", oracle, gguf.GGMLQuantizationType[matrix_type])
    plane = Plane(load(path))
    plane.add("a", prompt_of(37), ANSWER)
    plane.run()
    assert plane.answers["a"] == greedy(oracle, prompt_of(37), ANSWER)
    assert_logits(plane, "a", oracle, prompt_of(37))


def test_fp8(tmp_path: Path) -> None:
    """Matrices in FP8 with a scale for each 128x128 block, beside those that such checkpoints keep as they are."""
    oracle = write_tiny(tmp_path, hidden_size=160, linear_key_head_dim=32, linear_value_head_dim=32)
    write_fp8(tmp_path, oracle)
    plane = Plane(load(tmp_path))
    plane.add("a", prompt_of(37), ANSWER)
    plane.run()
    assert plane.answers["a"] == greedy(oracle, prompt_of(37), ANSWER)
    assert_logits(plane, "a", oracle, prompt_of(37))


@pytest.mark.parametrize("layout", ["separate", "fused", "F32", "Q8_0"])
def test_experts(layout: str, tmp_path: Path) -> None:
    """Experts in a tensor for each matrix, as transformers saves them, in two tensors a layer, and in a GGUF's three."""
    oracle = write_tiny_moe(tmp_path, hidden_size=64, linear_num_value_heads=4, linear_value_head_dim=32)
    path = tmp_path
    if layout == "fused":
        tensors = {name: value for name, value in load_file(tmp_path / "model.safetensors").items() if ".experts." not in name}
        tensors |= {name: value.detach().clone() for name, value in oracle.named_parameters() if ".experts." in name}
        save_file(tensors, tmp_path / "model.safetensors")
    elif layout != "separate":
        write_tiny_gguf(path := tmp_path / "tiny.gguf", oracle, gguf.GGMLQuantizationType[layout])
    plane = Plane(load(path), num_blocks=160, chunk=40)
    for length in (3, 37, 64):
        plane.add(str(length), prompt_of(length), ANSWER)
    plane.run()
    for length in (3, 37, 64):
        assert plane.answers[str(length)] == greedy(oracle, prompt_of(length), ANSWER)
        assert_logits(plane, str(length), oracle, prompt_of(length))


@pytest.mark.parametrize(
    ("change", "says", "kind"),
    [
        ({"hidden_act": "gelu"}, "has hidden_act = 'gelu', which is not supported", UnsupportedFeatureError),
        ({"attn_output_gate": False}, "has attn_output_gate = False, which is not supported", UnsupportedFeatureError),
        ({"attention_bias": True}, "has attention_bias = True, which is not supported", UnsupportedFeatureError),
        ({"mamba_ssm_dtype": "bfloat16"}, "has mamba_ssm_dtype = 'bfloat16', which is not supported", UnsupportedFeatureError),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "has rope_scaling = ", UnsupportedFeatureError),
        ({"layer_types": ["linear_attention"] * 4 + ["sliding_attention"]}, "a layer of type 'sliding_attention'", UnsupportedFeatureError),
        ({"layer_types": ["full_attention"]}, "which should be a list of 5", ConfigurationError),
        ({"layer_types": ["linear_attention"] * 5}, "at least one full_attention", ConfigurationError),
        ({"linear_num_value_heads": 5}, "has linear_num_key_heads = 2, which should be a divisor of linear_num_value_heads = 5", ConfigurationError),
        ({"linear_conv_kernel_dim": None}, "lacks the key linear_conv_kernel_dim", ConfigurationError),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "lacks the key partial_rotary_factor", ConfigurationError),
        ({"linear_key_head_dim": 8}, "has the shape", ConfigurationError),
    ],
)
def test_what_it_does_not_compute_is_refused_by_name(
    change: dict[str, Any], says: str, kind: type[Exception], checkpoint: tuple[Path, Any], tmp_path: Path
) -> None:
    for file in checkpoint[0].iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((checkpoint[0] / "config.json").read_text()) | change
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(kind, match=says) as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_experts_per_tok": 7}, "has num_experts_per_tok = 7, which should be at most num_experts = 6"),
        ({"num_experts": None}, "lacks the key num_experts"),
        ({"shared_expert_intermediate_size": 0}, "has shared_expert_intermediate_size = 0, which should be a whole number above 0"),
    ],
)
def test_experts_that_make_no_sense_are_refused(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    write_tiny_moe(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | change
    if "num_experts" in change:
        config.pop("num_local_experts", None)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigurationError, match=says):
        load(tmp_path)


@pytest.mark.parametrize("name", ["model.layers.0.linear_attn.A_log", "model.norm.weight", "lm_head.weight"])
def test_missing_and_left_over_tensors_are_named(name: str, checkpoint: tuple[Path, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((checkpoint[0] / "config.json").read_bytes())
    tensors = load_file(checkpoint[0] / "model.safetensors")
    save_file({key: value for key, value in tensors.items() if key != name}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=f"lacks the tensor {name}"):
        load(tmp_path)
    save_file({**tensors, f"{name}.extra": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=f"holds the tensor {name}.extra"):
        load(tmp_path)
