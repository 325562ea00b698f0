"""The native engine's CUDA device as a user meets it: the cpp plane behind its door and behind HTTP, against the CPU device and against transformers.

They need pocketllm_cpp, built with POCKET_BACKEND=cuda, and a GPU. TEST_DEVICE=cpu runs them on the CPU device, which shows that the tests are right.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from pocketllm import LLM, EngineArgs, SamplingParams
from pocketllm.backends.base import Backend, EngineRequest
from pocketllm.backends.select import select_backend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.errors import BackendUnavailableError, ConfigurationError, UnsupportedFeatureError
from tests.gpu.door import Answer, ask, check, logprobs_of
from tests.models.tiny_qwen3_5 import write_fp8, write_tiny
from tests.row_listener import run
from tests.server_process import gauge, serve, wait_until_ready

pytestmark = pytest.mark.gpu

TRAINED = Path(__file__).resolve().parents[1] / "models" / "tiny_qwen3_5_trained"
MARGIN = 0.1  # nat: where the oracle's best two are nearer, fast compute may name the other
COUNT = 32
# Heads as the public models have them, so that the kernels for these compute.
PUBLIC_HEADS: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "head_dim": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 2048,
}
PROMPTS = [[(place * 37 + length * 11 + 5) % 151 for place in range(length)] for length in (1, 5, 16, 17, 90, 300, 700)]


@pytest.fixture(scope="module", autouse=True)
def native(device: str) -> Any:
    if importlib.util.find_spec("pocketllm_cpp") is None:
        pytest.skip("the native module is not built: POCKET_BACKEND=cuda scripts/build_native.sh")
    module = importlib.import_module("pocketllm_cpp")
    if device.startswith("cuda") and "cuda" not in module.linked_devices():
        pytest.skip("the native module was built without CUDA: POCKET_BACKEND=cuda scripts/build_native.sh")
    return module


@contextmanager
def opened(path: Path, device: str, dtype: str, **options: Any) -> Iterator[Backend]:
    """The loaded cpp plane."""
    options = {"kv_cache_memory": "96MiB", "max_batch_size": 8, "max_model_len": 1024, "backend_options": {"num_threads": 2}, **options}
    backend = select_backend(EngineArgs(backend="cpp", dtype=dtype, device=device, **options), open_checkpoint(path))
    try:
        backend.load(lambda progress: None)
        yield backend
    finally:
        backend.close()


def test_capabilities(device: str) -> None:
    with opened(TRAINED, device, "auto", max_batch_size=None, kv_cache_memory=None) as backend:
        facts = backend.capabilities
        assert (facts.backend, facts.details["compute_dtype"]) == ("cpp", "bfloat16")
        assert facts.details["weight_bytes"] > 3_000_000
        if device.startswith("cuda"):
            assert facts.device == "cuda:0"
            assert facts.max_slots == 64
            assert "compute capability" in facts.details["device"]
            assert facts.details["linked_backend"] == "cuda"
            free, _ = torch.cuda.mem_get_info()
            assert free > 128 << 20, "the caches leave nothing to steps"


def test_float32_answers_are_those_of_the_cpu(device: str) -> None:
    prompts = [tuple(ids) for ids in PROMPTS[:6]]
    requests = [EngineRequest(f"greedy {len(prompt)}", prompt, COUNT, logprobs=5) for prompt in prompts]
    requests += [EngineRequest(f"drawn {len(prompt)}", prompt, COUNT, temperature=1.3, top_p=0.9, top_k=40, seed=len(prompt), logprobs=0) for prompt in prompts]
    answers = []
    for place in ("cpu", device):
        with opened(TRAINED, place, "float32", prefill_chunk_tokens=64) as backend:
            answers.append([*run(backend, *requests), *run(backend, EngineRequest("warm", prompts[-1], COUNT, logprobs=5))])
    for wanted, found in zip(*answers, strict=True):
        assert found.token_ids == wanted.token_ids
        assert found.outputs[-1].cached_tokens == wanted.outputs[-1].cached_tokens
        assert [entry.logprob for entry in found.logprobs] == pytest.approx([entry.logprob for entry in wanted.logprobs], abs=1e-3)
        assert [[id_ for id_, _ in entry.top] for entry in found.logprobs] == [[id_ for id_, _ in entry.top] for entry in wanted.logprobs]
    assert answers[1][-1].outputs[-1].cached_tokens > 0


def worst_choice(oracle: Any, prompts: Sequence[list[int]], answers: Sequence[Answer]) -> float:
    """How much less likely than the oracle's best the least likely id is, after what precedes it in its own answer."""
    worst = 0.0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert len(answer.ids) == COUNT
        expected = logprobs_of(oracle, prompt + answer.ids)[len(prompt) - 1 : -1]
        gaps = expected.max(-1).values - expected.gather(1, torch.tensor(answer.ids)[:, None])[:, 0]
        worst = max(worst, float(gaps.max()))
    return worst


