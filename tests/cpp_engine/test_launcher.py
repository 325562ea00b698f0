"""pocketllm_engine, as it is called from a shell."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cpp_engine.conftest import TRAINED
from tests.server_process import ServerProcess

ENGINE = ["--dtype", "float32", "--num-threads", "1", "--max-model-len", "512"]


def call(launcher: str, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([launcher, *words], input=stdin, capture_output=True, text=True, timeout=120, check=False)


def test_help_teaches(launcher: str) -> None:
    done = call(launcher, "--help")
    assert done.returncode == 0
    for command in ("audit", "generate", "persistent", "bench", "serve"):
        assert command in done.stdout
        helped = call(launcher, command, "--help")
        assert (helped.returncode, helped.stderr) == (0, "")
        assert helped.stdout.startswith("usage: pocketllm_engine")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fly"], 'pocketllm_engine has no command "fly": it has audit, generate, persistent, bench and serve.'),
        (["generate", "x", "--tokens", "1", "--temprature", "1"], "pocketllm_engine generate has no flag --temprature: it has --tokens, "),
        (["generate", "x", "--tokens"], "--tokens lacks its value, IDS."),
        (["generate", "x", "--tokens", "1,b"], "--tokens = 1,b is not valid: send token ids such as 1,2,3."),
        (["generate", "--tokens", "1"], "pocketllm_engine generate needs CHECKPOINT: see --help."),
        (["generate", "x", "y"], 'pocketllm_engine generate takes no argument "y": see --help.'),
        (["generate", "x", "--tokens", "1", "--max-new-tokens", "0"], "--max-new-tokens = 0 is not valid: send a whole number of at least 1."),
        (["bench"], "pocketllm_engine bench needs a CHECKPOINT or a --shape, and not both."),
        (["bench", "--shape", "qwen9"], "--shape = qwen9 is no shape: there are qwen3.5-0.8b, qwen3.5-2b, "),
        (["bench", "x", "--context", "16,2147483647"], "--context = 16,2147483647 is not valid: send whole numbers from 1 to 16777216, such as 1,8,32."),
        (["--serve"], "pocketllm_engine --serve needs a MODEL first"),
        (["audit", "x", "--kv-cache-memory", "lots"], "--kv-cache-memory = lots is not valid: send bytes, or a number with a unit such as 512MiB or 2GiB."),
    ],
)
def test_what_it_does_not_know_is_refused(launcher: str, words: list[str], says: str) -> None:
    done = call(launcher, *words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1


def test_generate(launcher: str, engine: Any, prompt_tokens: list[int]) -> None:
    tokens = ",".join(map(str, prompt_tokens))
    done = call(launcher, "generate", str(TRAINED), "--tokens", tokens, *ENGINE)
    assert (done.returncode, done.stderr) == (0, "")
    ids = list(map(int, done.stdout.split()))
    assert ids == engine.generate(prompt_tokens, len(ids))
    piped = call(launcher, "generate", str(TRAINED), "--tokens", "-", "--ignore-eos", "--max-new-tokens", "9", "--json", *ENGINE, stdin=tokens)
    result = json.loads(piped.stdout)
    assert result["token_ids"] == engine.generate(prompt_tokens, 9)
    assert (result["finish_reason"], result["prompt_tokens"], result["completion_tokens"]) == ("length", len(prompt_tokens), 9)


def test_persistent(launcher: str, engine: Any, prompt_tokens: list[int]) -> None:
    lines: list[Any] = [
        {"id": "a", "token_ids": prompt_tokens, "max_new_tokens": 4, "stream": True},
        {"id": "b", "token_ids": [*prompt_tokens, 5], "max_new_tokens": 3, "stop_token_ids": [], "logprobs": 1},
        {"id": "c", "token_ids": [1], "max_tokens": 3},
        {"id": "d"},
        {"id": "e", "token_ids": [10**8]},
        {"id": "f", "token_ids": [1], "top_p": 0},
    ]
    stdin = "".join(json.dumps(line) + "\n" for line in lines) + "\nnot json\n"
    done = call(launcher, "persistent", str(TRAINED), *ENGINE, stdin=stdin)
    assert (done.returncode, done.stderr) == (0, "")
    ready, *answers = map(json.loads, done.stdout.splitlines())
    assert ready["ready"] is True
    assert ready["vocab_size"] == engine.config.vocab_size
    streamed = [answer["token_id"] for answer in answers if "token_id" in answer]
    results = {answer["id"]: answer for answer in answers if "token_ids" in answer}
    assert streamed == results["a"]["token_ids"] == engine.generate(prompt_tokens, len(streamed))
    assert results["b"]["cached_tokens"] > 0
    assert len(results["b"]["logprobs"]) == 3
    faults = {answer["id"]: answer["error"] for answer in answers if "error" in answer}
    assert faults["c"]["field"] == "max_tokens"
    assert "there are id, token_ids, max_new_tokens" in faults["c"]["message"]
    assert [faults[id_]["field"] for id_ in "def"] == ["token_ids", "tokens", "top_p"]
    assert faults[""] == {"message": "The line is not valid JSON (no value, at byte 0): send one JSON object.", "field": None}


def test_audit(launcher: str, engine: Any) -> None:
    done = call(launcher, "audit", str(TRAINED))
    assert done.returncode == 0, done.stdout
    assert "architecture: qwen3_5_text\n" in done.stdout
    assert f"vocabulary: {engine.config.vocab_size} ids\n" in done.stdout
    assert done.stdout.endswith("ok: the engine runs it\n")


def with_nan(directory: Path) -> None:
    """Two tensors of bfloat16 get a NaN in place of their first value."""
    data = bytearray((directory / "model.safetensors").read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    names = [name for name in header if name.endswith(("down_proj.weight", "model.norm.weight"))][:2]
    for name in names:
        start = 8 + length + header[name]["data_offsets"][0]
        data[start : start + 2] = b"\xff\x7f"
    (directory / "model.safetensors").write_bytes(data)


def without_config(directory: Path) -> None:
    (directory / "config.json").unlink()


def truncated(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(("spoil", "problems"), [(with_nan, 2), (without_config, 1), (truncated, 1)])
def test_audit_finds_what_is_wrong(launcher: str, spoil: Any, problems: int, tmp_path: Path) -> None:
    directory = tmp_path / "copy"
    shutil.copytree(TRAINED, directory)
    spoil(directory)
    done = call(launcher, "audit", str(directory))
    assert done.returncode == 1
    found = [line for line in done.stdout.splitlines() if line.startswith("problem: ")]
    assert len(found) == problems, done.stdout
    assert all(str(directory) in line for line in found)


def test_bench(launcher: str, tmp_path: Path) -> None:
    sizes = ["--prefill", "32,64", "--batch-sizes", "1,3", "--context", "16", "--decode-tokens", "8", "--repeats", "2", "--num-threads", "1"]
    done = call(launcher, "bench", "--shape", "tiny", "--scratch", str(tmp_path), "--json", *sizes)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["read_bytes_per_second"] > 1e8
    assert [(one["kind"], one["batch_size"], one["context"]) for one in found["measures"]] == [
        ("prefill", 1, 32),
        ("prefill", 1, 64),
        ("decode", 1, 16),
        ("decode", 3, 16),
    ]
    for one in found["measures"]:
        assert len(one["samples"]) == 2
        assert min(one["samples"]) > 0
        assert ("limit_tokens_per_second" in one) == (one["kind"] == "decode")
    assert list(tmp_path.iterdir()) == []  # the random weights are gone
    table = call(launcher, "bench", str(TRAINED), *sizes)
    assert table.returncode == 0, table.stderr
    assert "memory is read at" in table.stdout


def test_serve_starts_the_one_server(launcher: str) -> None:
    import httpx

    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # for a launcher in a build tree, which has no python beside it
    server = ServerProcess(
        "-c", f"import os; os.environ['PATH'] = {path!r}; os.execv({launcher!r}, [{launcher!r}, '--serve', {str(TRAINED)!r}, '--port', '0'])"
    )
    try:
        url = server.wait_for(r"is ready at (http\S+)", 60)
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "What is 2+2?"}], "temperature": 0}, timeout=60)
        assert answer.json()["choices"][0]["message"]["content"].strip() == "4"
    finally:
        server.kill()
