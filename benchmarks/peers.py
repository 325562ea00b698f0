"""The engines that PocketLLM is measured against, each run through its own benchmark program."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pocketllm.bench.hardware import peak_rss


class PeerError(Exception):
    """The peer's program is missing, failed, or printed something else than its result."""


@dataclass(frozen=True)
class Workload:
    """What is measured, in tokens: a long prompt, a long answer, and a batch of both."""

    prefill: int = 512
    decode: int = 128
    batch: int = 8
    batch_prompt: int = 128
    batch_decode: int = 128


class LlamaCpp:
    """llama.cpp, through llama-bench and llama-batched-bench, which lie in one folder.

    Args:
        bench: path of llama-bench.
        model: GGUF file.
        threads: threads of the peer, as of ours.

    Raises:
        PeerError: one of the programs is missing.
    """

    name = "llama.cpp"

    def __init__(self, bench: Path, model: Path, threads: int) -> None:
        self._bench, self._batched = bench, bench.with_name("llama-batched-bench")
        for program in (self._bench, self._batched):
            if not program.is_file():
                raise PeerError(f"{program} not found: build it with scripts/build_llama_cpp.sh, or pass --peer PATH/llama-bench.")
        self._common = ["-m", str(model), "-t", str(threads)]
        self.facts: dict[str, Any] = {}
        self.peak_rss = 0

    def measure(self, workload: Workload) -> dict[str, float]:
        """One sample of each measure, in tokens a second. Each program warms up by itself and leaves loading out.

        Raises:
            PeerError: a program failed or took more than ten minutes.
        """
        w = workload
        rows = json.loads(self._run(self._bench, ["-p", str(w.prefill), "-n", str(w.decode), "-r", "1", "-o", "json"]))
        rates = {(row["n_prompt"], row["n_gen"]): float(row["avg_ts"]) for row in rows}
        self.facts = {key: rows[0][key] for key in ("model_type", "model_size", "n_batch", "n_ubatch", "type_k", "type_v", "backends", "repack")}
        context = w.batch * (w.batch_prompt + w.batch_decode)
        shape = ["-npp", str(w.batch_prompt), "-ntg", str(w.batch_decode), "-npl", str(w.batch)]
        batched = self._run(self._batched, ["-c", str(context), "-b", "2048", "-ub", "512", *shape, "--output-format", "jsonl"])
        result = json.loads(next(line for line in batched.splitlines() if line.startswith("{")))
        return {"prefill": rates[w.prefill, 0], "decode": rates[0, w.decode], "batch": float(result["speed"])}

    def _run(self, program: Path, arguments: list[str]) -> str:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen([str(program), *self._common, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            deadline = time.monotonic() + 600
            while process.poll() is None:
                self.peak_rss = max(self.peak_rss, peak_rss(process.pid) or 0)
                if time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    raise PeerError(f"{program.name} took more than ten minutes and was stopped.")
                time.sleep(0.05)
            out.seek(0)
            err.seek(0)
            if process.returncode != 0:
                last = (err.read().strip().splitlines() or ["it said nothing"])[-1]
                raise PeerError(f"{program.name} ended with {process.returncode}: {last}")
            return out.read()
