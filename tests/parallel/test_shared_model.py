"""Two and three ranks of each plane on the CPU give what one gives: ids, draws, log probabilities, masks."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import pytest

from pocketllm.backends.select import select_backend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import UnsupportedFeatureError
from tests.models.test_fp8 import save_fp8
from tests.models.tiny import Variant
from tests.models.tiny_qwen3_5 import EXPERTS, write_tiny, write_tiny_gguf
from tests.models.variants import VARIANTS
from tests.server_process import ROOT

TRAINED = ROOT / "tests/models/tiny_qwen3_5_trained"
BY_NAME = {variant.name: variant for variant in VARIANTS}
THIRDS = Variant("llama", "llama", {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96, "attention_bias": True, "mlp_bias": True})


GGUF_SIZES = {"hidden_size": 64, "intermediate_size": 128, "linear_num_value_heads": 4, "linear_value_head_dim": 32}  # halves are whole blocks of 32


def in_gguf(directory: Path) -> Path:
    write_tiny_gguf(directory / "model.gguf", write_tiny(directory / "plain", **GGUF_SIZES), gguf.GGMLQuantizationType.Q8_0)
    return directory / "model.gguf"


def in_fp8(directory: Path) -> Path:
    save_fp8(
        Variant("llama", "llama", {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}), directory
    )
    return directory


def saved(variant: Variant) -> Callable[[Path], Path]:
    def save(directory: Path) -> Path:
        variant.save(directory)
        return directory

    return save


def hybrid(directory: Path, **sizes: Any) -> Path:
    write_tiny(directory, **sizes)
    return directory


# name -> ranks, checkpoint, options
CASES: dict[str, tuple[int, Callable[[Path], Path], dict[str, Any]]] = {
    "trained": (2, lambda directory: TRAINED, {}),
    "trained-float16": (2, lambda directory: TRAINED, {"dtype": "auto"}),
    "llama-thirds": (3, saved(THIRDS), {}),
    "gemma3": (2, saved(BY_NAME["gemma3-untied-scaled-capped"]), {}),
    "qwen3-moe": (2, saved(BY_NAME["qwen3-moe"]), {}),
    "qwen3_5-moe": (2, lambda directory: hybrid(directory, **EXPERTS), {}),
    "qwen3_5-gguf": (2, in_gguf, {}),
    "fp8": (2, in_fp8, {}),
}
HYBRID_THIRDS = {
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 6,
    "linear_value_head_dim": 16,
    "intermediate_size": 96,
}
if importlib.util.find_spec("pocketllm_cpp") is not None:  # built by scripts/build_native.sh
    CASES |= {
        "native-trained": (2, lambda directory: TRAINED, {"backend": "cpp"}),
        "native-thirds": (3, lambda directory: hybrid(directory, **HYBRID_THIRDS), {"backend": "cpp"}),
    }


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers of every case by ranks and by one rank alone, computed by three processes one after another."""
    cases = []
    for name, (size, make, options) in CASES.items():
        directory = tmp_path_factory.mktemp(name)
        (directory / "run").mkdir()
        cases.append({"path": str(make(directory)), "size": size, "directory": str(directory / "run"), "options": options})
    output = tmp_path_factory.mktemp("answers") / "answers.json"
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # a native module may be in a build tree
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    program = [sys.executable, str(Path(__file__).with_name("rank_program.py"))]
    ranks = [subprocess.Popen([*program, str(rank), json.dumps(cases), str(output)], env=environment, cwd=ROOT) for rank in range(3)]
    try:
        assert [rank.wait(240) for rank in ranks] == [0, 0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    return dict(zip(CASES, json.loads(output.read_text()), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_ranks_answer_as_one_does(name: str, computed: dict[str, Any]) -> None:
    shared, alone = computed[name]["shared"], computed[name]["alone"]
    tolerance = 1e-4 if CASES[name][2].get("dtype") is None else 2e-3  # cached keys and values are float16
    assert shared.keys() == alone.keys()
    for row, expected in alone.items():
        assert shared[row]["ids"] == expected["ids"], row
        assert shared[row]["finish"] == expected["finish"], row
        for found, wanted in zip(shared[row]["logprobs"], expected["logprobs"], strict=True):
            assert found[0] == pytest.approx(wanted[0], abs=tolerance), row
            assert [one[0] for one in found[1:]] == [one[0] for one in wanted[1:]], row
            assert [one[1] for one in found[1:]] == pytest.approx([one[1] for one in wanted[1:]], abs=tolerance), row
    assert len(shared["held greedy"]["ids"]) > 0
    assert len(shared["scored"]["logprobs"]) == 69
    assert shared["held to nothing"]["finish"] == "error"


@pytest.mark.parametrize("backend", ["torch", "cpp"])
@pytest.mark.parametrize(
    ("size", "key", "possible"),
    [(3, "num_attention_heads = 4", "1, 2"), (4, "num_key_value_heads = 2", "1, 2")],
)
def test_heads_that_do_not_divide_are_refused_by_name(size: int, key: str, possible: str, backend: Literal["torch", "cpp"]) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f'"tensor_parallel_size" = {size} does not divide {key} of .*: send one of {possible}\\.') as caught:
        select_backend(EngineArgs(tensor_parallel_size=size, backend=backend), open_checkpoint(TRAINED))
    assert caught.value.param == "tensor_parallel_size"
