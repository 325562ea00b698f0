"""Random weights in the shape of a public model, as a checkpoint that any engine loads: for measures of speed, since its text is noise.

    python benchmarks/random_checkpoint.py --shape qwen3.5-9b --format fp8 --output DIR [--device cuda]

The tokenizer is byte-level with a full vocabulary and no merges, so that a prompt of n ASCII letters has n tokens; no id ends an answer.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import torch
from random_deepseek import draw_tensor, flash_config, stored_bytes, tensor_kinds, tiny_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

FORMATS = ("bf16", "fp8", "fp4")
_SHARD_BYTES = 2**30
_BLOCK = 128
_WRITERS = 8
_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant: "
_DTYPES = {
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float32: "F32",
    torch.int8: "I8",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class Shape:
    """What config.json says of a model.

    Args:
        model_type, architecture: Hugging Face's names.
        config: the other keys.
    """

    model_type: str
    architecture: str
    config: dict[str, Any] = field(default_factory=dict)


def _qwen3_5(hidden: int, layers: int, intermediate: int, heads: tuple[int, int], value_heads: int, *, tied: bool = False, **more: Any) -> Shape:
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
        "max_position_embeddings": 262144,
        "vocab_size": 248320,
        "tie_word_embeddings": tied,
        **more,
    }
    period = config["full_attention_interval"]
    config["layer_types"] = ["linear_attention" if (layer + 1) % period else "full_attention" for layer in range(layers)]
    return Shape("qwen3_5_text", "Qwen3_5ForCausalLM", config)


def _qwen3(hidden: int, layers: int, intermediate: int, heads: tuple[int, int], **more: Any) -> Shape:
    config = {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": intermediate,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": 128,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "tie_word_embeddings": False,
        **more,
    }
    return Shape("qwen3", "Qwen3ForCausalLM", config)


def _deepseek(config: dict[str, Any]) -> Shape:
    return Shape("deepseek_v4", "DeepseekV4ForCausalLM", config)


_TINY: dict[str, Any] = {"head_dim": 32, "vocab_size": 1000, "max_position_embeddings": 8192}
SHAPES = {
    "qwen3.5-0.8b": _qwen3_5(1024, 24, 3584, (8, 2), 16, tied=True),
    "qwen3.5-9b": _qwen3_5(4096, 32, 12288, (16, 4), 32),
    "qwen3.5-27b": _qwen3_5(5120, 64, 17408, (24, 4), 48),
    "qwen3-8b": _qwen3(4096, 36, 12288, (32, 8)),
    "tiny": _qwen3_5(64, 4, 160, (4, 2), 4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16, full_attention_interval=2, **_TINY),
    "tiny-qwen3": _qwen3(64, 2, 160, (4, 2), **_TINY),
    "deepseek-v4-flash": _deepseek(flash_config()),
    "deepseek-v4-flash-6-layers": _deepseek(flash_config(6)),
    "deepseek-v4-flash-8-layers": _deepseek(flash_config(8)),
    "tiny-deepseek-v4": _deepseek(tiny_config()),
}


def write_random_checkpoint(directory: Path, shape: Shape, weight_format: str, device: str, seed: int = 0) -> None:
    """Write config, tokenizer and sharded weights to `directory`, which is made.

    Args:
        directory: where to; files of the same names are replaced.
        shape: the model.
        weight_format: "bf16", or "fp8": E4M3 with a bf16 scale for each block of 128 x 128, but for embeddings, head, norms, convolutions and the
            two narrow projections of linear attention; of deepseek_v4 "fp4", as random_deepseek.py has it, and nothing else.
        device: draws the weights.
        seed: of the weights.
    """
    is_deepseek = shape.model_type == "deepseek_v4"
    if is_deepseek != (weight_format == "fp4"):
        raise ValueError(f"A random {shape.model_type} is not written as {weight_format}: fp4 is for deepseek_v4, and bf16 and fp8 for the others.")
    directory.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {"architectures": [shape.architecture], "model_type": shape.model_type, "dtype": "bfloat16", **shape.config}
    if weight_format != "bf16":
        config["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [_BLOCK, _BLOCK],
            **({"scale_fmt": "ue8m0"} if is_deepseek else {"modules_to_not_convert": _plain_modules(shape)}),
        }
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    _write_tokenizer(directory, shape.config["vocab_size"])
    shards = list(_shards(shape))
    names = [f"model-{number:05}-of-{len(shards):05}.safetensors" for number in range(1, len(shards) + 1)]

    def write(place: int) -> tuple[str, dict[str, int]]:
        generator = torch.Generator(device).manual_seed(seed * 100_003 + place)
        tensors: dict[str, torch.Tensor] = {}
        for name, (size, kind) in shards[place].items():
            if is_deepseek:
                tensors.update(draw_tensor(name, size, kind, shape.config, generator))
                continue
            values = _draw(name, size, generator, is_factor=shape.model_type == "qwen3")
            tensors.update(_quantize(name, values) if weight_format == "fp8" and _is_quantized(name, size) else {name: values})
        _write_shard(directory / names[place], tensors)
        return names[place], {name: tensor.nbytes for name, tensor in tensors.items()}

    with ThreadPoolExecutor(_WRITERS) as pool:
        written = list(pool.map(write, range(len(shards))))
    index = {
        "metadata": {"total_size": sum(sum(sizes.values()) for _, sizes in written)},
        "weight_map": {name: file for file, sizes in written for name in sizes},
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index) + "\n", encoding="utf-8")


def random_model(shape: str, weight_format: str, device: str, scratch: Path | None) -> Path:
    """Directory of the checkpoint `shape`-`weight_format`, written if it is not there: in `scratch`, or in memory where that has the room, else on the disk."""
    places = [scratch] if scratch is not None else [Path("/dev/shm"), Path(tempfile.gettempdir())]
    name = f"{shape}-{weight_format}"
    for place in places:
        if (place / name / "model.safetensors.index.json").exists():  # the file that is written last
            return place / name
    needed = 1.1 * sum(stored_bytes(size, kind) for _, size, kind in _tensors(SHAPES[shape]))
    place = next((place for place in places if place.is_dir() and shutil.disk_usage(place).free > needed), places[-1])
    write_random_checkpoint(place / name, SHAPES[shape], weight_format, device)
    return place / name


def tensor_shapes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes, as transformers saves the model."""
    c = shape.config
    hidden, inner, head_dim = c["hidden_size"], c["intermediate_size"], c["head_dim"]
    is_hybrid = shape.model_type == "qwen3_5_text"
    q_size, kv_size = c["num_attention_heads"] * head_dim, c["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (c["vocab_size"], hidden)
    for layer in range(c["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        if is_hybrid and c["layer_types"][layer] == "linear_attention":
            heads, value_dim = c["linear_num_value_heads"], c["linear_value_head_dim"]
            conv = 2 * c["linear_num_key_heads"] * c["linear_key_head_dim"] + heads * value_dim
            for name, rows in (("qkv", conv), ("z", heads * value_dim), ("b", heads), ("a", heads)):
                yield f"{prefix}linear_attn.in_proj_{name}.weight", (rows, hidden)
            yield f"{prefix}linear_attn.conv1d.weight", (conv, 1, c["linear_conv_kernel_dim"])
            yield f"{prefix}linear_attn.A_log", (heads,)
            yield f"{prefix}linear_attn.dt_bias", (heads,)
            yield f"{prefix}linear_attn.norm.weight", (value_dim,)
            yield f"{prefix}linear_attn.out_proj.weight", (hidden, heads * value_dim)
        else:
            yield f"{prefix}self_attn.q_proj.weight", (q_size * (2 if is_hybrid else 1), hidden)
            yield f"{prefix}self_attn.k_proj.weight", (kv_size, hidden)
            yield f"{prefix}self_attn.v_proj.weight", (kv_size, hidden)
            yield f"{prefix}self_attn.o_proj.weight", (hidden, q_size)
            yield f"{prefix}self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}self_attn.k_norm.weight", (head_dim,)
        for name, size in (("gate_proj", (inner, hidden)), ("up_proj", (inner, hidden)), ("down_proj", (hidden, inner))):
            yield f"{prefix}mlp.{name}.weight", size
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    if not c["tie_word_embeddings"]:
        yield "lm_head.weight", (c["vocab_size"], hidden)


def _tensors(shape: Shape) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, shapes and what random_deepseek.py calls each one's kind."""
    if shape.model_type == "deepseek_v4":
        yield from tensor_kinds(shape.config)
    else:
        yield from ((name, size, "bf16") for name, size in tensor_shapes(shape))


def _shards(shape: Shape) -> Iterator[dict[str, tuple[tuple[int, ...], str]]]:
    shard: dict[str, tuple[tuple[int, ...], str]] = {}
    filled = 0
    for name, size, kind in _tensors(shape):
        if shard and filled + stored_bytes(size, kind) > _SHARD_BYTES:
            yield shard
            shard, filled = {}, 0
        shard[name] = size, kind
        filled += stored_bytes(size, kind)
    yield shard


def _draw(name: str, size: tuple[int, ...], generator: torch.Generator, *, is_factor: bool) -> torch.Tensor:
    """Weights of 0.02, which keep activations and logits of a random model finite in any type; of a norm, beside 1 where the model multiplies by them."""
    device = generator.device
    values = torch.empty(size, dtype=torch.bfloat16, device=device).normal_(0, 0.02, generator=generator)
    if name.endswith("A_log"):  # decay rates from 1/16 to 16
        values = torch.empty(size, device=device).uniform_(1 / 16, 16, generator=generator).log().bfloat16()
    elif name.endswith("dt_bias"):  # steps from 0.001 to 0.1, before the softplus
        steps = torch.empty(size, device=device).uniform_(math.log(0.001), math.log(0.1), generator=generator).exp()
        values = (steps + (-torch.expm1(-steps)).log()).bfloat16()
    elif name.endswith("conv1d.weight"):
        values *= 15
    elif name.endswith("linear_attn.norm.weight") or (is_factor and "norm" in name):
        values += 1
    return values


def _quantize(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
    rows, columns = values.shape
    padded = torch.nn.functional.pad(values, (0, -columns % _BLOCK, 0, -rows % _BLOCK))
    blocks = padded.view(padded.shape[0] // _BLOCK, _BLOCK, padded.shape[1] // _BLOCK, _BLOCK)
    scales = (blocks.abs().amax((1, 3)).float() / 448 * 1.01).bfloat16()  # a little more, so that the rounded scale reaches the largest too
    stored = (blocks.float() / scales.float()[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)[:rows, :columns]
    return {name: stored.contiguous(), f"{name}_scale_inv": scales}


def _is_quantized(name: str, size: tuple[int, ...]) -> bool:
    return len(size) == 2 and ".layers." in name and not name.endswith(("in_proj_a.weight", "in_proj_b.weight"))


def _plain_modules(shape: Shape) -> list[str]:
    return ["lm_head", *(name.removesuffix(".weight") for name, size in tensor_shapes(shape) if name != "lm_head.weight" and not _is_quantized(name, size))]


def _write_shard(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """A safetensors file. Bytes go straight from a copy on the CPU to the file, on as many threads as shards are written."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [place, place + tensor.nbytes]}
        place += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
        for tensor in tensors.values():
            view = tensor.cpu().flatten().view(torch.uint8).numpy().data
            while view:  # an unbuffered write may take less than it is given
                view = view[file.write(view) :]


def _write_tokenizer(directory: Path, vocab_size: int) -> None:
    """256 bytes, then words of four letters up to the vocabulary's size."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    words = islice(("".join(letters) for letters in product(ascii_lowercase, repeat=4)), vocab_size - len(alphabet))
    vocabulary = {token: id_ for id_, token in enumerate((*sorted(alphabet), *words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": _TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write a checkpoint of random weights in the shape of a public model.")
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--format", choices=FORMATS, default="bf16")
    parser.add_argument("--output", type=Path, required=True, help="directory of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where weights are drawn [cuda if there is one]")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    start = time.perf_counter()
    write_random_checkpoint(options.output, SHAPES[options.shape], options.format, options.device, options.seed)
    size = sum(file.stat().st_size for file in options.output.iterdir())
    print(f"{options.output}: {size / 1e9:.2f} GB in {time.perf_counter() - start:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
