"""From the name of a peer to its side."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from pocketllm.bench.sides.base import Side, Spec
from pocketllm.errors import ConfigurationError

PACKAGES = {"transformers": "transformers", "llama-cpp-python": "llama_cpp", "vllm": "vllm"}  # what is imported for each


def check_peer(peer: str, model: Path) -> None:
    """Raises ConfigurationError where `peer` is unknown, not installed, or can't read the checkpoint."""
    if peer.startswith(("http://", "https://")):
        return
    if Path(peer).name == "llama-bench":
        if not Path(peer).is_file():
            raise ConfigurationError(f"{peer} not found: build it with scripts/build_llama_cpp.sh, or give the path of another llama-bench.", param="peer")
    elif peer not in PACKAGES:
        known = ", ".join(PACKAGES)
        raise ConfigurationError(f'"peer" = {peer!r} is not known: send {known}, the path of a llama-bench, or the URL of a server.', param="peer")
    elif importlib.util.find_spec(PACKAGES[peer]) is None:
        raise ConfigurationError(f'"peer" = {peer!r} is not installed: run pip install {peer}, or leave it out.', param="peer")
    if (peer == "llama-cpp-python" or Path(peer).name == "llama-bench") and model.suffix != ".gguf":
        raise ConfigurationError(f"{peer} reads GGUF files and {model} is none: give one as --model, or leave this peer out.", param="peer")


def installed_peers(model: Path) -> list[str]:
    """The peers of this environment that read `model`."""
    found = []
    for peer in PACKAGES:
        try:
            check_peer(peer, model)
        except ConfigurationError:
            continue
        found.append(peer)
    return found


def load_side(name: str, spec: Spec) -> Side:
    """The side that `name` means, loaded; "pocketllm" is PocketLLM itself. Raises what the engine raises."""
    if name == "pocketllm":
        from pocketllm.bench.sides.pocketllm_side import PocketLLMSide

        return PocketLLMSide(spec)
    if name == "transformers":
        from pocketllm.bench.sides.transformers_side import TransformersSide

        return TransformersSide(spec)
    if name == "llama-cpp-python":
        from pocketllm.bench.sides.llama_cpp_python_side import LlamaCppPythonSide

        return LlamaCppPythonSide(spec)
    if name == "vllm":
        from pocketllm.bench.sides.vllm_side import VllmSide

        return VllmSide(spec)
    if name.startswith(("http://", "https://")):
        from pocketllm.bench.sides.url_side import UrlSide

        return UrlSide(spec)
    from pocketllm.bench.sides.llama_bench_side import LlamaBenchSide

    return LlamaBenchSide(spec, Path(name))
