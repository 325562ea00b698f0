"""The native engine against transformers, on random tiny checkpoints and on the trained one: logits, and greedy ids however a row is computed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, Qwen3_5Config, Qwen3_5TextConfig

from tests.models.plain_torch import Qwen3_5ForCausalLM, Qwen3_5ForConditionalGeneration
from tests.models.plane import check_close, check_greedy, expected_logits
from tests.models.tiny_qwen3_5 import SIZES, fill, write_fp8, write_tiny

native = pytest.importorskip("pocketllm_cpp", reason="the native module is not built: build it with scripts/build_native.sh")

TRAINED = Path(__file__).resolve().parents[1] / "models" / "tiny_qwen3_5_trained"
LENGTHS = [1, 3, 37, 64, 131]  # ragged, around the blocks of 16 and the chunks of 64
ANSWER = 64
CONTEXT = 256
WAIT_MS = 120_000
WIDE: dict[str, Any] = {"linear_value_head_dim": 16}  # the CPU's heads are multiples of 16


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The models here are too small for more threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class Case:
    """A checkpoint beside its oracle, which computes in float32."""

    path: Path
    oracle: PreTrainedModel

    @property
    def prompts(self) -> list[list[int]]:
        vocab_size = int(self.oracle.config.get_text_config().vocab_size)
        return [prompt_of(length, vocab_size) for length in LENGTHS]


def prompt_of(length: int, vocab_size: int, seed: int = 0) -> list[int]:
    chooser = random.Random(f"{length} {seed}")
    return [chooser.randrange(vocab_size) for _ in range(length)]


def write_multimodal(directory: Path) -> PreTrainedModel:
    """A nested config, a vision tower and a tensor of a multi-token prediction head."""
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": SIZES["hidden_size"], "num_position_embeddings": 16}
    text = Qwen3_5TextConfig(**{**SIZES, **WIDE}).to_dict()
    oracle: PreTrainedModel = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision)).eval()
    fill(oracle)
    oracle.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["mtp.fc.weight"] = torch.zeros(SIZES["hidden_size"], 2 * SIZES["hidden_size"])
    save_file(tensors, directory / "model.safetensors")
    return oracle


def write_bfloat16_shards(directory: Path) -> PreTrainedModel:
    write_tiny(directory, **WIDE).to(torch.bfloat16).save_pretrained(directory, max_shard_size="60KB")
    assert len(list(directory.glob("model-*.safetensors"))) > 1
    (directory / "model.safetensors").unlink(missing_ok=True)
    oracle: PreTrainedModel = Qwen3_5ForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    return oracle


WRITERS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "text": lambda directory: write_tiny(directory, **WIDE),
    "tied": lambda directory: write_tiny(directory, **WIDE, tie_word_embeddings=True),
    "attention-alone": lambda directory: write_tiny(directory, **WIDE, full_attention_interval=1),
    "more-linear": lambda directory: write_tiny(directory, linear_value_head_dim=32, linear_key_head_dim=32, full_attention_interval=4, num_key_value_heads=1),
    "multimodal": write_multimodal,
    "bfloat16-shards": write_bfloat16_shards,
}


@pytest.fixture(scope="module", params=[*WRITERS, "trained"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    if request.param == "trained":
        return Case(TRAINED, Qwen3_5ForCausalLM.from_pretrained(TRAINED, dtype=torch.float32).eval())
    path = tmp_path_factory.mktemp(request.param)
    return Case(path, WRITERS[request.param](path))


def load(path: Path, dtype: str = "float32", **options: Any) -> Any:
    chosen = {"num_threads": 1, "max_model_len": CONTEXT, "max_batch_size": 5, **options}
    return native.QwenEngine(str(path), native.QwenEngineOptions(dtype=dtype, **chosen))


def run(scheduler: Any, prompts: Sequence[list[int]], count: int) -> list[Any]:
    """The results of all of `prompts`, running together."""
    sampling = native.QwenBatchSamplingParams(max_new_tokens=count, stop_token_ids=[])
    ids = [scheduler.submit_request(prompt, sampling) for prompt in prompts]
    results = [scheduler.poll_result(one, timeout_ms=WAIT_MS) for one in ids]
    assert all(result is not None and result.error is None for result in results)
    return results


def answers(results: Sequence[Any]) -> list[list[int]]:
    return [list(result.token_ids) for result in results]


def test_logits(case: Case) -> None:
    expected = [expected_logits(case.oracle, prompt) for prompt in case.prompts]
    assert len({int(logits[-1].argmax()) for logits in expected}) > 2, "the prompts do not matter to this oracle"
    for chunk in (0, 17):
        engine = load(case.path, prefill_chunk_tokens=chunk)
        for prompt, wanted in zip(case.prompts, expected, strict=True):
            engine.reset()
            check_close(torch.from_numpy(engine.logits(prompt)), wanted)
            engine.reset()
            assert engine.prefill(prompt) == int(wanted[-1].argmax())


def test_greedy_ids_however_they_are_computed(case: Case) -> None:
    engine = load(case.path)
    alone = []
    for prompt in case.prompts:
        engine.reset()
        alone.append(engine.generate(prompt, ANSWER))
    check_greedy(case.oracle, case.prompts, alone, ANSWER)
    for chunk in (1, 48, 0):  # chunked, in a ragged batch
        scheduler = native.QwenBatchScheduler(load(case.path, prefill_chunk_tokens=chunk, enable_prefix_caching=False), max_batch_size=5)
        results = run(scheduler, case.prompts, ANSWER)
        assert answers(results) == alone
        assert all(result.usage.cached_tokens == 0 for result in results)
        scheduler.stop()


def test_what_the_prefix_cache_holds_changes_no_id(case: Case) -> None:
    warm, cold = load(case.path), load(case.path, enable_prefix_caching=False)
    prompts = case.prompts
    vocab_size = warm.config.vocab_size
    scheduler, solo = native.QwenBatchScheduler(warm, max_batch_size=5), native.QwenBatchScheduler(cold, max_batch_size=1)
    first = answers(run(scheduler, prompts, 24))
    further = [prompt + answer + [5] for prompt, answer in zip(prompts, first, strict=True)]  # as a conversation goes on
    branches = [(prompt + answer)[:20] + prompt_of(11, vocab_size, seed) for seed, (prompt, answer) in enumerate(zip(prompts, first, strict=True))]
    for texts in (prompts, further, branches, [text[: len(text) // 2 + 1] for text in further]):
        results = run(scheduler, texts, 24)
        assert answers(results) == answers(run(solo, texts, 24))
        check_greedy(case.oracle, texts, answers(results), 24)
    stats = scheduler.stats()
    assert stats.cached_tokens > 64 * len(prompts)
    assert solo.stats().cached_tokens == 0
    scheduler.stop()
    solo.stop()


def test_preempted_rows_answer_the_same(case: Case) -> None:
    plain = load(case.path, enable_prefix_caching=False)
    config = plain.config
    block_bytes = config.kv_cache_bytes // config.kv_blocks
    memory = config.state_bytes + (CONTEXT // config.block_size + 4) * block_bytes  # one row of the context, and little more
    tight = load(case.path, enable_prefix_caching=False, kv_cache_memory=memory)
    scheduler = native.QwenBatchScheduler(tight, max_batch_size=5)
    results = answers(run(scheduler, case.prompts, ANSWER))
    assert scheduler.stats().preemptions > 0
    scheduler.stop()
    check_greedy(case.oracle, case.prompts, results, ANSWER)


def test_fp8(tmp_path: Path) -> None:
    """Matrices in FP8 with a scale for each 128 x 128 block, beside those that such checkpoints keep. Products round their input to bfloat16."""
    oracle = write_tiny(tmp_path, hidden_size=160, linear_key_head_dim=32, linear_value_head_dim=32)
    write_fp8(tmp_path, oracle)
    for prompt in (prompt_of(length, SIZES["vocab_size"]) for length in LENGTHS):
        check_close(torch.from_numpy(load(tmp_path).logits(prompt)), expected_logits(oracle, prompt), 0.03)


def test_bfloat16_rounds_no_more_than_transformers_does(case: Case) -> None:
    rounded = type(case.oracle).from_pretrained(case.path, dtype=torch.bfloat16).eval()
    engine = load(case.path, "bfloat16")

    def error(logits: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((logits.float() - wanted).square().mean().sqrt() / wanted.square().mean().sqrt())

    ours, theirs = [], []
    for prompt in case.prompts:
        wanted = expected_logits(case.oracle, prompt)
        engine.reset()
        ours.append(error(torch.from_numpy(engine.logits(prompt)), wanted))
        theirs.append(error(expected_logits(rounded, prompt), wanted))
    assert 0 < sum(ours) <= sum(theirs)


def test_a_difference_in_bfloat16_starts_where_two_ids_are_close() -> None:
    oracle = Qwen3_5ForCausalLM.from_pretrained(TRAINED, dtype=torch.float32).eval()
    engine = load(TRAINED, "bfloat16")
    for prompt in Case(TRAINED, oracle).prompts:
        engine.reset()
        text = prompt + engine.generate(prompt, ANSWER)
        best = expected_logits(oracle, text)[len(prompt) - 1 : -1].log_softmax(-1)  # [ANSWER, vocab_size]
        for scores, token in zip(best, text[len(prompt) :], strict=True):
            assert float(scores.max() - scores[token]) <= 0.1
