"""`pocketllm inspect`: what a checkpoint is, and which plane runs it. Reads headers only."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from typing import Any

from pocketllm.backends.base import LoadProgress
from pocketllm.backends.select import explain
from pocketllm.checkpoint import Checkpoint, open_checkpoint
from pocketllm.config import ModelFormat
from pocketllm.errors import PocketLLMError
from pocketllm.hub import resolve_model
from pocketllm.text.chat_template import load_chat_template
from pocketllm.text.tokenizer import load_tokenizer

_KV_TYPES = {"float32": 4, "bfloat16": 2}


def run(model: str | None, model_format: ModelFormat = "auto", as_json: bool = False) -> int:
    """Print the facts of `model` and return 0.

    Raises:
        ConfigurationError, UnsupportedFeatureError: the checkpoint can't be opened; one line with the remedy.
    """
    facts = describe(open_checkpoint(resolve_model(model, _report), model_format))
    if as_json:
        print(json.dumps(facts, indent=2, ensure_ascii=False))
    else:
        _print_facts(facts)
    return 0


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """The facts that `run` prints, as JSON values; sizes are bytes."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors:
        counts[tensor.type] += 1
        sizes[tensor.type] += tensor.num_bytes
    return {
        "name": checkpoint.name,
        "path": str(checkpoint.path),
        "architecture": checkpoint.architecture,
        "format": checkpoint.model_format,
        "parameters": checkpoint.num_parameters,
        "bytes": checkpoint.num_bytes,
        "tensor_types": {kind: {"count": counts[kind], "bytes": sizes[kind]} for kind in sorted(sizes, key=lambda kind: -sizes[kind])},
        "context_length": checkpoint.context_length,
        "kv_bytes_per_token": {name: checkpoint.kv_bytes_per_token(size) for name, size in _KV_TYPES.items()},
        "tokenizer": _tokenizer_kind(checkpoint),
        "chat_template": _chat_template_state(checkpoint),
        "eos_token_ids": list(checkpoint.generation_defaults.eos_token_ids),
        "planes": [dataclasses.asdict(verdict) for verdict in explain(checkpoint)],
    }


def _tokenizer_kind(checkpoint: Checkpoint) -> str:
    # A broken or unknown tokenizer is a fact to report here, not the end of the report.
    try:
        tokenizer = load_tokenizer(checkpoint)
    except PocketLLMError as error:
        return f"not usable: {error.message}"
    return f"{tokenizer.kind}, {tokenizer.vocab_size} tokens"


def _chat_template_state(checkpoint: Checkpoint) -> str:
    try:
        return "no" if load_chat_template(checkpoint) is None else "yes"
    except PocketLLMError as error:
        return f"not usable: {error.message}"


def _print_facts(facts: dict[str, Any]) -> None:
    rows: list[tuple[str, str]] = [
        ("model", facts["name"]),
        ("path", facts["path"]),
        ("architecture", facts["architecture"]),
        ("format", facts["format"]),
        ("parameters", f"{facts['parameters']:,}"),
        ("size", _size(facts["bytes"])),
    ]
    for kind, part in facts["tensor_types"].items():
        rows.append((f"  {kind}", f"{part['count']} tensors, {_size(part['bytes'])}"))
    kv = [f"{_size(value)} in {name}" for name, value in facts["kv_bytes_per_token"].items() if value is not None]
    rows += [
        ("context", f"{facts['context_length']:,} tokens" if facts["context_length"] else "not stated"),
        ("KV cache", f"a token takes {', '.join(kv)}" if kv else "not known for this architecture"),
        ("tokenizer", facts["tokenizer"]),
        ("chat template", facts["chat_template"]),
        ("EOS ids", ", ".join(map(str, facts["eos_token_ids"])) or "none"),
    ]
    for plane in facts["planes"]:
        rows.append((f"{plane['backend']} plane", f"{'yes' if plane['runs'] else 'no'}: {plane['reason']}"))
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"{name:<{width}}  {value}")


def _size(count: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def _report(progress: LoadProgress) -> None:
    print(progress.message, file=sys.stderr)
