"""The one place that reads or sets environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

PREFIX = "POCKETLLM_"


def options(names: Iterable[str]) -> dict[str, str]:
    """Values of POCKETLLM_<NAME> for each of `names` that is set and not empty, keyed by the name in lower case."""
    found = {name: os.environ.get(PREFIX + name.upper(), "") for name in names}
    return {name: value for name, value in found.items() if value}


def api_key() -> str | None:
    """POCKETLLM_API_KEY, or None when it is unset or empty."""
    return os.environ.get(PREFIX + "API_KEY") or None


def cache_dir() -> Path:
    """Where downloaded models live: POCKETLLM_CACHE, else $XDG_CACHE_HOME/pocketllm, else ~/.cache/pocketllm.

    Raises:
        RuntimeError: it is in the home directory, and there is none.
    """
    explicit = os.environ.get(PREFIX + "CACHE")
    if explicit:
        return Path(os.path.expanduser(explicit))
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pocketllm"


def rest_openmp_threads() -> None:
    """Let OpenMP's threads sleep between operators instead of spinning, unless the user has said otherwise. Works before torch is imported."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
