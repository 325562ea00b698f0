"""llama.cpp, through its own benchmark programs llama-bench and llama-batched-bench, which lie in one folder."""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from pocketllm.bench.hardware import peak_rss
from pocketllm.bench.sides.base import Side, Spec, Timing
from pocketllm.errors import ConfigurationError

_PATIENCE = 600  # seconds of one program
_FACTS = ("build_number", "model_type", "model_size", "n_batch", "n_ubatch", "type_k", "type_v", "backends", "repack")


class LlamaBenchSide(Side):
    """See Side. Each sample is a run of a program, which warms up and leaves loading out by itself.

    Args:
        spec: what it loads.
        bench: path of llama-bench.

    Raises:
        ConfigurationError: one of the programs is missing, or fails.
    """

    name = "llama.cpp"

    def __init__(self, spec: Spec, bench: Path) -> None:
        super().__init__(spec)
        self._bench, self._batched = bench, bench.with_name("llama-batched-bench")
        for program in (self._bench, self._batched):
            if not program.is_file():
                raise ConfigurationError(f"{program} not found: build it with scripts/build_llama_cpp.sh, or name another with --peer PATH/llama-bench.")
        layers = "0" if spec.device == "cpu" else "999"
        self._common = ["-m", str(spec.model), "-t", str(spec.threads), "-ngl", layers]
        self._facts: dict[str, Any] = {}
        self.peak_rss = 0

    @property
    def vocab_size(self) -> int:
        raise NotImplementedError("llama-bench draws its own prompts")

    @property
    def facts(self) -> dict[str, Any]:
        return {**self._facts, "peak_rss_bytes": self.peak_rss or None}

    def prefill(self, rows: int, tokens: int) -> Timing:
        """llama-bench -p, or for several rows llama-batched-bench's time of the prompts."""
        if rows > 1:
            return Timing(rows * tokens, float(self._batch(rows, tokens, 1)["t_pp"]))
        return self._single(tokens, 0)

    def decode(self, rows: int, context: int, steps: int) -> Timing:
        """llama-bench -n behind a context of -d ids, or for several rows llama-batched-bench's time of the answers."""
        if rows > 1:
            return Timing(rows * steps, float(self._batch(rows, context, steps)["t_tg"]))
        return self._single(0, steps, context)

    def whole(self, rows: int, prompt: int, answer: int) -> Timing:
        return Timing(rows * answer, float(self._batch(rows, prompt, answer)["t"]))

    def _single(self, prompt: int, answer: int, depth: int = 0) -> Timing:
        (row,) = json.loads(self._run(self._bench, ["-p", str(prompt), "-n", str(answer), "-d", str(depth), "-r", "1", "-o", "json"]))
        self._facts = {key: row.get(key) for key in _FACTS}
        return Timing(prompt + answer, (prompt + answer) / float(row["avg_ts"]))

    def _batch(self, rows: int, prompt: int, answer: int) -> dict[str, Any]:
        shape = ["-npp", str(prompt), "-ntg", str(answer), "-npl", str(rows)]
        text = self._run(self._batched, ["-c", str(rows * (prompt + answer)), "-b", "2048", "-ub", "512", *shape, "--output-format", "jsonl"])
        result: dict[str, Any] = json.loads(next(line for line in text.splitlines() if line.startswith("{")))
        return result

    def _run(self, program: Path, arguments: list[str]) -> str:
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            process = subprocess.Popen([str(program), *self._common, *arguments], stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            deadline = time.monotonic() + _PATIENCE
            while process.poll() is None:
                self.peak_rss = max(self.peak_rss, peak_rss(process.pid) or 0)
                if time.monotonic() > deadline:
                    process.kill()
                    process.wait()
                    raise ConfigurationError(f"{program.name} took more than ten minutes and was stopped: measure a smaller model or fewer tokens.")
                time.sleep(0.05)
            out.seek(0)
            err.seek(0)
            if process.returncode != 0:
                last = (err.read().strip().splitlines() or ["it said nothing"])[-1]
                raise ConfigurationError(f"{program.name} ended with {process.returncode}: {last}")
            return out.read()
