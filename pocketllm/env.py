"""The one place that reads or sets environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def resting_openmp_threads(rest: bool) -> Iterator[None]:
    """Inside, a library that brings OpenMP learns that its threads should sleep between operators instead of spinning.

    OpenMP reads this once, when it is loaded. What the user has set is left alone, and children of this process see nothing of it.
    """
    if not rest or "OMP_WAIT_POLICY" in os.environ:
        yield
        return
    os.environ["OMP_WAIT_POLICY"] = "passive"
    try:
        yield
    finally:
        del os.environ["OMP_WAIT_POLICY"]


def variables(names: Iterable[str]) -> dict[str, str]:
    """Values of those of `names` that are set and not empty, such as a launcher's RANK."""
    return {name: value for name in names if (value := os.environ.get(name))}


def child_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """This process's environment for a child, with `changes`; None takes a variable out."""
    merged: dict[str, str | None] = {**os.environ, **changes}
    return {name: value for name, value in merged.items() if value is not None}
