"""QwenEngine's session and PersistentEngine: tokens in, greedy tokens out, and what of a prompt is reused."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.cpp_engine.conftest import options


def test_facts(native: Any, engine: Any) -> None:
    assert native.backend == "cpu"
    assert native.__version__ == __import__("pocketllm").__version__
    config = engine.config
    assert (config.architecture, config.device, config.dtype, config.kv_cache_dtype) == ("qwen3_5_text", "cpu", "float32", "float32")
    assert (config.max_model_len, config.max_batch_size, config.num_threads) == (512, 4, 1)
    assert config.eos_source == "generation_config.json"
    assert engine.eos_id == config.eos_token_ids[0]
    assert engine.capabilities().max_slots == 4
    assert 0 < config.bytes_per_token <= config.weight_bytes


def test_generate_is_prefill_and_decode_steps(engine: Any, prompt_tokens: list[int]) -> None:
    ids = engine.generate(prompt_tokens, 12)
    assert engine.num_tokens == len(prompt_tokens) + 11
    engine.reset()
    assert engine.num_tokens == 0
    stepped = [engine.prefill(prompt_tokens)]
    while len(stepped) < 12:
        stepped.append(engine.decode_step(stepped[-1]))
    assert stepped == ids
    assert engine.eos_id in ids  # and it went on: no id ends generate


def test_logits_are_those_that_ids_are_drawn_from(engine: Any, prompt_tokens: list[int]) -> None:
    logits = engine.logits(prompt_tokens)
    assert (logits.shape, logits.dtype) == ((len(prompt_tokens), engine.config.vocab_size), np.float32)
    assert int(logits[-1].argmax()) == engine.prefill(prompt_tokens)
    assert engine.decode_step(5) == int(engine.logits([*prompt_tokens, 5])[-1].argmax())


def test_prompts_in_chunks_give_the_same_ids(native: Any, checkpoint: str, engine: Any) -> None:
    prompt = [(7 * place) % 500 for place in range(300)]
    whole = engine.generate(prompt, 16)
    for chunk in (0, 1, 7, 64):
        chunked = native.QwenEngine(checkpoint, options(native, prefill_chunk_tokens=chunk))
        assert chunked.generate(prompt, 16) == whole


def test_prefixes_are_reused_where_their_state_is_known(engine: Any) -> None:
    prompt = [(11 * place) % 500 for place in range(100)]
    answer = engine.generate(prompt, 20)

    def cold(tokens: list[int]) -> int:
        engine.reset()
        first = engine.prefill(tokens)
        assert engine.cached_tokens == 0
        return int(first)

    turn = [*prompt, *answer, 3, 4, 5]
    wanted = cold(turn)
    engine.reset()
    engine.generate(prompt, 20)
    assert (engine.prefill(turn), engine.cached_tokens) == (wanted, 119)  # appended: all that the session held
    assert (engine.prefill(turn), engine.cached_tokens) == (wanted, 119)  # asked again

    branch = [*prompt, 9, 9]
    engine.generate(turn, 5)
    found = engine.prefill(branch), engine.cached_tokens
    assert found == (cold(branch), 100)

    shorter = prompt[:50]
    engine.generate(prompt, 5)
    assert (engine.prefill(shorter), engine.cached_tokens) == (cold(shorter), 0)  # no state was kept within it


def test_without_prefix_caching_nothing_is_reused(native: Any, checkpoint: str, prompt_tokens: list[int]) -> None:
    engine = native.QwenEngine(checkpoint, options(native, enable_prefix_caching=False))
    first = engine.prefill(prompt_tokens)
    assert (engine.prefill(prompt_tokens), engine.cached_tokens) == (first, 0)
    assert not engine.capabilities().prefix_caching


@pytest.mark.parametrize("wrong", [None, 1, 3, 5])
def test_verify_keeps_the_right_guesses(engine: Any, prompt_tokens: list[int], wrong: int | None) -> None:
    ids = engine.generate(prompt_tokens, 12)
    engine.reset()
    assert engine.prefill(prompt_tokens) == ids[0]
    guesses = ids[:6]
    if wrong is not None:
        guesses[wrong] = (guesses[wrong] + 1) % engine.config.vocab_size
    accepted = 6 if wrong is None else wrong
    assert engine.verify(guesses)[:accepted] == ids[1 : accepted + 1]
    assert engine.num_tokens == len(prompt_tokens) + accepted
    # It goes on as if the wrong guess had never been.
    following = [engine.decode_step(ids[accepted])]
    while len(following) < 5:
        following.append(engine.decode_step(following[-1]))
    assert following == ids[accepted + 1 : accepted + 6]


def test_numpy_ids_are_ids(engine: Any, prompt_tokens: list[int]) -> None:
    assert engine.generate(np.array(prompt_tokens), 3) == engine.generate(prompt_tokens, 3)


@pytest.mark.parametrize(
    ("call", "says", "field"),
    [
        (lambda engine: engine.prefill([]), '"tokens" is empty: send at least one token id.', "tokens"),
        (lambda engine: engine.prefill([1, 99999]), '"tokens" holds 99999, which is no token of this model', "tokens"),
        (lambda engine: engine.prefill([-1]), '"tokens" holds -1, which is no token of this model', "tokens"),
        (lambda engine: engine.prefill([1] * 513), "The session would hold 513 tokens, and its context is 512", "tokens"),
        (lambda engine: engine.generate([1], 0), '"max_new_tokens" = 0 is not valid: send a whole number of at least 1.', "max_new_tokens"),
        (lambda engine: engine.generate([1] * 500, 13), '"max_new_tokens" = 13 after a prompt of 500 tokens is more than the context of 512', "max_new_tokens"),
        (lambda engine: engine.decode_step(1), "The session is empty: call prefill before decode_step.", "token"),
        (lambda engine: engine.verify([1]), "The session is empty: call prefill before verify.", "tokens"),
    ],
)
def test_wrong_calls_say_what_is_wrong(native: Any, engine: Any, call: Any, says: str, field: str) -> None:
    with pytest.raises(native.Error) as caught:
        call(engine)
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)
    assert (caught.value.kind, caught.value.field) == ("configuration", field)


@pytest.mark.parametrize(
    ("change", "kind", "field"),
    [
        ({"dtype": "int4"}, "configuration", "dtype"),
        ({"kv_cache_dtype": "int8"}, "configuration", "kv_cache_dtype"),
        ({"device": "tpu"}, "unsupported", "device"),
        ({"device": "cuda"}, "unsupported", "device"),
        ({"num_threads": -1}, "configuration", "num_threads"),
        ({"max_model_len": 10**6}, "configuration", "max_model_len"),
        ({"kv_cache_memory": 1000}, "configuration", "kv_cache_memory"),
    ],
)
def test_options_that_can_not_be_are_refused(native: Any, checkpoint: str, change: dict[str, Any], kind: str, field: str) -> None:
    with pytest.raises(native.Error) as caught:
        native.QwenEngine(checkpoint, options(native, **change))
    assert (caught.value.kind, caught.value.field) == (kind, field)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", [{"max_model_len": -1}, {"max_batch_size": 2**16 + 1}, {"prefill_chunk_tokens": -1}, {"num_threads": 1025}])
def test_counts_are_refused_before_a_file_is_read(native: Any, change: dict[str, int]) -> None:
    with pytest.raises(native.Error, match="is not valid: send a whole number") as caught:
        native.QwenEngine("/nowhere", native.QwenEngineOptions(**change))
    assert [caught.value.field] == list(change)


def test_a_context_of_one_token_warms_up(native: Any, checkpoint: str) -> None:
    engine = native.QwenEngine(checkpoint, options(native, max_model_len=1))
    engine.warmup()
    assert engine.num_tokens == 0


def test_a_folder_that_is_none(native: Any, tmp_path: Any) -> None:
    with pytest.raises(native.Error, match=r"config\.json"):
        native.QwenEngine(str(tmp_path))


def test_loading_says_how_far_it_is_and_can_be_ended(native: Any, checkpoint: str) -> None:
    said: list[tuple[float, str]] = []
    native.QwenEngine.load(checkpoint, options(native), lambda fraction, message: said.append((fraction, message)))
    assert said[-1] == (1.0, "ready")
    assert [fraction for fraction, _ in said] == sorted(fraction for fraction, _ in said)

    def refuse(fraction: float, message: str) -> None:
        raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        native.QwenEngine.load(checkpoint, options(native), refuse)


def test_other_threads_run_while_it_generates(engine: Any, prompt_tokens: list[int]) -> None:
    """The GIL is released: this thread counts on while another one waits in generate."""
    ended = threading.Event()

    def generate() -> None:
        engine.generate(prompt_tokens, 400)
        ended.set()

    thread = threading.Thread(target=generate)
    thread.start()
    ticks = 0
    while not ended.is_set():
        ticks += 1
        time.sleep(0.0005)
    thread.join()
    assert ticks >= 10


def test_values_name_their_fields(native: Any) -> None:
    with pytest.raises(TypeError, match='QwenEngineOptions has no field "devise": it has device, dtype'):
        native.QwenEngineOptions(devise="cpu")
    made = native.QwenEngineOptions(max_model_len=64)
    with pytest.raises(AttributeError, match='QwenEngineOptions has no field "max_len": it has device, dtype'):
        made.max_len = 5
    with pytest.raises(TypeError, match=r"\"max_model_len\" = .long. is not valid: send a whole number"):
        made.max_model_len = "long"
    with pytest.raises(TypeError, match='"num_threads" = True is not valid'):
        made.num_threads = True
    with pytest.raises(TypeError, match='"kv_cache_memory" = -1 is not valid: send a whole number of at least 0'):
        made.kv_cache_memory = -1
    with pytest.raises(TypeError, match="keyword arguments only"):
        native.QwenEngineOptions("cpu")
    assert made.max_model_len == 64
    assert repr(made).startswith("QwenEngineOptions(device='auto', dtype='auto', kv_cache_dtype='auto', max_model_len=64,")


def test_stubs_have_every_name(native: Any) -> None:
    """What the stub says there is, there is, and nothing else."""
    import ast
    from pathlib import Path

    tree = ast.parse((Path(__file__).resolve().parents[2] / "cpp_engine" / "python" / "pocketllm_cpp.pyi").read_text())
    only_types = {"TokenIds", "FinishReason", "TokenConstraint"}
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef) and node.name not in only_types}
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert {name for name in vars(native) if not name.startswith("_")} == {*classes, *functions, "backend"}
    for name, node in classes.items():
        if name == "Error":
            continue
        said = {item.name for item in node.body if isinstance(item, ast.FunctionDef)} | {
            item.target.id for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        there = {entry for entry in vars(getattr(native, name)) if not entry.startswith("_")}
        assert {entry for entry in said if not entry.startswith("_")} == there, name


def test_persistent_engine(native: Any, checkpoint: str, engine: Any, prompt_tokens: list[int]) -> None:
    persistent = native.PersistentEngine(checkpoint, native.PersistentOptions(dtype="float32", num_threads=1, max_model_len=512, warmup=False))
    heard: list[int] = []
    result = persistent.run(native.PersistentRequest(id="a", token_ids=prompt_tokens, max_new_tokens=64, logprobs=2), heard.append)
    assert (result.id, result.finish_reason, result.prompt_tokens, result.cached_tokens) == ("a", "stop", len(prompt_tokens), 0)
    assert result.token_ids == heard == engine.generate(prompt_tokens, len(heard))
    assert result.completion_tokens == len(heard) + 1  # the id that ended it
    assert [entry.top[0][0] for entry in result.logprobs] == heard
    assert result.prefill_seconds > 0
    assert result.decode_seconds > 0
    longer = persistent.run(native.PersistentRequest(token_ids=[*prompt_tokens, *heard, 5], max_new_tokens=2, stop_token_ids=[]))
    assert longer.cached_tokens == len(prompt_tokens) + len(heard)
    assert longer.finish_reason == "length"
    sampled = native.PersistentRequest(token_ids=prompt_tokens, max_new_tokens=20, temperature=2.0, seed=3, stop_token_ids=[])
    assert persistent.run(sampled).token_ids == persistent.run(sampled).token_ids
    with pytest.raises(native.Error, match='"top_p" = 0'):
        persistent.run(native.PersistentRequest(token_ids=[1], top_p=0))
    with pytest.raises(native.Error, match="run was called while another request is answered"):  # its session would be continued
        persistent.run(native.PersistentRequest(token_ids=prompt_tokens), lambda token: persistent.run(sampled))
    with pytest.raises(ZeroDivisionError):
        persistent.run(native.PersistentRequest(token_ids=prompt_tokens), lambda token: 1 / 0)
