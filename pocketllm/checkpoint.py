"""What a checkpoint says of itself, read without loading a weight and without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pocketllm.config import ModelFormat
from pocketllm.errors import ConfigurationError
from pocketllm.gguf_config import gguf_config, gguf_generation_defaults, gguf_model_type
from pocketllm.gguf_file import GGUFFile, open_gguf
from pocketllm.hf_config import hf_config, hf_generation_defaults, read_json
from pocketllm.safetensors_header import SafetensorsHeader, list_shards, read_header

_QUANT_SUFFIX = re.compile(r"[.\-_](?:i?q\d\w*|tq\d\w*|mxfp4\w*|nvfp4\w*|b?f16|f32)$", re.IGNORECASE)

_COMPRESSED_KEYS = frozenset({"kv_lora_rank", "compress_rates", "compress_ratios"})  # of attention whose keys and values are not kept as they are


@dataclass(frozen=True)
class GenerationDefaults:
    """What the checkpoint says of sampling; None where it says nothing.

    Args:
        temperature, top_p, top_k: as in SamplingParams.
        eos_token_ids: ids that end an answer, the main one first.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor.

    Args:
        name: as the file spells it.
        shape: in torch's order, rows first.
        type: element or block type, such as "BF16" or "Q4_1".
        num_bytes: size of the stored data.
        file: the file that holds it.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    num_bytes: int
    file: Path


