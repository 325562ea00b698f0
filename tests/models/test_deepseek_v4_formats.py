"""deepseek_v4 in the formats that it is stored in, against transformers on the same numbers in float32; and its experts left in the file."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
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
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.torch_engine import gpu_plane
from pocketllm.torch_engine.expert_placement import built_bytes, expert_cache
from pocketllm.torch_engine.layers.expert_cache import ExpertCache
from pocketllm.torch_engine.models.deepseek_v4_names import predictor_names
from pocketllm.torch_engine.plane import Order
from pocketllm.torch_engine.weights import Weights
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
    assert backend.stats().expert_bytes == 0


@pytest.mark.usefixtures("triton_device")
def test_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in two chunks, its answer, and beside it a row of one token; all experts loaded, then in a cache: in the interpreter where there is no GPU.

    Two layers with all that there is, and one matrix a layer in FP8, whose kernels have tests of their own.
    """
    from tests.models.gpu_plane import load as load_on_gpu
    from tests.models.gpu_plane import run

    prompts = [prompt_of(18), prompt_of(1)]
    requests = [EngineRequest(str(place), tuple(prompt), 2) for place, prompt in enumerate(prompts)]
    sizes = {**WIDE, "hidden_size": 32, "moe_intermediate_size": 32, "num_attention_heads": 2, "index_n_heads": 8}
    write_tiny(tmp_path / "saved", **sizes, num_hidden_layers=2, layer_types=KINDS[1:3], mlp_layer_types=["hash_moe", "moe"])
    oracle = quantized(tmp_path / "saved", tmp_path, ("wo_a.weight",))
    plane = load_on_gpu(tmp_path, prefill_chunk_tokens=16, routed_experts_device="gpu")
    answers = list(run(plane, requests).values())
    check_greedy(oracle, prompts, answers, 2)
    plane = load_on_gpu(tmp_path, prefill_chunk_tokens=2, routed_experts_device="cpu", routed_experts_memory="300KiB")
    assert plane.experts is not None
    assert plane.experts.lookups == 0  # those of the steps that warmed up are not counted
    assert run(plane, [EngineRequest("again", tuple(prompts[1]), 1)])["again"] == answers[1][:1]
    assert plane.experts.lookups > plane.experts.hits > 0
    if torch.cuda.is_available():
        return
    # What the cache of experts has not taken yet is not given to the other cache. A real GPU's memory can't be made this small.
    monkeypatch.setattr(gpu_plane, "_memory", lambda device: (2**22 + 2**12, 2**23))
    with pytest.raises(ConfigurationError, match=r'"kv_cache_memory" = .4MiB. is more than the 4 MiB of memory'):
        load_on_gpu(tmp_path, prefill_chunk_tokens=2, max_batch_size=1, routed_experts_device="cpu")


@pytest.mark.parametrize(("memory", "budget"), [("1KiB", 2**10), ("600KiB", 600 * 2**10), ("1GiB", 4 * 6 * 3 * 64 * 64 * 4), (None, 2**18)])
def test_sizes_of_the_cache(memory: str | None, budget: int, fp4: tuple[Path, Any], caplog: pytest.LogCaptureFixture) -> None:
    """At most all experts; half of the free memory where nobody says; and too little for the experts of one token is said."""
    args = EngineArgs(routed_experts_device="cpu", routed_experts_memory=memory)
    cache = expert_cache(args, open_checkpoint(fp4[0]), torch.float32, 2**19, 2**30, on_gpu=False)
    assert cache is not None
    assert cache.budget == budget
    assert ("every step reads them from the file" in caplog.text) == (budget < 4 * 3 * 3 * 64 * 64 * 4)


