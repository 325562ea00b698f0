"""The cpp plane behind the backend door: what tests/kernels/test_torch_backend.py asks of the torch plane, and how EOS ids are found."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pocketllm import LLM, EngineArgs, SamplingParams
from pocketllm.backends.base import EngineRequest, LoadProgress, StepOutput
from pocketllm.backends.cpp import CppBackend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.errors import BackendUnavailableError, ConfigurationError, UnsupportedFeatureError
from tests.cpp_engine.conftest import TRAINED
from tests.id_constraint import IdConstraint
from tests.row_listener import Listener, run

pytestmark = pytest.mark.usefixtures("native")
REQUEST = EngineRequest("a", (1, 2, 3), 400)


def backend_of(directory: Path = TRAINED, **options: Any) -> CppBackend:
    defaults = {"device": "cpu", "dtype": "float32", "max_model_len": 512, "max_batch_size": 4, "backend_options": {"num_threads": 1}}
    return CppBackend(EngineArgs(**{**defaults, **options}), open_checkpoint(directory))


def ignore(_progress: LoadProgress) -> None:
    pass


@pytest.fixture(scope="module")
def backend(native: Any) -> Iterator[CppBackend]:
    backend = backend_of()
    backend.load(ignore)
    yield backend
    backend.close()


def test_capabilities_are_the_engine_s(native: Any, backend: CppBackend) -> None:
    found = backend.capabilities
    assert (found.backend, found.device, found.max_slots, found.context_length) == ("cpp", "cpu", 4, 512)
    assert found.vocab_size == json.loads((TRAINED / "config.json").read_text())["vocab_size"]
    assert found.per_request_sampling
    assert found.per_request_top_k
    assert found.continuous_batching
    assert found.chunked_prefill
    assert found.paged_kv
    assert found.prefix_caching
    assert found.logprobs
    assert found.structured_outputs
    assert found.speculative_methods == ()
    assert found.details["compute_dtype"] == "float32"
    assert found.details["linked_backend"] == native.backend
    assert (found.details["num_threads"], found.details["eos_source"]) == (1, "engine")


def test_both_planes_give_the_same_answers(backend: CppBackend, prompt_tokens: list[int]) -> None:
    from pocketllm.backends.torch import TorchBackend

    torch_backend = TorchBackend(EngineArgs(device="cpu", dtype="float32", max_model_len=512, backend_options={"num_threads": 1}), open_checkpoint(TRAINED))
    torch_backend.load(ignore)
    eos = frozenset(open_checkpoint(TRAINED).generation_defaults.eos_token_ids)
    prompt = tuple(prompt_tokens)
    requests = [
        EngineRequest("greedy", prompt, 40, logprobs=5),
        EngineRequest("eos", prompt, 40, eos_token_ids=eos),
        EngineRequest("seeded", prompt[:9], 40, temperature=1.5, top_p=0.9, top_k=40, seed=12345),
        EngineRequest("long", tuple(place % 300 for place in range(200)), 40),
    ]
    try:
        ours, theirs = run(backend, *requests), run(torch_backend, *requests)
    finally:
        torch_backend.close()
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        assert one.outputs[-1].finish_reason == other.outputs[-1].finish_reason
        assert one.outputs[-1].num_generated == other.outputs[-1].num_generated
    assert [entry.logprob for entry in ours[0].logprobs] == pytest.approx([entry.logprob for entry in theirs[0].logprobs], abs=1e-3)
    assert [[id_ for id_, _ in entry.top] for entry in ours[0].logprobs] == [[id_ for id_, _ in entry.top] for entry in theirs[0].logprobs]
    assert ours[1].outputs[-1].finish_reason == "stop"


def test_a_prefix_is_cached(backend: CppBackend) -> None:
    prompt = tuple((13 * place) % 400 for place in range(64))
    before = backend.stats()
    cold, warm = run(backend, EngineRequest("cold", prompt, 4))[0], run(backend, EngineRequest("warm", prompt, 4))[0]
    assert [listener.outputs[-1].cached_tokens for listener in (cold, warm)] == [0, 48]
    assert warm.token_ids == cold.token_ids
    after = backend.stats()
    assert after.prompt_tokens - before.prompt_tokens == 128
    assert after.generated_tokens - before.generated_tokens == 8
    assert after.cached_tokens - before.cached_tokens == 48
    assert (after.running, after.waiting, after.kv_blocks_used) == (0, 0, 0)
    assert after.kv_blocks_total == backend.capabilities.details["kv_blocks"]


def test_cancel(backend: CppBackend) -> None:
    listener = Listener()
    backend.submit(REQUEST, listener)
    with pytest.raises(ConfigurationError, match="still active") as caught:
        backend.submit(REQUEST, Listener())
    assert caught.value.param == "request_id"
    assert listener.started.wait(20)
    assert backend.cancel("a")
    assert listener.end().finish_reason == "cancelled"
    assert not backend.cancel("a")
    assert not backend.cancel("unknown")
    assert run(backend, EngineRequest("a", (1, 2, 3), 2))[0].outputs[-1].finish_reason == "length"  # its id is free


def test_a_constraint_holds_and_its_errors_end_the_row(backend: CppBackend) -> None:
    constraint = IdConstraint(lambda accepted: {7 + len(accepted)}, length=3)
    assert run(backend, EngineRequest("held", (1, 2, 3), 50, constraint=constraint))[0].token_ids == [7, 8, 9]
    refusal = ConfigurationError("too much work", param="response_format")

    def refuse(_accepted: Any) -> set[int]:
        raise refusal

    failed = run(backend, EngineRequest("failing", (1, 2, 3), 50, constraint=IdConstraint(refuse)))[0].outputs[-1]
    assert (failed.finish_reason, failed.error) == ("error", refusal)
    assert backend.health().state == "ready"


def test_a_listener_that_fails_cancels_its_row(backend: CppBackend, capfd: pytest.CaptureFixture[str]) -> None:
    heard: list[StepOutput] = []

    def fail(output: StepOutput) -> None:
        heard.append(output)
        raise ValueError("nobody listens")

    backend.submit(EngineRequest("failing", (1, 2, 3), 400), fail)
    deadline = time.monotonic() + 20
    while not heard or heard[-1].finish_reason is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert heard[-1].finish_reason == "cancelled"
    assert "ValueError: nobody listens" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("request_", "says", "param"),
    [
        (EngineRequest("r", (1, 2000000), 4), '"prompt" holds an id that is no token of this model', "prompt"),
        (EngineRequest("r", (), 4), "prompt", "prompt"),
        (EngineRequest("r", (1,), 0), "max_tokens", "max_tokens"),
        (EngineRequest("r", (1,) * 500, 13), "is more than the context of 512 tokens", "max_tokens"),
        (EngineRequest("r", (1,), 4, logprobs=21), "logprobs", "logprobs"),
    ],
)
def test_requests_that_break_the_terms(backend: CppBackend, request_: EngineRequest, says: str, param: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        backend.submit(request_, Listener())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("plane", "says"),
    [
        ({"num_threads": 0}, '"num_threads" = 0 in "backend_options" is not valid: send a whole number from 1 to 1024.'),
        ({"num_threads": True}, '"num_threads" = True in "backend_options" is not valid: send a whole number from 1 to 1024.'),
        ({"eos_token_id": "2"}, '"eos_token_id" = \'2\' in "backend_options" is not valid: send a token id, or a list of token ids.'),
        ({"eos_token_id": 2.0}, '"eos_token_id" = 2.0 in "backend_options" is not valid: send a token id, or a list of token ids.'),
        ({"eos_token_id": True}, '"eos_token_id" = True in "backend_options" is not valid: send a token id, or a list of token ids.'),
        ({"eos_token_id": []}, '"eos_token_id" = [] in "backend_options" is not valid: send a token id, or a list of token ids.'),
        ({"eos_token_id": [2, 10**6]}, '"eos_token_id" = 1000000 in "backend_options" is no token of this model: ids are whole numbers from 0 to 1535.'),
        ({"threads": 1}, "\"backend_options\" holds 'threads', which the cpp plane does not know: it takes num_threads, eos_token_id."),
    ],
)
def test_wrong_plane_options_are_refused_before_loading(plane: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        backend_of(backend_options=plane)
    assert (str(caught.value), caught.value.param) == (says, "backend_options")


@pytest.mark.parametrize(
    ("options", "error", "param"),
    [
        ({"max_model_len": 10**7}, ConfigurationError, "max_model_len"),
        ({"kv_cache_memory": "1KiB"}, ConfigurationError, "kv_cache_memory"),
        ({"kv_cache_memory": 2**50}, ConfigurationError, "kv_cache_memory"),
        ({"device": "cuda:99"}, UnsupportedFeatureError, "device"),
        ({"max_batch_size": 2**40}, ConfigurationError, "max_batch_size"),
    ],
)
def test_what_can_not_be_is_refused(options: dict[str, Any], error: type[Exception], param: str) -> None:
    with pytest.raises(error) as caught:
        backend_of(**options).load(ignore)
    assert "\n" not in str(caught.value)
    assert caught.value.param == param  # type: ignore[attr-defined]


def test_a_build_without_cuda_says_how_to_get_one(native: Any) -> None:
    if native.backend == "cuda":
        pytest.skip("this build has CUDA")
    with pytest.raises(UnsupportedFeatureError) as caught:
        backend_of(device="cuda").load(ignore)
    assert str(caught.value) == (
        '"device" = "cuda" is not in this build of the native engine, which computes on the CPU alone: build it with POCKET_BACKEND=cuda, or send "cpu" or '
        'backend "torch".'
    )
    assert native.linked_devices() == ["cpu"]


def checkpoint_with(tmp_path: Path, **files: Any) -> Path:
    """A copy of the trained checkpoint; a keyword replaces a JSON file by its name, None takes it away."""
    directory = tmp_path / "copy"
    shutil.copytree(TRAINED, directory)
    for name, value in files.items():
        path = directory / f"{name}.json"
        path.unlink()
        if value is not None:
            path.write_text(json.dumps(value))
    return directory


def test_eos_ids_are_found_in_order(tmp_path: Path, prompt_tokens: list[int]) -> None:
    """backend_options, the engine (generation_config.json before config.json), the tokenizer, nobody."""
    config = json.loads((TRAINED / "config.json").read_text())
    tokenizer_config = json.loads((TRAINED / "tokenizer_config.json").read_text())
    without = {key: value for key, value in config.items() if key != "eos_token_id"}
    eos = json.loads((TRAINED / "generation_config.json").read_text())["eos_token_id"]
    im_end = eos[0] if isinstance(eos, list) else eos
    untold = {key: value for key, value in tokenizer_config.items() if key != "eos_token"}
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({}, {"eos_token_id": [im_end]}, "backend_options"),
        ({}, {}, "engine"),
        ({"generation_config": None, "config": {**config, "eos_token_id": im_end}}, {}, "engine"),
        ({"generation_config": None, "config": without}, {}, "tokenizer"),
        ({"generation_config": None, "config": without, "tokenizer_config": untold}, {}, "none"),
    ]
    for place, (files, plane, source) in enumerate(cases):
        directory = checkpoint_with(tmp_path / str(place), **files)
        backend = backend_of(directory, backend_options={"num_threads": 1, **plane})
        backend.load(ignore)
        try:
            assert backend.capabilities.details["eos_source"] == source
            defaults = frozenset(open_checkpoint(directory).generation_defaults.eos_token_ids)
            listener = run(backend, EngineRequest("r", tuple(prompt_tokens), 30, eos_token_ids=defaults))[0]
            assert listener.outputs[-1].finish_reason == ("length" if source == "none" else "stop")
            if source != "none":
                assert listener.outputs[-1].num_generated == len(listener.token_ids) + 1
        finally:
            backend.close()


def test_an_eos_override_ends_answers_in_its_own_place(backend: CppBackend, prompt_tokens: list[int]) -> None:
    prompt = tuple(prompt_tokens)
    free = run(backend, EngineRequest("free", prompt, 10))[0].token_ids
    other = backend_of(backend_options={"num_threads": 1, "eos_token_id": free[1]})
    other.load(ignore)
    try:
        eos = frozenset(open_checkpoint(TRAINED).generation_defaults.eos_token_ids)
        listener = run(other, EngineRequest("r", prompt, 10, eos_token_ids=eos))[0]
        assert listener.token_ids == free[: free.index(free[1])]
        assert listener.outputs[-1].finish_reason == "stop"
    finally:
        other.close()


def test_from_loading_to_closed() -> None:
    backend = backend_of()
    states: list[str] = []
    assert backend.health().state == "loading"
    assert not backend.cancel("a")
    with pytest.raises(BackendUnavailableError, match="still loading"):
        backend.submit(REQUEST, lambda step: None)
    backend.load(lambda progress: states.append(backend.health().state))
    assert set(states[:-1]) == {"loading"}
    assert states[-1] == backend.health().state == "ready"
    listener = Listener()
    backend.submit(REQUEST, listener)
    backend.close()
    assert listener.end().finish_reason in ("cancelled", "length")
    assert backend.health().state == "closed"
    with pytest.raises(BackendUnavailableError, match=r"closed|stopped"):
        backend.submit(REQUEST, listener)
    backend.close()


@pytest.mark.parametrize("moment", [0.0, 0.5, 1.0])
def test_closing_ends_a_load(moment: float) -> None:
    backend = backend_of()
    closers: list[threading.Thread] = []

    def close_in_between(progress: LoadProgress) -> None:
        if progress.fraction >= moment and not closers:
            closers.append(threading.Thread(target=backend.close))
            closers[0].start()
            closers[0].join(20)

    with pytest.raises(BackendUnavailableError, match="closed while the model loaded"):
        backend.load(close_in_between)
    assert backend.health().state == "closed"


def test_a_dropped_backend_stops_its_thread() -> None:
    backend = backend_of()
    backend.load(ignore)
    listener = Listener()
    backend.submit(REQUEST, listener)
    del backend
    gc.collect()
    assert listener.end().finish_reason in ("cancelled", "length")


def test_the_library_on_this_plane(native: Any) -> None:
    args = EngineArgs(model=str(TRAINED), backend="cpp", dtype="float32", max_model_len=512, backend_options={"num_threads": 1})
    with LLM(args) as llm:
        assert llm.capabilities.backend == "cpp"
        (output,) = llm.chat([{"role": "user", "content": "What is 17+25?"}], SamplingParams(max_tokens=20, temperature=0.0))
        assert output.text.strip() == "42"
        assert output.finish_reason == "stop"
        events = list(llm.chat_stream([{"role": "user", "content": "What is 17+25?"}], SamplingParams(max_tokens=20, temperature=0.0)))
        assert "".join(event.text for event in events) == output.text
