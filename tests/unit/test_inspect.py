"""`pocketllm inspect`, and the choice of a plane that it reports."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pocketllm.backends import select
from pocketllm.backends.select import TORCH_ARCHITECTURES, explain, select_backend
from pocketllm.checkpoint import Checkpoint, GenerationDefaults, TensorInfo, open_checkpoint
from pocketllm.cli.inspect import describe, run
from pocketllm.config import EngineArgs
from pocketllm.errors import UnsupportedFeatureError


def checkpoint_of(tmp_path, architecture="llama", model_format="safetensors", kind="BF16", **config):
    return Checkpoint(tmp_path, model_format, "m", architecture, config, 64, GenerationDefaults(), (TensorInfo("w", (2, 3), kind, 12, tmp_path),))


def test_the_default_model_as_json(default_model, capsys):
    assert run(str(default_model), as_json=True) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == 134_515_008
    assert facts["tensor_types"] == {
        "Q4_1": {"count": 210, "bytes": 66_355_200},
        "Q8_0": {"count": 1, "bytes": 30_081_024},
        "F32": {"count": 61, "bytes": 140_544},
    }
    assert facts["kv_bytes_per_token"] == {"float32": 2 * 30 * 3 * 64 * 4, "bfloat16": 2 * 30 * 3 * 64 * 2}
    assert (facts["tokenizer"], facts["chat_template"], facts["context_length"]) == ("gpt2/smollm, 49152 tokens", "yes", 8192)
    assert [(plane["backend"], plane["runs"]) for plane in facts["planes"]] == [("torch", True), ("cpp", False)]


def test_the_lines_name_everything(default_model, capsys):
    run(str(default_model))
    out = capsys.readouterr().out
    for word in ("SmolLM2-135M-Instruct", "llama", "134,515,008", "Q4_1", "8,192 tokens", "22.5 KiB in bfloat16", "torch plane", "cpp plane"):
        assert word in out


def test_faults_that_do_not_end_the_report(write_gguf, capsys):
    path = write_gguf(architecture="mamba9", tokenizer__ggml__model="t5", tokenizer__chat_template="{% for %}")
    assert run(str(path)) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "not usable" in out
    assert "'mamba9' is not supported" in out


def test_inspecting_loads_no_torch(default_model):
    heavy = "{'torch', 'transformers', 'pocketllm_cpp'}"
    code = f"import sys\nfrom pocketllm.cli.inspect import run\nrun({str(default_model)!r})\nassert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def test_kv_of_hybrid_models_counts_full_attention_alone(tmp_path):
    numbers = {"num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8}
    assert checkpoint_of(tmp_path, **numbers).kv_bytes_per_token(2) == 2 * 4 * 2 * 8 * 2
    kinds = ["linear_attention"] * 3 + ["full_attention"]
    assert checkpoint_of(tmp_path, layer_types=kinds, **numbers).kv_bytes_per_token(2) == 2 * 1 * 2 * 8 * 2
    assert checkpoint_of(tmp_path, full_attention_interval=4, **numbers).kv_bytes_per_token(2) == 2 * 1 * 2 * 8 * 2
    assert checkpoint_of(tmp_path).kv_bytes_per_token(2) is None
    assert checkpoint_of(tmp_path, compress_ratios=[0, 4, 128, 4], **numbers).kv_bytes_per_token(2) is None
    assert describe(checkpoint_of(tmp_path, **numbers))["parameters"] == 6
    assert checkpoint_of(tmp_path, kind="I8").num_parameters == 12  # FP4
    assert checkpoint_of(tmp_path, kind="F8_E8M0").num_parameters == 0


def test_verdicts(tmp_path, write_gguf):
    def torch_of(checkpoint):
        verdict = explain(checkpoint)[0]
        return verdict.runs, verdict.reason

    assert torch_of(checkpoint_of(tmp_path))[0]
    assert torch_of(open_checkpoint(write_gguf()))[0]
    runs, reason = torch_of(checkpoint_of(tmp_path, "qwen9"))
    assert not runs
    assert reason.startswith("the architecture 'qwen9' is not supported, since transformers ")
    assert reason.endswith(f" does not know it; supported are {', '.join(sorted(TORCH_ARCHITECTURES))}, and others through transformers' modules")
    assert "the tensor w has the type I8" in torch_of(checkpoint_of(tmp_path, kind="I8"))[1]
    assert "quantized with 'gptq'" in torch_of(checkpoint_of(tmp_path, quantization_config={"quant_method": "gptq"}))[1]
    assert torch_of(checkpoint_of(tmp_path, quantization_config={}))[0]
    assert "quantized with ['gptq']" in torch_of(checkpoint_of(tmp_path, quantization_config=["gptq"]))[1]
    assert "no weights" in torch_of(open_checkpoint(write_gguf(tensors={})))[1]
    iq2 = Checkpoint(tmp_path, "gguf", "m", "llama", {}, 64, GenerationDefaults(), (TensorInfo("w", (2, 256), "IQ2_XS", 148, tmp_path),))
    assert "the tensor w has the type IQ2_XS" in torch_of(iq2)[1]


@pytest.fixture
def native_module(monkeypatch):
    """Says whether a native module can be found; it is never imported."""

    def set_it(is_there):
        find = importlib.util.find_spec
        there = importlib.machinery.ModuleSpec("pocketllm_cpp", None) if is_there else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: there if name == "pocketllm_cpp" else find(name, *rest))
        monkeypatch.setattr(select, "_NVIDIA_DRIVER", Path("/no/driver"))

    return set_it


def test_the_cpp_plane_says_why_not(tmp_path, native_module):
    def cpp_of(**options):
        verdict = explain(checkpoint_of(tmp_path, **options))[1]
        return verdict.runs, verdict.reason

    native_module(True)
    assert cpp_of() == (False, "it runs Qwen3.5 safetensors, and this is llama from safetensors")
    assert cpp_of(architecture="qwen3_5", model_format="gguf") == (False, "it runs Qwen3.5 safetensors, and this is qwen3_5 from gguf")
    assert not cpp_of(architecture="qwen3_5_moe")[0]
    assert "the tensor w has the type I8" in cpp_of(architecture="qwen3_5", kind="I8")[1]
    assert "quantized with 'gptq'" in cpp_of(architecture="qwen3_5", quantization_config={"quant_method": "gptq"})[1]
    assert cpp_of(architecture="qwen3_5") == (True, "it runs qwen3_5 from safetensors")
    native_module(False)
    assert "pocketllm_cpp is not installed: build it" in cpp_of(architecture="qwen3_5_text")[1]


@pytest.mark.parametrize(
    ("is_there", "architecture", "model_format", "options", "plane"),
    [
        (True, "qwen3_5", "safetensors", {}, "CppBackend"),
        (True, "qwen3_5_text", "safetensors", {"device": "cpu", "backend_options": {"num_threads": 1}}, "CppBackend"),
        (True, "qwen3_5", "safetensors", {"backend": "cpp", "device": "cuda"}, "CppBackend"),  # which refuses the device when it loads
        (True, "qwen3_5", "safetensors", {"backend": "torch"}, "TorchBackend"),
        (True, "qwen3_5", "safetensors", {"device": "cuda:1"}, "TorchBackend"),
        (True, "qwen3_5", "safetensors", {"backend_options": {"native_kernels": False}}, "TorchBackend"),
        (True, "qwen3_5", "gguf", {}, "TorchBackend"),
        (True, "llama", "safetensors", {}, "TorchBackend"),
        (False, "qwen3_5", "safetensors", {}, "TorchBackend"),
    ],
)
def test_auto_takes_the_cpp_plane_where_it_can(tmp_path, native_module, is_there, architecture, model_format, options, plane):
    native_module(is_there)
    checkpoint = checkpoint_of(tmp_path, architecture, model_format, vocab_size=100)
    assert type(select_backend(EngineArgs(**options), checkpoint)).__name__ == plane


def test_auto_leaves_a_machine_with_a_gpu_to_torch(tmp_path, native_module, monkeypatch):
    native_module(True)
    monkeypatch.setattr(select, "_NVIDIA_DRIVER", tmp_path)
    checkpoint = checkpoint_of(tmp_path, "qwen3_5", vocab_size=100)
    assert type(select_backend(EngineArgs(), checkpoint)).__name__ == "TorchBackend"
    assert type(select_backend(EngineArgs(device="cpu"), checkpoint)).__name__ == "CppBackend"


def test_an_explicit_cpp_is_refused_before_anything_is_imported(tmp_path):
    code = """
