"""A Hugging Face repo id to a path: which files of the repo are needed, and fetching them with huggingface_hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

from pocketllm.backends.base import LoadProgress, ProgressCallback
from pocketllm.errors import ConfigurationError

# What a safetensors checkpoint needs: no pickles, no other frameworks' weights, no images.
_CHECKPOINT_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer*.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)
_SHARD = re.compile(r"-\d{5}-of-\d{5}\.gguf$")


def fetch_repo(repo_id: str, choice: str | None, report: ProgressCallback) -> Path:
    """The snapshot directory of a safetensors repo, or one GGUF file of a repo that has them. Files in the cache are not fetched again.

    Args:
        repo_id: "org/name".
        choice: a .gguf file's name or a part of it, such as "Q4_K_M"; None takes safetensors, or the only GGUF file.
        report: called with a line for people before the download.

    Raises:
        ConfigurationError: the repo is unknown, gated or unreachable, or the choice is not clear.
    """
    try:
        # One request without retries, so that a machine without a network hears of it at once.
        files = [sibling.rfilename for sibling in HfApi().model_info(repo_id, timeout=20).siblings or []]
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise _refused(repo_id, error) from None
    except Exception as error:  # httpx, OSError and the library's own: whatever it is, the cache is the next place to look
        return _cached(repo_id, choice, error, report)
    filename = pick_gguf(repo_id, files, choice, f"huggingface.co/{repo_id}")
    try:
        if filename is not None:
            report(LoadProgress(0.0, f"fetching {filename} from huggingface.co/{repo_id}"))
            return Path(hf_hub_download(repo_id, filename))
        report(LoadProgress(0.0, f"fetching huggingface.co/{repo_id}"))
        return Path(snapshot_download(repo_id, allow_patterns=list(_CHECKPOINT_FILES)))
    except Exception as error:  # as above; a full disk and a lost connection arrive here too
        raise _refused(repo_id, error) from None


def pick_gguf(repo_id: str, files: Sequence[str], choice: str | None, place: str) -> str | None:
    """The .gguf file to take from `files`, or None for a safetensors checkpoint. `place` is where the files are, for people.

    Raises:
        ConfigurationError: no file or several fit.
    """
    ggufs = sorted(file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower())
    if choice is None:
        if any(file.endswith(".safetensors") for file in files):
            return None
        if not ggufs:
            raise ConfigurationError(f"{place} has neither .safetensors nor .gguf files: choose another repo.", param="model")
        fitting = ggufs
    else:
        # The whole name, else a whole word of it: "Q4_K" must not take "Q4_K_M".
        word = re.compile(rf"(?<![A-Za-z0-9_]){re.escape(choice)}(?![A-Za-z0-9_])", re.IGNORECASE)
        fitting = [file for file in ggufs if file == choice] or [file for file in ggufs if word.search(file)]
        if not fitting:
            listed = ", ".join(ggufs) or "no .gguf file"
            raise ConfigurationError(f"{place} has no .gguf file for {choice!r}; it has {listed}.", param="model")
    if len(fitting) > 1:
        raise ConfigurationError(f"{place} has {len(fitting)} fitting .gguf files: choose one as {repo_id}:FILE from {', '.join(fitting)}.", param="model")
    if _SHARD.search(fitting[0]):
        raise ConfigurationError(f"{fitting[0]} of {place} is one part of several: choose a file that is whole.", param="model")
    return fitting[0]


def _cached(repo_id: str, choice: str | None, error: Exception, report: ProgressCallback) -> Path:
    """What an earlier run fetched, when the hub can't be reached."""
    try:
        # No patterns: what is missing is judged below, by what this call needs.
        snapshot = Path(snapshot_download(repo_id, allow_patterns=[], local_files_only=True))
    except (OSError, ValueError):
        raise _refused(repo_id, error) from None
    files = [file.relative_to(snapshot).as_posix() for file in snapshot.rglob("*") if file.is_file()]
    if not any(file.endswith((".safetensors", ".gguf")) for file in files):
        raise _refused(repo_id, error)
    filename = pick_gguf(repo_id, files, choice, f"huggingface.co can't be reached, and the cached {repo_id}")
    report(LoadProgress(0.0, f"huggingface.co can't be reached: using the cached {repo_id}"))
    return snapshot if filename is None else snapshot / filename


def _refused(repo_id: str, error: Exception) -> ConfigurationError:
    if isinstance(error, GatedRepoError):
        message = f"huggingface.co/{repo_id} is gated: accept its terms on the site and set HF_TOKEN, or give a local path as --model."
    elif isinstance(error, RepositoryNotFoundError):
        message = f"huggingface.co/{repo_id} does not exist or is private: check its spelling, set HF_TOKEN if it is yours, or give a local path as --model."
    elif isinstance(error, HFValidationError):
        message = f'"model" = {repo_id!r} is no Hugging Face repo id: send "org/name" or a local path.'
    else:
        reason = " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
        message = f"huggingface.co/{repo_id} could not be fetched ({reason}): check the network, or give a local path as --model."
    return ConfigurationError(message, param="model")
