"""The torch plane's options, and its life on a small model: loading, closing, being dropped."""

from __future__ import annotations

import gc
import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from tiny_llama import tiny_tensors, write_tiny_llama

from pocketllm.backends.base import EngineRequest, LoadProgress, StepOutput
from pocketllm.backends.torch import TorchBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import BackendUnavailableError, ConfigurationError, UnsupportedFeatureError

REQUEST = EngineRequest("a", (1, 2, 3), 50)


def backend_of(directory: Path, **options: Any) -> TorchBackend:
    write_tiny_llama(directory, tiny_tensors())
    return TorchBackend(EngineArgs(dtype="float32", **{"backend_options": {"num_threads": 1}, **options}), open_checkpoint(directory))


def ignore(_progress: LoadProgress) -> None:
    pass


def engine_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "pocketllm-engine"]


@pytest.mark.parametrize(
    ("plane", "says"),
    [
        ({"num_threads": 0}, '"num_threads" = 0 in "backend_options" is not valid: send a whole number from 1 to 1024.'),
        ({"num_threads": 1025}, '"num_threads" = 1025 in "backend_options" is not valid: send a whole number from 1 to 1024.'),
        ({"num_threads": True}, '"num_threads" = True in "backend_options" is not valid: send a whole number from 1 to 1024.'),
        ({"native_kernels": 1}, '"native_kernels" = 1 in "backend_options" is not valid: send true or false.'),
        ({"threads": 1}, "\"backend_options\" holds 'threads', which the torch plane does not know: it takes num_threads, native_kernels, cuda_graphs."),
    ],
)
def test_wrong_plane_options_are_refused_before_loading(plane: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        backend_of(tmp_path, backend_options=plane)
    assert (str(caught.value), caught.value.param) == (says, "backend_options")


@pytest.mark.parametrize(
    ("options", "says", "param"),
    [
        ({"max_model_len": 65}, '"max_model_len" = 65 is more than the 64 tokens', "max_model_len"),
        ({"kv_cache_memory": "1KiB"}, "A context of 64 tokens needs 0 MiB of KV cache", "kv_cache_memory"),
        ({"kv_cache_memory": psutil.virtual_memory().total + 1}, "MiB of memory that this machine has: lower it.", "kv_cache_memory"),
    ],
)
def test_what_can_not_fit_is_refused(options: dict[str, Any], says: str, param: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError) as caught:
        backend_of(tmp_path, **options).load(ignore)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == param
    assert engine_threads() == []


@pytest.mark.parametrize(("options", "holds"), [({"kv_cache_memory": "100KiB"}, "kv_cache_memory = 100KiB"), ({}, "a quarter of the free memory")])
def test_a_context_that_is_shortened_is_said(
    options: dict[str, Any], holds: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend_of(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 1024}
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=400 * 2**10, total=2**30))
    options = {"device": "cpu", "dtype": "float32", "backend_options": {"num_threads": 1}, **options}
    backend = TorchBackend(EngineArgs(**options), open_checkpoint(tmp_path))
    backend.load(ignore)
    backend.close()
    assert backend.capabilities.context_length == 400
    assert caplog.messages == [f"max_model_len is 400: the model was made for 1024, whose KV cache does not fit into {holds}"]
    caplog.clear()
    backend = TorchBackend(EngineArgs(**options, max_model_len=400), open_checkpoint(tmp_path))
    backend.load(ignore)
    backend.close()
    assert caplog.messages == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFeatureError, match=r"'cuda:1' can't be used: this PyTorch .* or send") as caught:
        backend_of(tmp_path, device="cuda:1").load(ignore)
    assert caught.value.param == "device"
    assert engine_threads() == []


def test_a_context_that_does_not_fit_is_shortened_everywhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the capabilities say, which is what /v1/models and the checks of requests read, is what the blocks hold."""
    write_tiny_llama(tmp_path, tiny_tensors())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    token_bytes = 2 * 2 * 2 * 8 * 4
    options: dict[str, Any] = {"dtype": "float32", "kv_cache_memory": 400 * token_bytes, "backend_options": {"num_threads": 1}}
    backend = TorchBackend(EngineArgs(**options), open_checkpoint(tmp_path))
    backend.load(ignore)
    try:
        assert backend.capabilities.context_length == 400 == backend.capabilities.details["kv_blocks"] * 16
        assert "max_model_len is 400" in caplog.text
        with pytest.raises(ConfigurationError, match="more than the context of 400 tokens") as caught:
            backend.submit(EngineRequest("long", (1,) * 399, 2), lambda step: None)
        assert caught.value.param == "max_tokens"
        ended = threading.Event()
        backend.submit(EngineRequest("fits", (1,) * 399, 1), lambda step: ended.set() if step.finish_reason == "length" else None)
        assert ended.wait(20)
    finally:
        backend.close()
    with pytest.raises(ConfigurationError, match="A context of 4096 tokens needs"):
        TorchBackend(EngineArgs(**options, max_model_len=4096), open_checkpoint(tmp_path)).load(ignore)


def test_a_request_longer_than_the_context_is_refused_where_the_cache_holds_more(tmp_path: Path) -> None:
    backend = backend_of(tmp_path)
    backend.load(ignore)
    try:
        assert backend.capabilities.details["kv_blocks"] * 16 > 64
        with pytest.raises(ConfigurationError, match="more than the context of 64 tokens"):
            backend.submit(EngineRequest("long", (1,) * 60, 5), lambda step: None)
    finally:
        backend.close()


def test_from_loading_to_closed(tmp_path: Path) -> None:
    backend = backend_of(tmp_path)
    states: list[str] = []
    assert backend.health().state == "loading"
    assert not backend.cancel("a")
    with pytest.raises(BackendUnavailableError, match="still loading"):
        backend.submit(REQUEST, lambda step: None)
    backend.load(lambda progress: states.append(backend.health().state))
    assert set(states[:-1]) == {"loading"}
    assert states[-1] == backend.health().state == "ready"
    outputs: list[StepOutput] = []
    backend.submit(REQUEST, outputs.append)
    backend.close()
    assert outputs[-1].finish_reason in ("cancelled", "length")
    assert backend.health().state == "closed"
    with pytest.raises(BackendUnavailableError, match="The engine is closed"):
        backend.submit(REQUEST, outputs.append)
    backend.close()


@pytest.mark.parametrize("moment", ["importing torch", "layer 1 of 2"])
def test_closing_ends_a_load(moment: str, tmp_path: Path) -> None:
    backend = backend_of(tmp_path)
    closers: list[threading.Thread] = []

    def close_in_between(progress: LoadProgress) -> None:
        if moment in progress.message:
            closers.append(threading.Thread(target=backend.close))
            closers[0].start()
            time.sleep(0.1)

    with pytest.raises(BackendUnavailableError, match="closed while the model loaded"):
        backend.load(close_in_between)
    closers[0].join(20)
    assert backend.health().state == "closed"
    assert engine_threads() == []


def test_a_dropped_backend_stops_its_thread(tmp_path: Path) -> None:
    backend = backend_of(tmp_path)
    backend.load(ignore)
    ended = threading.Event()
    outputs: list[StepOutput] = []

    def listen(step: StepOutput) -> None:
        outputs.append(step)
        if step.finish_reason is not None:
            ended.set()

    backend.submit(REQUEST, listen)
    del backend
    gc.collect()
    assert ended.wait(20)
    assert engine_threads() == []
