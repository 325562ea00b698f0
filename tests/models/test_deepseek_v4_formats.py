"""deepseek_v4 in the formats that it is stored in, against transformers on the same numbers in float32; and its experts left in the file."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stepped_plane import Plane, assert_logits
from tiny_deepseek_v4 import KINDS, SIZES, load, quantized, write_gguf, write_tiny
from transformers import DeepseekV4ForCausalLM

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.select import explain
from pocketllm.checkpoint import open_checkpoint
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from tests.models.plane import check_greedy, generate, opened

# What FP4 and GGUF's blocks need: whole groups of 32 along each row. So many index heads that the scores of two entries are not both 0, a tie.
WIDE = {"index_n_heads": 16, "hidden_size": 64, "q_lora_rank": 32, "moe_intermediate_size": 64, "index_topk": 3}
RATIOS = {"compress_rates": {KINDS[1]: 4, KINDS[2]: 128}, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"]}


def prompt_of(length: int) -> list[int]:
    return [random.Random(f"{length} {place}").randrange(SIZES["vocab_size"]) for place in range(length)]


def check(path: Path, oracle: Any, length: int, count: int = 12) -> list[int]:
    """Ids and logits of transformers, for a prompt by itself."""
    assert explain(open_checkpoint(path))[0].runs
    plane = Plane(load(path))
    plane.add("a", prompt_of(length), count)
    plane.run()
    assert_logits(plane, "a", oracle, prompt_of(length))
    with torch.no_grad():
        best = oracle(torch.tensor([prompt_of(length) + plane.answers["a"]])).logits[0, length - 1 : -1].argmax(-1)
    assert plane.answers["a"] == best.tolist()
    return plane.answers["a"]


def test_bf16(tmp_path: Path) -> None:
    write_tiny(tmp_path).to(torch.bfloat16).save_pretrained(tmp_path)
    check(tmp_path, DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval(), 37)


@pytest.fixture(scope="module")
def fp4(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint with experts in FP4 and other matrices in FP8."""
    saved, directory = tmp_path_factory.mktemp("saved"), tmp_path_factory.mktemp("fp4")
    write_tiny(saved, **WIDE, hidden_act="silu")
    return directory, quantized(saved, directory)


def test_fp8_and_fp4(fp4: tuple[Path, Any]) -> None:
    check(*fp4, 45)


def test_gguf(tmp_path: Path) -> None:
    write_tiny(tmp_path, **WIDE, **RATIOS)
    oracle = write_gguf(tmp_path, path := tmp_path / "tiny.gguf")
    check(path, oracle, 140)


@pytest.mark.parametrize("budget", [1, 1_000_000])
def test_experts_that_stay_in_the_file(budget: int, fp4: tuple[Path, Any]) -> None:
    """Whatever of them is kept, ids are those of a model with all of them."""
    cache = ExpertCache(budget)
    plane, whole = Plane(load(fp4[0], cache), chunk=16), Plane(load(fp4[0]), chunk=16)
    for length in (3, 29):
        for one in (plane, whole):
            one.add(str(length), prompt_of(length), 8)
    plane.run()
    whole.run()
    assert plane.answers == whole.answers
    assert 0 < cache.num_bytes <= max(budget, 4 * 3 * 64 * 64)
    assert (cache.hits > 0) == (budget > 1)
    assert not whole.runner.model._expert_cache  # type: ignore[attr-defined]


def test_experts_behind_the_backend_door(fp4: tuple[Path, Any]) -> None:
    with opened(fp4[0]) as backend:
        answers = generate(backend, [prompt_of(29)], 8)
        assert backend.stats().expert_lookups == 0
    with opened(fp4[0], routed_experts_device="cpu", routed_experts_memory="1MiB") as backend:
        assert generate(backend, [prompt_of(29)], 8) == answers
        stats = backend.stats()
        assert backend.capabilities.details["expert_cache_bytes"] == 2**20
    assert stats.expert_lookups > stats.expert_hits > 0
    assert 0 < stats.expert_bytes <= 2**20


@pytest.mark.usefixtures("triton_device")
def test_on_a_gpu(fp4: tuple[Path, Any]) -> None:
    """A prompt in two chunks, its answer, and beside it a row of one token; all experts loaded, then in a cache: in the interpreter where there is no GPU."""
    from tests.models.gpu_plane import load as load_on_gpu
    from tests.models.gpu_plane import run

    prompts = [prompt_of(18), prompt_of(1)]
    requests = [EngineRequest(str(place), tuple(prompt), 2) for place, prompt in enumerate(prompts)]
    plane = load_on_gpu(fp4[0], prefill_chunk_tokens=16, routed_experts_device="gpu")
    answers = list(run(plane, requests).values())
    check_greedy(fp4[1], prompts, answers, 2)
    plane = load_on_gpu(fp4[0], prefill_chunk_tokens=16, routed_experts_device="cpu", routed_experts_memory="1MiB")
    assert list(run(plane, requests[1:]).values()) == answers[1:]
    assert plane.experts is not None
    assert plane.experts.lookups > plane.experts.hits > 0


@pytest.mark.parametrize(
    ("options", "says", "kind"),
    [
        ({"routed_experts_device": "gpu"}, '"routed_experts_device" = "gpu" needs a model on a GPU', ConfigurationError),
        ({"routed_experts_device": "gpu", "routed_experts_memory": "1MiB"}, "leave one of them out", ConfigurationError),
        ({"routed_experts_memory": "much"}, r'"routed_experts_memory" = .much. is not a size', ConfigurationError),
        ({"routed_experts_device": "disk"}, "one of auto, cpu, gpu", ConfigurationError),
    ],
)
def test_placements_that_make_no_sense(options: dict[str, Any], says: str, kind: type[Exception], fp4: tuple[Path, Any]) -> None:
    with pytest.raises(kind, match=says), opened(fp4[0], device="cpu", **options):
        pass


@pytest.mark.parametrize("change", ["missing", "shape", "type"])
def test_scales_of_fp4(change: str, fp4: tuple[Path, Any], tmp_path: Path) -> None:
    tensors = load_file(fp4[0] / "model.safetensors")
    name = "layers.1.ffn.experts.2.w3.scale"
    scales = tensors.pop(name)
    if change == "shape":
        tensors[name] = scales[:, :1].contiguous()
    elif change == "type":
        tensors[name] = scales.float()
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((fp4[0] / "config.json").read_bytes())
    with pytest.raises(ConfigurationError, match=r"Tensor layers\.1\.ffn\.experts\.2\.w3\.weight of .* is FP4, and .*is needed"):
        load(tmp_path)


def test_other_models_have_no_experts_to_place(tmp_path: Path) -> None:
    from tests.models.tiny_qwen3_5 import write_tiny as write_qwen

    write_qwen(tmp_path)
    with (
        pytest.raises(UnsupportedFeatureError, match=r'"routed_experts_device" = .cpu. is not supported for qwen3_5_text'),
        opened(tmp_path, routed_experts_device="cpu"),
    ):
        pass
