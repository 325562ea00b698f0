"""What the GPU's plane decides before and while it loads. No GPU is needed: what a GPU would say of itself is given."""

from __future__ import annotations

import importlib.machinery
import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_llama import tiny_tensors, write_tiny_llama

from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import ConfigurationError, UnsupportedFeatureError
from pocketllm.parallel.rank import Rank
from pocketllm.torch_engine import gpu_plane
from pocketllm.torch_engine.plane import Order

GPU = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine with GPUs of these compute capabilities, and with Triton."""

    def install(*capabilities: tuple[int, int]) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capabilities[device if isinstance(device, int) else device.index])
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Card")
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))

    return install


def order(directory: Path, **options: Any) -> Order:
    write_tiny_llama(directory, tiny_tensors())
    context = options.pop("context_length", 100_000)
    return Order(EngineArgs(**options), open_checkpoint(directory), context, lambda progress: None, lambda: None)


@pytest.mark.parametrize(
    ("capabilities", "device"), [([], "cpu"), ([(7, 0)], "cpu"), ([(7, 5)], "cuda:0"), ([(6, 1), (8, 6), (9, 0)], "cuda:1")], ids=["none", "old", "one", "some"]
)
def test_auto_takes_the_first_gpu_that_runs_models(gpus: Any, capabilities: Sequence[tuple[int, int]], device: str) -> None:
    gpus(*capabilities)
    assert gpu_plane.resolve_device("auto") == torch.device(device)


def test_auto_takes_the_cpu_without_triton(gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus((9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert gpu_plane.resolve_device("auto") == torch.device("cpu")


def test_what_a_gpu_can_not_run_is_refused_by_name(gpus: Any) -> None:
    gpus((7, 5), (7, 0))
    assert gpu_plane.resolve_device("cuda") == torch.device("cuda", 0)
    with pytest.raises(UnsupportedFeatureError, match=r"'cuda:1' is a Card of compute capability 7\.0, and the kernels need 7\.5") as caught:
        gpu_plane.resolve_device("cuda:1")
    assert caught.value.param == "device"
    with pytest.raises(ConfigurationError, match=r"'cuda:2' does not exist: this machine has 2 GPU"):
        gpu_plane.resolve_device("cuda:2")


@pytest.mark.parametrize("option", ["dtype", "kv_cache_dtype"])
def test_turing_computes_and_keeps_float16(gpus: Any, option: str) -> None:
    gpus((7, 5))
    assert gpu_plane.gpu_dtype("auto", GPU, option) == torch.float16
    assert gpu_plane.gpu_dtype("float32", GPU, option) == torch.float32
    with pytest.raises(UnsupportedFeatureError, match=rf'"{option}" = "bfloat16" needs a GPU of compute capability 8\.0') as caught:
        gpu_plane.gpu_dtype("bfloat16", GPU, option)
    assert caught.value.param == option
    gpus((8, 0))
    assert gpu_plane.gpu_dtype("auto", GPU, option) == gpu_plane.gpu_dtype("bfloat16", GPU, option) == torch.bfloat16


def test_weights_count_in_the_dtype_that_they_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = order(tmp_path)
    stored = made.checkpoint.num_bytes  # float32
    monkeypatch.setattr(gpu_plane, "_memory", lambda device: (gpu_plane._SPARE_BYTES + stored // 2, 2**33))
    gpu_plane._check_weights_fit(made, GPU, torch.float16)
    with pytest.raises(ConfigurationError, match="of cuda:0 are free: free its memory, use a smaller or quantized model") as caught:
        gpu_plane._check_weights_fit(made, GPU, torch.float32)
    assert caught.value.param == "model"


def test_a_rank_has_a_part_of_the_weights_beside_the_embeddings(tmp_path: Path) -> None:
    tensors = order(tmp_path).checkpoint.tensors
    embeddings = sum(tensor.num_bytes for tensor in tensors if tensor.name == "model.embed_tokens.weight")
    stored = sum(tensor.num_bytes for tensor in tensors)  # float32
    assert 0 < embeddings < stored
    assert gpu_plane._weight_bytes(tensors, torch.float32, 1) == stored
    assert gpu_plane._weight_bytes(tensors, torch.float32, 2) == embeddings + (stored - embeddings) // 2


def test_ranks_have_a_gpu_each(gpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    gpus((6, 1), (8, 6), (9, 0))
    assert [gpu_plane.resolve_device("auto", Rank(index, 2, index, 2)) for index in range(2)] == [torch.device("cuda", 1), torch.device("cuda", 2)]
    assert gpu_plane.resolve_device("auto", Rank(0, 3, 0, 3)) == torch.device("cpu")
    assert "3 ranks need as many GPUs, and this machine has 2 that run models" in caplog.text
    with pytest.raises(ConfigurationError, match=r'"tensor_parallel_size" = 4 gives 4 ranks of this machine a GPU each, and it has 3: lower it') as caught:
        gpu_plane.resolve_device("cuda", Rank(3, 4, 3, 4))
    assert caught.value.param == "tensor_parallel_size"


def test_a_refusal_of_memory_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_plane, "_memory", lambda device: (0, 2**33))
    with (
        pytest.raises(ConfigurationError, match=r"don't fit into the 8\.0 GiB of cuda:0: free its memory, lower kv_cache_memory") as caught,
        gpu_plane._memory_is_enough(order(tmp_path), GPU),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert "\n" not in str(caught.value)


def chosen_chunk(monkeypatch: pytest.MonkeyPatch, made: Order, free: int, room: int) -> tuple[int, int]:
    """What is chosen where a token of a step takes 1,000 bytes, `free` are free afterwards, and a step of more than `room` bytes fails."""
    monkeypatch.setattr(gpu_plane, "_measure_step", lambda model, shape, device, tokens: None if tokens * 1000 > room else tokens * 1000)
    monkeypatch.setattr(gpu_plane, "_free_for_caches", lambda device, step_bytes: free)
    model: Any = None
    shape: Any = None
    return gpu_plane._choose_chunk(made, model, shape, GPU)


@pytest.mark.parametrize(
    ("options", "free", "room", "chunk"),
    [
        ({}, 4 * 8_192_000, 8_192_000, 8192),
        ({}, 4 * 8_191_999, 8_192_000, 4096),
        ({}, 2**40, 8_191_999, 4096),
        ({}, 0, 2**40, 512),
        ({"prefill_chunk_tokens": 8192}, 0, 8_192_000, 8192),
        ({"prefill_chunk_tokens": 0}, 0, 2**40, 0),
        ({"context_length": 300}, 0, 2**40, 8192),
        ({"context_length": 700}, 0, 2**40, 512),
    ],
)
def test_a_step_that_nobody_asked_for_leaves_memory_to_the_caches(
    options: dict[str, Any], free: int, room: int, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = order(tmp_path, **options)
    assert chosen_chunk(monkeypatch, made, free, room) == (chunk, min(chunk or made.context_length, made.context_length) * 1000)
    assert (f"prefill_chunk_tokens is {chunk}" in caplog.text) == (not options.get("prefill_chunk_tokens") and 0 < chunk < 8192)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"prefill_chunk_tokens": 0}, "A step of 100000 prompt tokens does not fit .*: set prefill_chunk_tokens to 50000 or less, or lower max_model_len"),
        ({"prefill_chunk_tokens": 2048}, "A step of 2048 prompt tokens does not fit .*: set prefill_chunk_tokens to 1024 or less, or"),
        ({}, "A step of 512 prompt tokens does not fit .*: free its memory, use a smaller or quantized model, or"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(options: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigurationError, match=says) as caught:
        chosen_chunk(monkeypatch, order(tmp_path, **options), 0, 1)
    assert caught.value.param == "prefill_chunk_tokens"


def test_a_rank_whose_step_fails_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are in the middle of that step, so that asking them anything would wait for the end of the start."""
    group: Any = object()  # which can be asked nothing
    with pytest.raises(ConfigurationError, match=r"A step of 8192 prompt tokens does not fit .*: set prefill_chunk_tokens to 4096 or less") as caught:
        chosen_chunk(monkeypatch, replace(order(tmp_path), group=group), 2**40, 1)
    assert caught.value.param == "prefill_chunk_tokens"
