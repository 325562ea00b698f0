"""The native code of the API guide as it is written there; only the checkpoint, the backend of the build and the prompt are given."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_manual_cmake_build(native: Any, tmp_path: Path) -> None:
    """The guide's commands, without optimization so that they end sooner, and into another folder."""
    build = tmp_path / "build-python"
    pybind11 = subprocess.run([sys.executable, "-c", "import pybind11; print(pybind11.get_cmake_dir())"], capture_output=True, text=True, check=True).stdout
    configure = ["cmake", "-S", "cpp_engine", "-B", str(build), "-DPOCKET_BACKEND=cpu", "-DPOCKET_BUILD_PYTHON=ON", f"-Dpybind11_DIR={pybind11.strip()}"]
    quick = [f"-DPython_EXECUTABLE={sys.executable}", "-DPOCKET_BUILD_TESTS=OFF", "-DCMAKE_CXX_FLAGS=-O0"]
    subprocess.run([*configure, *quick], cwd=ROOT, check=True)
    subprocess.run(["cmake", "--build", str(build), "--target", "pocketllm_cpp", "-j"], cwd=ROOT, check=True)
    printed = subprocess.run(
        [sys.executable, "-c", "import pocketllm_cpp; print(pocketllm_cpp.backend, pocketllm_cpp.__file__)"],
        env={**os.environ, "PYTHONPATH": str(build / "python")},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert printed[0] == "cpu"
    assert Path(printed[1]).parent == build / "python"


def test_scheduler_with_callbacks(native: Any, checkpoint: str, prompt_tokens: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    pocketllm_cpp = native
    engine = pocketllm_cpp.QwenEngine(checkpoint, pocketllm_cpp.QwenEngineOptions())
    scheduler = pocketllm_cpp.QwenBatchScheduler(engine, max_batch_size=4)

    sampling = pocketllm_cpp.QwenBatchSamplingParams()
    sampling.max_new_tokens = 64

    done = threading.Event()

    def on_token(request_id: int, token: int) -> None:
        print(token, flush=True)

    def on_complete(result: Any) -> None:
        print(result.finish_reason)
        done.set()

    request_id = scheduler.submit_request(prompt_tokens, sampling, callback=on_complete, on_token=on_token)
    done.wait()
    scheduler.stop()

    assert isinstance(request_id, int)
    *tokens, reason = capsys.readouterr().out.split()
    assert reason == "stop"
    engine.reset()
    assert list(map(int, tokens)) == engine.generate(prompt_tokens, len(tokens))


def test_scheduler_with_polling(native: Any, checkpoint: str, prompt_tokens: list[int]) -> None:
    pocketllm_cpp = native
    engine = pocketllm_cpp.QwenEngine(checkpoint, pocketllm_cpp.QwenEngineOptions())
    scheduler = pocketllm_cpp.QwenBatchScheduler(engine, max_batch_size=4)
    sampling = pocketllm_cpp.QwenBatchSamplingParams()
    sampling.max_new_tokens = 64

    request_id = scheduler.submit_request(prompt_tokens, sampling)
    result = scheduler.poll_result(request_id, timeout_ms=30000)

    assert result.finish_reason == "stop"
    assert 0 < len(result.token_ids) < 64

    caps = scheduler.engine_caps()
    assert (caps.max_slots, caps.continuous_batching, caps.chunked_prefill, caps.paged_kv) == (8, True, True, True)
    assert (caps.per_request_sampling, caps.per_request_top_k) == (True, True)
    assert scheduler.max_batch_size() == 4
    scheduler.set_prefill_token_budget(0)
    again = scheduler.submit_request(prompt_tokens, sampling)
    assert scheduler.poll_result(again, timeout_ms=30000).token_ids == result.token_ids
    scheduler.stop()
