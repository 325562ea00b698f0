"""The strings of a checkpoint's special tokens, for its chat template."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pocketllm.checkpoint import Checkpoint
from pocketllm.errors import ConfigurationError
from pocketllm.gguf_file import GGUFFile
from pocketllm.hf_config import read_json


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Strings that a template may write; None where the checkpoint has none."""

    bos_token: str | None = None
    eos_token: str | None = None
    unk_token: str | None = None
    pad_token: str | None = None

    def as_dict(self) -> dict[str, str]:
        """Those that exist, by the name that templates use."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def special_tokens(checkpoint: Checkpoint) -> SpecialTokens:
    """Special tokens of `checkpoint`, from its GGUF metadata or its tokenizer_config.json."""
    return directory_special_tokens(checkpoint.path) if checkpoint.gguf is None else gguf_special_tokens(checkpoint.gguf)


def gguf_special_tokens(file: GGUFFile) -> SpecialTokens:
    """Special tokens by the ids in tokenizer.ggml.*.

    Raises:
        ConfigurationError: an id is not in the vocabulary.
    """
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    found: dict[str, str] = {}
    for name, key in (("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding")):
        id_ = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        if id_ is None or not isinstance(tokens, list):
            continue
        if type(id_) is not int or not 0 <= id_ < len(tokens):
            raise ConfigurationError(
                f"{file.path} has tokenizer.ggml.{key}_token_id = {id_!r} for {len(tokens)} tokens: download or convert it again.", param="model"
            )
        found[name] = str(tokens[id_])
    return SpecialTokens(**found)


def directory_special_tokens(directory: Path) -> SpecialTokens:
    """Special tokens named by tokenizer_config.json, else by special_tokens_map.json."""
    sources: list[Mapping[str, Any]] = []
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (directory / name).exists():
            sources.append(read_json(directory / name, "download it again"))
    found: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        for source in sources:
            value = source.get(name)
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found.setdefault(name, text)
    return SpecialTokens(**found)
