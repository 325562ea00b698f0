"""Leaving Python while the engine computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pocketllm import LLM, EngineArgs, SamplingParams
llm = LLM(EngineArgs(model=sys.argv[1], max_model_len=1024, backend_options={"num_threads": 1}))
stream = llm.generate_stream("Once upon a time " * int(sys.argv[2]), SamplingParams(max_tokens=200, temperature=0))
sys.modules["kept"] = stream  # nothing closes or collects it
if sys.argv[2] == "1":
    next(stream)
print("leaving")
"""


@pytest.mark.parametrize("repeats", [1, 150], ids=["decode", "prefill"])
def test_leaving_in_the_middle_of_an_answer_is_clean(default_model: Path, repeats: int) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(default_model), str(repeats)], capture_output=True, text=True, timeout=120, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "leaving\n", "")
