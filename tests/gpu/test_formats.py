"""FP8 and GGUF checkpoints on the GPU, against transformers on the numbers that they hold."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from tests.gpu.door import ask, check, opened
from tests.models.test_fp8 import VARIANTS as FP8_VARIANTS
from tests.models.test_fp8 import save_fp8
from tests.models.test_gguf import VARIANTS as GGUF_VARIANTS
from tests.models.test_gguf import WIDE, save
from tests.models.tiny import PROMPTS, Variant
from tests.models.tiny_qwen3_5 import write_tiny, write_tiny_gguf, write_tiny_moe

pytestmark = pytest.mark.gpu

COUNT = 24
# hidden_size and intermediate_size of whole blocks of 256 weights, which the K types and IQ4_XS have
LARGE = {**WIDE, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
TYPES = ("F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
BLOCKS_OF_32 = ("Q4_0", "Q8_0")


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 0.01)])
@pytest.mark.parametrize("variant", FP8_VARIANTS, ids=lambda variant: variant.name)
def test_fp8(variant: Variant, dtype: str, tolerance: float, device: str, tmp_path: Path) -> None:
    if device == "cpu" and dtype != "float32":
        pytest.skip("16-bit compute on a CPU is tested elsewhere")
    oracle = save_fp8(variant, tmp_path)
    with opened(tmp_path, device, dtype, prefill_chunk_tokens=24) as backend:
        check(oracle, PROMPTS, ask(backend, PROMPTS, COUNT), COUNT, tolerance, is_greedy=dtype == "float32")


@pytest.mark.parametrize("matrix_type", BLOCKS_OF_32)
@pytest.mark.parametrize("variant", GGUF_VARIANTS, ids=lambda variant: variant.name)
def test_gguf(variant: Variant, matrix_type: str, device: str, tmp_path: Path) -> None:
    checkpoint, oracle = save(variant, tmp_path, matrix_type)
    with opened(checkpoint, device, prefill_chunk_tokens=24) as backend:
        check(oracle, PROMPTS, ask(backend, PROMPTS, COUNT), COUNT)


@pytest.mark.parametrize("matrix_type", TYPES)
def test_gguf_types(matrix_type: str, device: str, tmp_path: Path) -> None:
    checkpoint, oracle = save(Variant("qwen3", "qwen3", LARGE), tmp_path, matrix_type)
    with opened(checkpoint, device, prefill_chunk_tokens=24) as backend:
        check(oracle, PROMPTS, ask(backend, PROMPTS, COUNT), COUNT)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("float16", 0.01)])
@pytest.mark.parametrize("matrix_type", BLOCKS_OF_32)
@pytest.mark.parametrize("write", [write_tiny, write_tiny_moe], ids=["qwen3_5", "qwen3_5_moe"])
def test_hybrid_gguf(write: Callable[..., Any], matrix_type: str, dtype: str, tolerance: float, device: str, tmp_path: Path) -> None:
    if device == "cpu" and dtype != "float32":
        pytest.skip("16-bit compute on a CPU is tested elsewhere")
    # value heads of whole blocks of 32 weights, as llama.cpp's order of the heads moves the columns of a matrix
    sizes = {"hidden_size": 64, "linear_num_value_heads": 4, "linear_value_head_dim": 32, **({"intermediate_size": 96} if write is write_tiny else {})}
    model = write(tmp_path / "plain", **sizes)
    path = tmp_path / "model.gguf"
    write_tiny_gguf(path, model, gguf.GGMLQuantizationType[matrix_type])
    with opened(path, device, dtype, prefill_chunk_tokens=24) as backend:
        check(model, PROMPTS, ask(backend, PROMPTS, COUNT), COUNT, tolerance, is_greedy=dtype == "float32")
