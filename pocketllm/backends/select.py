"""Which execution plane runs a checkpoint, decided from its headers, before torch or the native module is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pocketllm.backends.base import Backend
from pocketllm.checkpoint import Checkpoint
from pocketllm.config import EngineArgs
from pocketllm.errors import UnsupportedFeatureError
from pocketllm.fp8_config import quantization_obstacle
from pocketllm.parallel.shards import check_shards

# Whose modules run architectures without a file here; the bounds are those of the extra in pyproject.toml.
TRANSFORMERS_MAJORS = frozenset({"5"})
GENERIC_EXTRA = "pip install 'pocketllm[generic]'"
# The keys of torch_engine/models/registry.py, which may not be imported here.
TORCH_ARCHITECTURES = frozenset(
    {"llama", "mistral", "qwen2", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_moe", "gemma3_text", "deepseek_v4"}
)
PLACED_EXPERTS = frozenset({"deepseek_v4"})  # whose routed experts can lie apart from the other weights
TORCH_GGUF_TYPES = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"})
SAFETENSORS_TYPES = frozenset({"F32", "F16", "BF16", "F8_E4M3"})
# What single architectures store besides.
_MORE_TYPES = {"deepseek_v4": frozenset({"I64", "I32", "I8", "F4", "F8_E8M0", "MXFP4"})}  # experts of each token id; FP4 and its scales
CPP_ARCHITECTURES = frozenset({"qwen3_5", "qwen3_5_text"})
CPP_OPTIONS = frozenset({"num_threads", "eos_token_id"})  # what its backend_options may hold
_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@dataclass(frozen=True, slots=True)
class PlaneVerdict:
    """Whether a plane runs a checkpoint, and why, in one sentence for people."""

    backend: Literal["torch", "cpp"]
    runs: bool
    reason: str


def explain(checkpoint: Checkpoint) -> list[PlaneVerdict]:
    """The verdict of both planes, torch first. Imports neither for an architecture that has a file of its own."""
    torch_obstacle, cpp_obstacle = _torch_obstacle(checkpoint), _cpp_obstacle(checkpoint)
    what = f"{checkpoint.architecture} from {checkpoint.model_format}"
    return [
        PlaneVerdict("torch", torch_obstacle is None, torch_obstacle or f"it runs {what}{_way(checkpoint)}"),
        PlaneVerdict("cpp", cpp_obstacle is None, cpp_obstacle or f"it runs {what}"),
    ]


def refuse_options(args: EngineArgs) -> None:
    """Refuse what no plane does, whatever the checkpoint: before one is looked for, let alone downloaded.

    Raises:
        UnsupportedFeatureError: `param` names the option.
    """
    if args.tensor_parallel_size > 1 and args.device.startswith("cuda:"):
        raise UnsupportedFeatureError(
            f'"device" = {args.device!r} names one GPU, and "tensor_parallel_size" = {args.tensor_parallel_size} takes as many: send "cuda".', param="device"
        )
    if args.speculative_method is not None:
        raise UnsupportedFeatureError(
            f'"speculative_method" = {args.speculative_method!r} is not supported yet: every token takes one step. Leave it out.', param="speculative_method"
        )
    if args.speculative_tokens:
        raise UnsupportedFeatureError(
            f'"speculative_tokens" = {args.speculative_tokens} is not supported yet: every token takes one step. Leave it out.', param="speculative_tokens"
        )
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", args.device):
        raise UnsupportedFeatureError(
            f'"device" = {args.device!r} is not supported: models run on the CPU and on NVIDIA GPUs. Send "cpu", "cuda", "cuda:N" or "auto".', param="device"
        )


def select_backend(args: EngineArgs, checkpoint: Checkpoint) -> Backend:
    """The plane that `args` asks for, constructed and not yet loaded. No device is touched.

    "auto" is the cpp plane where that runs the checkpoint and no option asks for what only the torch plane has; else the torch plane.

    Raises:
        UnsupportedFeatureError: no plane runs the checkpoint, or the plane asked for does not run it or an option; `param` names the option.
    """
    refuse_options(args)
    _refuse_placement(args, checkpoint)
    check_shards(args, checkpoint)
    verdicts = {verdict.backend: verdict for verdict in explain(checkpoint)}
    cpp = verdicts["cpp"]
    if args.backend == "cpp" and not cpp.runs:
        raise UnsupportedFeatureError(f'"backend" = "cpp" does not run {checkpoint.path}: {cpp.reason}. Send "torch", or leave it out.', param="backend")
    if args.backend == "cpp" or (args.backend == "auto" and cpp.runs and not _asks_for_torch(args)):
        from pocketllm.backends.cpp import CppBackend

        return CppBackend(args, checkpoint)
    if args.tensor_parallel_size > 1 and checkpoint.architecture not in TORCH_ARCHITECTURES:
        raise UnsupportedFeatureError(
            f'"tensor_parallel_size" = {args.tensor_parallel_size} is not supported for {checkpoint.architecture}: transformers\' modules compute on one '
            "device. Leave it out.",
            param="tensor_parallel_size",
        )
    if not verdicts["torch"].runs:
        raise UnsupportedFeatureError(f"{checkpoint.path} can't be run: {verdicts['torch'].reason}.", param="model")
    from pocketllm.backends.torch import TorchBackend

    return TorchBackend(args, checkpoint)


def _refuse_placement(args: EngineArgs, checkpoint: Checkpoint) -> None:
    name = "routed_experts_memory" if args.routed_experts_memory is not None else "routed_experts_device"
    if getattr(args, name) not in (None, "auto") and checkpoint.architecture not in PLACED_EXPERTS:
        raise UnsupportedFeatureError(
            f'"{name}" = {getattr(args, name)!r} is not supported for {checkpoint.architecture}: only the experts of {", ".join(sorted(PLACED_EXPERTS))} '
            "can be placed apart. Leave it out.",
            param=name,
        )
    if args.tensor_parallel_size > 1 and checkpoint.architecture in PLACED_EXPERTS:
        raise UnsupportedFeatureError(
            f'"tensor_parallel_size" = {args.tensor_parallel_size} is not supported for {checkpoint.architecture} yet: one device runs the whole model. '
            "Leave it out.",
            param="tensor_parallel_size",
        )


def _torch_obstacle(checkpoint: Checkpoint) -> str | None:
    generic = checkpoint.architecture not in TORCH_ARCHITECTURES
    named = f"supported are {', '.join(sorted(TORCH_ARCHITECTURES))}, and others through transformers' modules"
    if generic and (obstacle := _generic_obstacle(checkpoint)):
        return f"the architecture {checkpoint.architecture!r} is not supported; {named} {obstacle}"
    if not checkpoint.tensors:
        return "the checkpoint holds no weights"
    if checkpoint.model_format == "safetensors" and (obstacle := quantization_obstacle(checkpoint)):
        return obstacle
    known = (TORCH_GGUF_TYPES if checkpoint.model_format == "gguf" else SAFETENSORS_TYPES) | _MORE_TYPES.get(checkpoint.architecture, frozenset())
    for tensor in checkpoint.tensors:
        if tensor.type not in known:
            return f"the tensor {tensor.name} has the type {tensor.type}, which is not supported; supported are {', '.join(sorted(known))}"
    if generic:
        from pocketllm.torch_engine.models.generic_layout import layout_obstacle

        if obstacle := layout_obstacle(checkpoint):
            return f"the architecture {checkpoint.architecture!r} is not supported, since {obstacle}; {named}"
        for key in ("vocab_size", "max_position_embeddings"):
            if type(checkpoint.config.get(key)) is not int:
                return f"the architecture {checkpoint.architecture!r} is not supported, since its config.json lacks the key {key}; {named}"
    return None


def _generic_obstacle(checkpoint: Checkpoint) -> str | None:
    """Why the way for other architectures is not there, as the end of a sentence for people; None where it is. Imports nothing of it."""
    if checkpoint.model_format != "safetensors":
        return "from safetensors"
    try:
        version = importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return f"once they are installed: {GENERIC_EXTRA}"
    if version.partition(".")[0] not in TRANSFORMERS_MAJORS:
        return f"of a version 5, and {version} is installed: {GENERIC_EXTRA}"
    return None


def _way(checkpoint: Checkpoint) -> str:
    return "" if checkpoint.architecture in TORCH_ARCHITECTURES else " through transformers' modules (generic path, slower)"


def _cpp_obstacle(checkpoint: Checkpoint) -> str | None:
    if checkpoint.model_format != "safetensors" or checkpoint.architecture not in CPP_ARCHITECTURES:
        return f"it runs Qwen3.5 safetensors, and this is {checkpoint.architecture} from {checkpoint.model_format}"
    if not checkpoint.tensors:
        return "the checkpoint holds no weights"
    if obstacle := quantization_obstacle(checkpoint):
        return obstacle
    for tensor in checkpoint.tensors:
        if tensor.type not in SAFETENSORS_TYPES:
            return f"the tensor {tensor.name} has the type {tensor.type}, which is not supported; supported are {', '.join(sorted(SAFETENSORS_TYPES))}"
    if importlib.util.find_spec("pocketllm_cpp") is None:
        return "the native module pocketllm_cpp is not installed: build it with POCKETLLM_BUILD_CPP=1 pip install, or scripts/build_native.sh in a clone"
    return None


def _asks_for_torch(args: EngineArgs) -> bool:
    """Whether "auto" has a reason for the torch plane besides the checkpoint: the native module computes on the CPU, and GPUs are torch's so far."""
    wants_gpu = args.device.startswith("cuda") or (args.device == "auto" and _NVIDIA_DRIVER.exists())
    return wants_gpu or args.tensor_parallel_size > 1 or not CPP_OPTIONS.issuperset(args.backend_options)
