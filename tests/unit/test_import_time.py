"""`import pocketllm` is light: neither torch nor the native module, and quick."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT = 0.3  # seconds of a processor


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "code",
    [
        "import pocketllm",
        "import pocketllm; pocketllm.EngineArgs(); pocketllm.SamplingParams(); pocketllm.LLM; pocketllm.AsyncLLM",
        "import pocketllm.protocol.chat, pocketllm.protocol.fields, pocketllm.protocol.responses",
        "import pocketllm.server.app, pocketllm.server.run, pocketllm.generation",
        "import pocketllm.cli.main",
    ],
)
def test_neither_torch_nor_the_native_module_is_loaded(code: str) -> None:
    assert python(f"{code}\nimport sys\nprint([name for name in ('torch', 'pocketllm_cpp') if name in sys.modules])") == "[]"


def test_import_is_quick() -> None:
    timed = "import time; start = time.process_time(); import pocketllm; print(time.process_time() - start)"
    assert min(float(python(timed)) for _ in range(5)) < LIMIT


def test_every_public_name_loads() -> None:
    assert python("import pocketllm; print(all(getattr(pocketllm, name) is not None for name in pocketllm.__all__))") == "True"
    with pytest.raises(subprocess.CalledProcessError) as caught:
        python("import pocketllm; pocketllm.nothing")
    assert "module 'pocketllm' has no attribute 'nothing'" in caught.value.stderr