def test_layers_that_predict_further_tokens(fp4: tuple[Path, Any]) -> None:
    """In a GGUF as many as it says, behind the others; a layer beyond them is left over, and so named."""
    checkpoint = open_checkpoint(fp4[0])
    tensors = tuple(replace(checkpoint.tensors[0], name=name) for name in ("blk.1.a", "blk.2.a", "blk.3.a", "output.weight"))
    config = {"num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    assert predictor_names(replace(checkpoint, tensors=tensors, config=config)) == {"blk.2.a"}
    assert predictor_names(replace(checkpoint, tensors=tensors, config={"num_hidden_layers": 2})) == frozenset()
    assert predictor_names(checkpoint) == {"mtp.0.e_proj.weight", "mtp.0.norm.weight"}


def test_memory_of_a_gpu(fp4: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that stay in the file need not fit; their cache must, beside the other weights."""
    checkpoint, device = open_checkpoint(fp4[0]), torch.device("cuda", 0)
    order = Order(EngineArgs(), checkpoint, 256, lambda progress: None, lambda: None)
    loaded = [tensor for tensor in checkpoint.tensors if not tensor.name.startswith("mtp.")]
    assert len(loaded) < len(checkpoint.tensors)
    others = sum(built_bytes(tensor, torch.float32, on_gpu=True) for tensor in loaded if ".ffn.experts." not in tensor.name)
    assert others < sum(built_bytes(tensor, torch.float32, on_gpu=True) for tensor in loaded)
    monkeypatch.setattr(gpu_plane, "_memory", lambda device: (gpu_plane._SPARE_BYTES + others + 1000, 2**33))
    gpu_plane._check_weights_fit(order, device, torch.float32, ExpertCache(1000))
    with pytest.raises(ConfigurationError, match=r"beside its routed experts, whose cache has .*: send a smaller routed_experts_memory") as caught:
        gpu_plane._check_weights_fit(order, device, torch.float32, ExpertCache(1001))
    assert caught.value.param == "routed_experts_memory"
    with pytest.raises(ConfigurationError, match="free its memory, use a smaller or quantized model"):
        gpu_plane._check_weights_fit(order, device, torch.float32)


def test_experts_that_a_step_builds_are_not_what_a_step_takes(fp4: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay, and what their cache still may take is left to it."""
    cache, free = ExpertCache(1000), []
    order = Order(EngineArgs(), open_checkpoint(fp4[0]), 8192, lambda progress: None, lambda: None)

    def measure(model: Any, shape: Any, device: torch.device, num_tokens: int) -> int:
        cache.num_bytes = 300
        return 1300

    def free_for_caches(device: torch.device, taken: int) -> int:
        free.append(taken)
        return 4000

    monkeypatch.setattr(gpu_plane, "_measure_step", measure)
    monkeypatch.setattr(gpu_plane, "_free_for_caches", free_for_caches)
    nothing: Any = None
    assert gpu_plane._choose_chunk(order, nothing, nothing, torch.device("cuda", 0), cache) == (8192, 1000)
    assert free == [700]


@pytest.mark.parametrize(
    ("options", "says", "kind"),
    [
        ({"routed_experts_device": "gpu"}, '"routed_experts_device" = "gpu" needs a model on a GPU', ConfigurationError),
        ({"routed_experts_device": "gpu", "routed_experts_memory": "1MiB"}, "leave one of them out", ConfigurationError),
        ({"routed_experts_memory": "much"}, r'"routed_experts_memory" = .much. is not a size', ConfigurationError),
        ({"routed_experts_memory": "1000TiB"}, r'"routed_experts_memory" = .1000TiB. is more than the \d+ MiB of memory', ConfigurationError),
        ({"routed_experts_device": "disk"}, "one of auto, cpu, gpu", ConfigurationError),
    ],
)
def test_placements_that_make_no_sense(options: dict[str, Any], says: str, kind: type[Exception], fp4: tuple[Path, Any]) -> None:
    with pytest.raises(kind, match=says), opened(fp4[0], device="cpu", **options):
        pass


@pytest.mark.parametrize("change", ["missing", "shape", "type"])
def test_scales_of_fp4(change: str, fp4: tuple[Path, Any], tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        name = "layers.1.ffn.experts.2.w3.scale"
        scales = tensors.pop(name)
        if change == "shape":
            tensors[name] = scales[:, :1].contiguous()
        elif change == "type":
            tensors[name] = scales.float()

    changed(fp4[0], tmp_path, spoil)
    with pytest.raises(ConfigurationError, match=r"Tensor layers\.1\.ffn\.experts\.2\.w3\.weight of .* is FP4, and .*is needed"):
        load(tmp_path)


def changed(saved: Path, directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """The checkpoint in `saved` with its tensors changed, in `directory`."""
    tensors = load_file(saved / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_bytes((saved / "config.json").read_bytes())
    return directory


def test_the_own_type_of_safetensors(fp4: tuple[Path, Any], tmp_path: Path) -> None:
    """F4's shape in the header counts values, that of bytes counts bytes."""

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.dtype == torch.int8:
                tensors[name] = tensor.view(torch.float4_e2m1fn_x2)

    checkpoint = open_checkpoint(changed(fp4[0], tmp_path, rename))
    assert any(tensor.type == "F4" for tensor in checkpoint.tensors)
    name = "layers.1.ffn.experts.2.w3.weight"
    found, wanted = (Weights(one, str).take(name, (64, 64)).float() for one in (checkpoint, open_checkpoint(fp4[0])))
    assert torch.equal(found, wanted)
    assert load(tmp_path).num_bytes == load(fp4[0]).num_bytes


@pytest.mark.parametrize(
    ("name", "dtype", "says"),
    [
        ("layers.0.ffn_norm.weight", torch.int64, "is stored as I64, which is no type of weights"),
        ("layers.0.attn.wkv.weight", torch.float8_e8m0fnu, "is stored as F8_E8M0, which is no type of weights"),
        ("layers.0.attn.wkv.scale", torch.int32, r"has the shape \[1, 1\] in I32 where \[1, 1\] in F32 or .* is needed"),
        ("layers.0.attn_norm.weight", torch.int8, "has the shape"),
    ],
)
def test_types_that_are_none_of_weights(name: str, dtype: torch.dtype, says: str, fp4: tuple[Path, Any], tmp_path: Path) -> None:
    changed(fp4[0], tmp_path, lambda tensors: tensors.update({name: tensors[name].float().to(dtype)}))
    with pytest.raises(ConfigurationError, match=says) as caught:
        load(tmp_path)
    assert name in str(caught.value)


def test_other_models_have_no_experts_to_place(tmp_path: Path) -> None:
    from tests.models.tiny_qwen3_5 import write_tiny as write_qwen

    write_qwen(tmp_path)
    with (
        pytest.raises(UnsupportedFeatureError, match=r'"routed_experts_device" = .cpu. is not supported for qwen3_5_text'),
        opened(tmp_path, routed_experts_device="cpu"),
    ):
        pass