@dataclass(frozen=True)
class Checkpoint:
    """A model on disk.

    Args:
        path: the GGUF file, or the directory with the safetensors files.
        model_format: "gguf" or "safetensors".
        name: name shown to clients, without the directory and the quantization: "SmolLM2-135M-Instruct".
        architecture: Hugging Face's model_type, such as "llama"; for a GGUF architecture without a known counterpart, GGUF's own word.
        config: the model's numbers under config.json's names, in one flat mapping. The llama family's keys are complete: hidden_size,
            intermediate_size, num_hidden_layers, num_attention_heads, num_key_value_heads, head_dim, rms_norm_eps, rope_theta,
            rope_scaling (None or a mapping with "rope_type"), max_position_embeddings, vocab_size, tie_word_embeddings, hidden_act,
            attention_bias and mlp_bias.
        context_length: most tokens that the model was made for, or 0 when the checkpoint does not say.
        generation_defaults: sampling and EOS ids.
        tensors: every stored tensor, in the files' order.
        gguf: the open file when the format is "gguf".
    """

    path: Path
    model_format: Literal["gguf", "safetensors"]
    name: str
    architecture: str
    config: Mapping[str, Any]
    context_length: int
    generation_defaults: GenerationDefaults
    tensors: tuple[TensorInfo, ...]
    gguf: GGUFFile | None = None

    @property
    def num_parameters(self) -> int:
        """Number of stored weights; powers of two that others are multiplied by are none, and a byte of FP4 holds two."""
        total = 0
        for tensor in self.tensors:
            count = {"F8_E8M0": 0, "I8": 2}.get(tensor.type, 1)
            for size in tensor.shape:
                count *= size
            total += count
        return total

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored weights."""
        return sum(tensor.num_bytes for tensor in self.tensors)

    def kv_bytes_per_token(self, element_bytes: int) -> int | None:
        """Bytes of keys and values that one token adds, or None when the config does not say, or the past is compressed. Linear-attention layers keep none."""
        layers, kv_heads, head_dim = (self.config.get(key) for key in ("num_hidden_layers", "num_key_value_heads", "head_dim"))
        if not isinstance(layers, int) or not isinstance(kv_heads, int) or not isinstance(head_dim, int):
            return None
        if not _COMPRESSED_KEYS.isdisjoint(self.config):
            return None
        layer_types, interval = self.config.get("layer_types"), self.config.get("full_attention_interval")
        if isinstance(layer_types, list):
            layers = sum(kind != "linear_attention" for kind in layer_types)
        elif isinstance(interval, int) and interval > 0:
            layers //= interval
        return 2 * layers * kv_heads * head_dim * element_bytes


def open_checkpoint(path: Path, model_format: ModelFormat = "auto") -> Checkpoint:
    """Read the headers of the checkpoint at `path`: a .gguf file, a directory that holds one, or a safetensors directory.

    Raises:
        ConfigurationError: a file or a key is missing, truncated or corrupt; one line that names it and the remedy.
        UnsupportedFeatureError: the weights are stored in a way that PocketLLM does not read.
    """
    if not path.exists():
        raise ConfigurationError(f"{path} does not exist: check the path of the model.", param="model")
    if path.is_file():
        if path.suffix == ".safetensors":
            raise ConfigurationError(f"{path} is one file of a checkpoint: give its directory {path.parent}, which holds config.json.", param="model")
        if model_format == "safetensors":
            raise ConfigurationError(f'{path} is a file, and "model_format" is "safetensors": give a directory, or leave model_format out.', param="model")
        return _open_gguf_checkpoint(path)
    weights = sorted(path.glob("*.safetensors"))
    ggufs = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    if model_format == "safetensors" or (model_format == "auto" and (weights or not ggufs)):
        return _open_safetensors_checkpoint(path)
    if not ggufs:
        raise ConfigurationError(f'{path} has no .gguf file, and "model_format" is "gguf": give the path of a .gguf file.', param="model")
    if len(ggufs) > 1:
        raise ConfigurationError(f"{path} has {len(ggufs)} .gguf files: give the path of one of {', '.join(file.name for file in ggufs)}.", param="model")
    return _open_gguf_checkpoint(ggufs[0])


def _open_gguf_checkpoint(path: Path) -> Checkpoint:
    file = open_gguf(path)
    parts = file.metadata.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise ConfigurationError(f"{path} is one of {parts} parts: join them with llama-gguf-split --merge, then give the joined file.", param="model")
    config = gguf_config(file)
    tensors = tuple(
        TensorInfo(tensor.name, tuple(int(size) for size in reversed(tensor.shape)), tensor.tensor_type.name, int(tensor.n_bytes), path)
        for tensor in file.tensors.values()
    )
    return Checkpoint(
        path=path,
        model_format="gguf",
        name=_QUANT_SUFFIX.sub("", path.stem) or path.stem,
        architecture=gguf_model_type(file),
        config=config,
        context_length=config.get("max_position_embeddings", 0),
        generation_defaults=GenerationDefaults(**gguf_generation_defaults(file)),
        tensors=tensors,
        gguf=file,
    )


def _open_safetensors_checkpoint(path: Path) -> Checkpoint:
    raw = read_json(path / "config.json", "give a directory that holds a whole checkpoint, or a .gguf file")
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file, "download it again") if generation_file.exists() else {}
    architecture, config = hf_config(raw, path / "config.json")
    headers = [read_header(shard) for shard in list_shards(path)]
    return Checkpoint(
        path=path,
        model_format="safetensors",
        name=_directory_name(path),
        architecture=architecture,
        config=config,
        context_length=config.get("max_position_embeddings", 0),
        generation_defaults=GenerationDefaults(**hf_generation_defaults(raw, generation, path)),
        tensors=_unique_tensors(headers),
    )


def _unique_tensors(headers: list[SafetensorsHeader]) -> tuple[TensorInfo, ...]:
    found: dict[str, TensorInfo] = {}
    for header in headers:
        for name, entry in header.entries.items():
            if name in found:
                raise ConfigurationError(
                    f"The tensor {name} is in both {found[name].file} and {header.path}: remove the file that does not belong to the checkpoint.", param="model"
                )
            found[name] = TensorInfo(name, entry.shape, entry.dtype, entry.num_bytes, header.path)
    return tuple(found.values())


def _directory_name(path: Path) -> str:
    path = path.resolve()
    repo = path.parent.parent.name
    if path.parent.name == "snapshots" and repo.startswith("models--"):  # Hugging Face's cache: the directory's own name is a commit
        return repo.removeprefix("models--").replace("--", "/")
    return path.name
