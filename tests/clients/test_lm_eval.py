"""lm-eval on local data: its local-completions gets the log-likelihoods of its own hf model on the same weights, on both planes, by texts and by ids."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from lm_eval.api.task import ConfigurableTask
from lm_eval.evaluator import evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.models.openai_completions import LocalCompletionsAPI

from tests.server_process import ONE_THREAD, serve, wait_until_ready

TRAINED = Path(__file__).resolve().parents[1] / "models" / "tiny_qwen3_5_trained"
QUESTION = "<|im_start|>user\nWhat is 17+25?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
# Contexts and what may follow: the right answer, a wrong one, text that the model has not seen, more than a chunk of it, and a context that others begin with.
SAMPLES = [
    (f"{QUESTION}4", "2"),
    (f"{QUESTION}4", "1"),
    (QUESTION, "42<|im_end|>"),
    ("Repeat:", " the yellow house by the river"),
    ("Repeat:", " the yellow house by the river, ñandú ☃"),
    ("a b c " * 60, "d e f " * 20),
    ("x", "y"),
]


@pytest.fixture(scope="module")
def expected() -> list[tuple[float, bool]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found = likelihoods(HFLM(pretrained=str(TRAINED), dtype="float32", device="cpu", batch_size=1))
    torch.set_num_threads(threads)
    return found


@pytest.fixture(scope="module", params=["torch", "cpp"])
def served(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server on a plane, which computes prompts in chunks and would reuse their prefixes."""
    if request.param == "cpp" and importlib.util.find_spec("pocketllm_cpp") is None:
        pytest.skip("the native module is not built: build it with scripts/build_native.sh")
    options = ("--dtype", "float32", "--max-model-len", 1024, "--prefill-chunk-tokens", 64, *ONE_THREAD)
    server = serve("--model", TRAINED, "--backend", request.param, *options)
    try:
        yield f"{wait_until_ready(server)}/v1/completions"
    finally:
        server.kill()


def likelihoods(model: Any) -> list[tuple[float, bool]]:
    """lm-eval's log-likelihood of each sample, and whether a greedy answer would be that."""
    rows = [{"context": context, "continuation": continuation} for context, continuation in SAMPLES]
    task = {
        "task": "local",
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(rows)},
        "test_split": "test",
        "output_type": "loglikelihood",
        "doc_to_text": "{{context}}",
        "doc_to_target": "{{continuation}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    # Not `simple_evaluate`, which reads the thousands of tasks that come with lm-eval, and asks the machine what is installed.
    results = evaluate(model, {"tasks": {"local": ConfigurableTask(config=task)}, "groups": {}, "group_map": {}}, log_samples=True, bootstrap_iters=0)
    samples = sorted(results["samples"]["local"], key=lambda sample: sample["doc_id"])
    return [tuple(sample["filtered_resps"][0]) for sample in samples]


@pytest.mark.parametrize(("tokenized", "batch_size"), [(True, 3), (False, 1)], ids=["ids", "strings"])
def test_likelihoods_are_those_of_transformers(served: str, expected: list[tuple[float, bool]], tokenized: bool, batch_size: int) -> None:
    client = LocalCompletionsAPI(
        base_url=served, model=TRAINED.name, tokenizer=str(TRAINED), tokenizer_backend="huggingface", tokenized_requests=tokenized, batch_size=batch_size
    )
    found = likelihoods(client)
    assert len(found) == len(SAMPLES)
    for (value, is_greedy), (wanted, wanted_greedy), sample in zip(found, expected, SAMPLES, strict=True):
        assert value == pytest.approx(wanted, abs=1e-3), sample
        assert is_greedy == wanted_greedy, sample
    assert expected[0][0] > expected[1][0], "the model knows the answer"
    assert expected[0][1]
