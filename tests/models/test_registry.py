"""The models and the list of them that is read without torch."""

from __future__ import annotations

from pocketllm.backends.select import TORCH_ARCHITECTURES
from pocketllm.torch_engine.models.registry import MODELS


def test_both_lists_agree() -> None:
    assert set(MODELS) == set(TORCH_ARCHITECTURES)
