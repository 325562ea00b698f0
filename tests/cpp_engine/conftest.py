"""Tests of the native engine through its Python module and its launcher, on the trained checkpoint. Without the module they are skipped."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pocketllm.checkpoint import open_checkpoint
from pocketllm.text.tokenizer import Tokenizer, load_tokenizer

TRAINED = Path(__file__).resolve().parents[1] / "models" / "tiny_qwen3_5_trained"
BUILD = "build it with scripts/build_native.sh"


@pytest.fixture(scope="session")
def native() -> Any:
    if importlib.util.find_spec("pocketllm_cpp") is None:
        pytest.skip(f"the native module is not built: {BUILD}")
    return importlib.import_module("pocketllm_cpp")  # one that is there and can't be imported is a failure


@pytest.fixture(scope="session")
def checkpoint() -> str:
    return str(TRAINED)


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return load_tokenizer(open_checkpoint(TRAINED))


@pytest.fixture(scope="session")
def prompt_tokens(tokenizer: Tokenizer) -> list[int]:
    """A question that the model answers in a few tokens."""
    text = "<|im_start|>user\nWhat is 17+25?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    return tokenizer.backend.encode(text, add_special_tokens=False).ids


def options(native: Any, **more: Any) -> Any:
    return native.QwenEngineOptions(**{"dtype": "float32", "num_threads": 1, "max_batch_size": 4, "max_model_len": 512, **more})


@pytest.fixture(scope="module")
def shared_engine(native: Any, checkpoint: str) -> Any:
    return native.QwenEngine(checkpoint, options(native))


@pytest.fixture
def engine(shared_engine: Any) -> Any:
    """An engine with an empty session, and no scheduler."""
    shared_engine.reset()
    return shared_engine


@pytest.fixture
def scheduler(native: Any, engine: Any) -> Iterator[Any]:
    scheduler = native.QwenBatchScheduler(engine, max_batch_size=4)
    yield scheduler
    scheduler.stop()


@pytest.fixture(scope="session")
def launcher(native: Any) -> str:
    """The program pocketllm_engine: beside this Python, on the path, or in the build tree of the module."""
    places = [Path(sys.executable).parent / "pocketllm_engine", Path(native.__file__).parents[1] / "launcher" / "pocketllm_engine"]
    found = next((str(place) for place in places if place.exists()), None) or shutil.which("pocketllm_engine")
    if found is None:
        pytest.skip(f"pocketllm_engine is not built: {BUILD}")
    return found