@pytest.mark.parametrize("sizes", [{"linear_value_head_dim": 16}, PUBLIC_HEADS], ids=["small", "public heads"])
def test_float32_is_transformers(sizes: dict[str, Any], device: str, tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, **sizes)
    prompts = PROMPTS if sizes is PUBLIC_HEADS else PROMPTS[:5]
    with opened(tmp_path, device, "float32", max_model_len=512 if prompts == PROMPTS[:5] else 1024, prefill_chunk_tokens=256) as backend:
        check(oracle, prompts, ask(backend, prompts, COUNT), COUNT)


@pytest.mark.parametrize("format_", ["bf16", "fp8"])
def test_bfloat16_is_transformers_where_margins_allow(format_: str, device: str, tmp_path: Path) -> None:
    oracle = write_tiny(tmp_path, **PUBLIC_HEADS)
    if format_ == "fp8":
        write_fp8(tmp_path, oracle)
    else:
        oracle.bfloat16().save_pretrained(tmp_path)
    with opened(tmp_path, device, "bfloat16", prefill_chunk_tokens=512) as backend:
        answers = ask(backend, PROMPTS, COUNT)
    worst = worst_choice(oracle.float(), PROMPTS, answers)
    print(f"{format_}: the least likely choice is {worst:.4f} nats behind transformers' best")
    assert worst < MARGIN


def test_a_longer_prompt_computes_what_is_new(device: str) -> None:
    chunk = 512
    prompt = tuple((13 * place) % 1500 for place in range(3000))
    with opened(TRAINED, device, "auto", max_model_len=4096, prefill_chunk_tokens=chunk, kv_cache_memory="256MiB") as backend:
        run(backend, EngineRequest("first", prompt[:2488], 1))
        before = backend.stats()
        run(backend, EngineRequest("longer", prompt, 1))
        after = backend.stats()
        computed = (after.prompt_tokens - before.prompt_tokens) - (after.cached_tokens - before.cached_tokens)
        assert computed <= 512 + int(backend.capabilities.details["snapshot_interval"])


def test_the_library(device: str) -> None:
    args = EngineArgs(model=str(TRAINED), backend="cpp", device=device, max_model_len=512, kv_cache_memory="96MiB")
    with LLM(args) as llm:
        assert llm.capabilities.device.startswith(device)
        (output,) = llm.chat([{"role": "user", "content": "What is 17+25?"}], SamplingParams(max_tokens=20, temperature=0.0))
        assert (output.text.strip(), output.finish_reason) == ("42", "stop")


def test_the_server(device: str) -> None:
    server = serve("--model", TRAINED, "--backend", "cpp", "--device", device, "--max-model-len", 1024, "--kv-cache-memory", "96MiB")
    try:
        url = wait_until_ready(server)
        health = httpx.get(f"{url}/health").json()
        assert (health["status"], health["backend"]) == ("ready", "cpp")
        assert health["device"].startswith(device)
        body = {"messages": [{"role": "user", "content": "What is 17+25?"}], "max_tokens": 20, "temperature": 0}
        answer = httpx.post(f"{url}/v1/chat/completions", json={**body, "logprobs": True, "top_logprobs": 5}, timeout=60).json()
        assert answer["choices"][0]["message"]["content"] == "42"
        assert len(answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) == 5
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=60) as streamed:
            events = [json.loads(line[6:]) for line in streamed.iter_lines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"]) == "42"
        assert gauge(url, "generation_tokens_total") == 2 * answer["usage"]["completion_tokens"]
        assert gauge(url, "num_requests_running") == 0
        assert not [line for line in server.lines if "Traceback" in line]
    finally:
        server.kill()


def test_what_the_gpu_does_not_have_is_refused_with_figures(device: str) -> None:
    if device == "cpu":
        pytest.skip("a CPU's memory is the system's")
    absent = r'"device" = "cuda:99" is not there: this process sees \d+ GPU'
    with pytest.raises(UnsupportedFeatureError, match=absent) as caught, opened(TRAINED, "cuda:99", "auto"):
        pass
    assert caught.value.param == "device"
    free, total = torch.cuda.mem_get_info()
    with (
        pytest.raises(ConfigurationError, match=r"more than the [\d]+ MiB that are free on cuda:0") as refused,
        opened(TRAINED, device, "auto", kv_cache_memory=free + (total - free) // 2),
    ):
        pass
    assert refused.value.param == "kv_cache_memory"
    # Weights and a step still have room in what is left, caches do not; then not even weights.
    for left, error, says in ((400 << 20, ConfigurationError, "0 MiB may be used"), (2 << 20, BackendUnavailableError, "MiB are free")):
        taken = torch.empty(torch.cuda.mem_get_info()[0] - left, dtype=torch.uint8, device=device)
        try:
            with pytest.raises(error, match=says) as short, opened(TRAINED, device, "auto", kv_cache_memory=None):
                pass
            assert "\n" not in str(short.value)
        finally:
            del taken
            torch.cuda.empty_cache()
