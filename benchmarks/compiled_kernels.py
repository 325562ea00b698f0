"""How many kernels Triton compiles: none should be while answers are waited for."""

from __future__ import annotations

from typing import Any


class CompiledKernels:
    """Counts kernels from now on that Triton compiles or takes from its cache on the disk; without Triton there are none."""

    def __init__(self) -> None:
        self._names: list[str] = []
        try:
            from triton import knobs
        except ImportError:
            return
        knobs.runtime.jit_post_compile_hook = self._add

    def take(self) -> list[str]:
        """Names of those since the last call."""
        names, self._names = self._names, []
        return names

    def _add(self, *, fn: Any, **_rest: Any) -> None:
        self._names.append(fn.name)