import sys
from tests.unit.test_inspect import checkpoint_of, EngineArgs, UnsupportedFeatureError, select_backend
from pathlib import Path
before = set(sys.modules)
try:
    select_backend(EngineArgs(backend="cpp"), checkpoint_of(Path("m"), "qwen3_5", "gguf"))
except UnsupportedFeatureError as error:
    print(error.param, {"torch", "pocketllm_cpp"} & (set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "backend set()\n"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"backend": "cpp"}, "backend"),
        ({"tensor_parallel_size": 2, "device": "cuda:1"}, "device"),
        ({"tensor_parallel_size": 2, "backend": "cpp"}, "backend"),
        ({"speculative_method": "mtp"}, "speculative_method"),
        ({"speculative_tokens": 3}, "speculative_tokens"),
        ({"device": "tpu"}, "device"),
        ({"device": "cuda:x"}, "device"),
    ],
)
def test_an_option_that_no_plane_takes_is_refused_before_torch_loads(tmp_path, options, param):
    with pytest.raises(UnsupportedFeatureError) as caught:
        select_backend(EngineArgs(**options), checkpoint_of(tmp_path))
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_an_unknown_architecture_is_named_with_what_is_supported(write_gguf):
    checkpoint = open_checkpoint(write_gguf(architecture="rwkv9", tensors={"w": np.ones(4, np.float32)}))
    for backend in ("auto", "torch"):
        with pytest.raises(UnsupportedFeatureError, match=r"'rwkv9' is not supported; supported are .*llama"):
            select_backend(EngineArgs(backend=backend), checkpoint)


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "modules_to_not_convert": ["lm_head"]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, None),
        ({"fmt": None}, "fmt = None"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"activation_scheme": "static"}, "activation_scheme = 'static'"),
        ({"weight_block_size": None}, "weight_block_size = None"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size = [64, 128]"),
        ({"scale_fmt": "ue8m0"}, None),
        ({"kv_cache_scheme": {}}, "kv_cache_scheme = {}"),
        ({"modules_to_not_convert": None}, None),
        ({"modules_to_not_convert": "lm_head"}, "modules_to_not_convert = 'lm_head', which should be a list"),
        ({"modules_to_not_convert": ["model.w"]}, "the tensor model.w.weight has the type F8_E4M3, and its quantization_config lists model.w as not converted"),
        ({"modules_to_not_convert": ["model"]}, "lists model as not converted"),
        ({"modules_to_not_convert": ["w"]}, "lists w as not converted"),
        ({"modules_to_not_convert": ["mod"]}, None),
    ],
)
def test_fp8_checkpoints_are_checked_by_their_config(tmp_path, change, words):
    tensors = (TensorInfo("model.w.weight", (2, 3), "F8_E4M3", 6, tmp_path), TensorInfo("model.w.weight_scale_inv", (1, 1), "BF16", 2, tmp_path))
    config = {"quantization_config": {**FP8, **change}}
    verdict = explain(Checkpoint(tmp_path, "safetensors", "m", "llama", config, 64, GenerationDefaults(), tensors))[0]
    assert verdict.runs is (words is None)
    assert words is None or words in verdict.reason


@pytest.mark.parametrize("key", ["activation_scheme", "weight_block_size"])
def test_an_fp8_config_without_a_key_is_refused(tmp_path, key):
    config = {name: value for name, value in FP8.items() if name != key}
    assert explain(checkpoint_of(tmp_path, quantization_config=config))[0].reason == f"its quantization_config lacks {key}"


def test_fp8_tensors_need_a_quantization_config(tmp_path):
    assert "the tensor w has the type F8_E4M3, and config.json has no quantization_config" in explain(checkpoint_of(tmp_path, kind="F8_E4M3"))[0].reason
