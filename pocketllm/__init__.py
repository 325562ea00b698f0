"""PocketLLM: one LLM API over two execution planes.

Names load on first use, so `import pocketllm` loads neither torch nor the native module.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pocketllm.async_llm import AsyncLLM
    from pocketllm.config import EngineArgs
    from pocketllm.errors import (
        BackendUnavailableError,
        ConfigurationError,
        PocketLLMError,
        RequestCancelledError,
        TensorParallelSupervisorError,
        UnsupportedFeatureError,
    )
    from pocketllm.llm import LLM
    from pocketllm.outputs import GenerationOutput, TokenEvent, Usage
    from pocketllm.sampling_params import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "async_llm",
    "BackendUnavailableError": "errors",
    "ConfigurationError": "errors",
    "EngineArgs": "config",
    "GenerationOutput": "outputs",
    "LLM": "llm",
    "PocketLLMError": "errors",
    "RequestCancelledError": "errors",
    "SamplingParams": "sampling_params",
    "TensorParallelSupervisorError": "errors",
    "TokenEvent": "outputs",
    "UnsupportedFeatureError": "errors",
    "Usage": "outputs",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BackendUnavailableError",
    "ConfigurationError",
    "EngineArgs",
    "GenerationOutput",
    "PocketLLMError",
    "RequestCancelledError",
    "SamplingParams",
    "TensorParallelSupervisorError",
    "TokenEvent",
    "UnsupportedFeatureError",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'pocketllm' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"pocketllm.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
