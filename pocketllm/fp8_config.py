"""The quantization_config of FP8 checkpoints: which weights they hold, and which of them PocketLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pocketllm.checkpoint import Checkpoint

FP8_TYPE = "F8_E4M3"
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3",),
    "activation_scheme": ("dynamic",),  # static ones bring scales of activations
    "weight_block_size": ([128, 128],),
    "scale_fmt": (None, "float", "ue8m0"),  # how the scales were rounded; a tensor's own type says how it is stored
    "dequantize": (False,),
    "expert_dtype": (None, "fp4", "fp8"),  # a tensor's own type says it too
}
_REQUIRED = ("activation_scheme", "weight_block_size")
_SKIP_LISTS = ("modules_to_not_convert", "ignored_layers")


def quantization_obstacle(checkpoint: Checkpoint) -> str | None:
    """Why the safetensors weights of `checkpoint` can't be read by their quantization_config, in a sentence for people; None where they can.

    Read are checkpoints without one, and FP8 E4M3 with a scale for each block of 128 x 128 weights.
    """
    config = checkpoint.config.get("quantization_config")
    if not config:
        fp8 = next((tensor.name for tensor in checkpoint.tensors if tensor.type == FP8_TYPE), None)
        return None if fp8 is None else f"the tensor {fp8} has the type {FP8_TYPE}, and config.json has no quantization_config that says how it is scaled"
    method = config.get("quant_method") if isinstance(config, Mapping) else config
    if method != "fp8":
        return f"weights quantized with {method!r} are not supported; use an unquantized or an FP8 checkpoint, or a GGUF"
    for key, value in config.items():
        if key in _SKIP_LISTS:
            if value is not None and not (isinstance(value, list) and all(isinstance(name, str) for name in value)):
                return f"its quantization_config has {key} = {value!r}, which should be a list of module names"
        elif key not in _ACCEPTED or value not in _ACCEPTED[key]:
            return f"its quantization_config has {key} = {value!r}, which is not supported; FP8 is read as E4M3, activations dynamic, blocks of 128 x 128"
    for key in _REQUIRED:
        if key not in config:
            return f"its quantization_config lacks {key}"
    skipped = [name for key in _SKIP_LISTS for name in config.get(key) or ()]
    for tensor in checkpoint.tensors:
        if tensor.type == FP8_TYPE and (entry := _entry_of(tensor.name, skipped)) is not None:
            return f"the tensor {tensor.name} has the type {FP8_TYPE}, and its quantization_config lists {entry} as not converted"
    return None


def _entry_of(tensor: str, skipped: list[str]) -> str | None:
    """The entry that names the tensor's module, one that holds it, or the last part of its name."""
    module = tensor.rpartition(".")[0]
    return next((entry for entry in skipped if module == entry or module.startswith(f"{entry}.") or module.endswith(f".{entry}")), None)
