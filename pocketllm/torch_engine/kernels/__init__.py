"""Kernels of the torch plane."""

from __future__ import annotations

from pathlib import Path

NATIVE_LIBRARY = Path(__file__).with_name("libpocketllm_native.so")  # where the build puts it
