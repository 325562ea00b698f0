"""transformers' Qwen3.5 in plain torch, without flash-linear-attention. Tests take the classes from here, before anything else imports them.

Where that package is installed, transformers takes its kernels when the module of the model is imported, for tensors on a CPU too, where they can't run.
An oracle in float32 also wants the plain formulas.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def _import_model(name: str) -> ModuleType:
    kept = sys.modules.get("fla")
    sys.modules["fla"] = None  # type: ignore[assignment]  # an import then fails, as it does without the package
    try:
        return importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    finally:
        del sys.modules["fla"]
        if kept is not None:
            sys.modules["fla"] = kept


_dense = _import_model("qwen3_5")
Qwen3_5ForCausalLM = _dense.Qwen3_5ForCausalLM
Qwen3_5ForConditionalGeneration = _dense.Qwen3_5ForConditionalGeneration
Qwen3_5MoeForCausalLM = _import_model("qwen3_5_moe").Qwen3_5MoeForCausalLM
