"""The options of the engine, the server and the supervisor: frozen dataclasses, from whose fields the CLI flags are generated."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import sys
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pocketllm import env
from pocketllm.errors import ConfigurationError
from pocketllm.protocol.features import Surface

BackendName = Literal["auto", "torch", "cpp"]
ModelFormat = Literal["auto", "safetensors", "gguf"]
DType = Literal["auto", "float32", "bfloat16", "float16"]
ExpertsDevice = Literal["auto", "cpu", "gpu"]

_LOOPBACK = "127.0.0.1"
_UNITS = {"": 1, "b": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def option(default: Any, help: str, *, minimum: int | None = None, metavar: str | None = None) -> Any:
    """A field of an options class: its default, the help of its flag, the least that it may be, and what stands for its value in the help."""
    return field(default=default, metadata={"help": help, "minimum": minimum, "metavar": metavar})


@dataclass(frozen=True)
class EngineArgs:
    """Which model runs, where, and with how much memory. Every field is a flag of the CLI and POCKETLLM_<FIELD> for `from_env`.

    Raises:
        ConfigurationError: an option is unknown, has the wrong type, or is out of range; `param` names it.
    """

    model: str | None = option(None, "local directory or file, or a Hugging Face repo id [the embedded SmolLM2-135M-Instruct; a small Qwen3.5 for cpp]")
    backend: BackendName = option("auto", "execution plane; auto takes cpp for Qwen3.5 safetensors when the native module is installed, else torch")
    tokenizer: str | None = option(None, "local directory or tokenizer.json to use in place of the checkpoint's own tokenizer")
    model_format: ModelFormat = option("auto", "checkpoint format; auto looks at the files")
    tensor_parallel_size: int = option(1, "number of devices that share the model", minimum=1)
    tensor_parallel_rank: int = option(0, "this process's rank, for a manual launcher", minimum=0)
    device: str = option("auto", "cpu, cuda, cuda:N, or auto, which takes the first GPU where there is one")
    max_model_len: int | None = option(None, "most tokens of prompt and answer together [the checkpoint's context, or what fits into memory]", minimum=2)
    dtype: DType = option("auto", "compute type; float32 is the exact reference; auto the fastest for the device, on the cpp plane that of the stored weights")
    kv_cache_dtype: DType = option("auto", "type of cached keys and values; auto is float32 under float32 compute and where cpp computes on a CPU, else 16-bit")
    max_batch_size: int | None = option(None, "most requests that run at once; more wait in the queue [8; on a GPU 64]", minimum=1)
    prefill_chunk_tokens: int | None = option(
        None,
        "most prompt tokens a step, so that long prompts do not stall running answers; 0 is off [512; on a GPU 8192, and 320 beside answers; cpp 2048 there]",
        minimum=0,
    )
    enable_prefix_caching: bool = option(True, "reuse the KV of prompts that begin alike")
    kv_cache_memory: int | str | None = option(
        None,
        "KV cache size, such as 512MiB or 2GiB [room for max_batch_size full contexts, at most a quarter of free memory, on a GPU 95%]",
        metavar="SIZE",
    )
    routed_experts_device: ExpertsDevice = option(
        "auto",
        "experts of DeepSeek-V4: gpu loads all; cpu keeps them in the mapped file, those in use in a cache; auto loads all that half of memory holds",
    )
    routed_experts_memory: int | str | None = option(None, "size of the cache of routed experts, such as 16GiB [half of free memory]", metavar="SIZE")
    speculative_method: str | None = option(None, "speculative decoding method")
    speculative_tokens: int = option(0, "tokens a speculative step proposes", minimum=0)
    seed: int | None = option(None, "makes requests without a seed of their own repeatable in order of arrival", minimum=0)
    backend_options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"help": "tuning of one plane, as a JSON object", "minimum": None, "metavar": "JSON"}
    )

    def __new__(cls, *_args: Any, **options: Any) -> EngineArgs:
        _refuse_unknown(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        validate_options(self)
        if self.kv_cache_memory is not None:
            parse_size(self.kv_cache_memory, "kv_cache_memory")
        if self.routed_experts_memory is not None:
            parse_size(self.routed_experts_memory, "routed_experts_memory")
            if self.routed_experts_device == "gpu":
                raise ConfigurationError(
                    '"routed_experts_memory" is the size of a cache, and "routed_experts_device" = "gpu" loads all experts: leave one of them out.',
                    param="routed_experts_memory",
                )
        if self.tensor_parallel_rank >= self.tensor_parallel_size:
            raise ConfigurationError(
                f'"tensor_parallel_rank" = {self.tensor_parallel_rank} is not below "tensor_parallel_size" = {self.tensor_parallel_size}.',
                param="tensor_parallel_rank",
            )

    @classmethod
    def from_env(cls, **overrides: Any) -> EngineArgs:
        """EngineArgs from POCKETLLM_<FIELD> variables; `overrides` win. Values are parsed as the CLI parses its flags."""
        names = [f.name for f in dataclasses.fields(cls)]
        values = {name: parse_option(cls, name, text) for name, text in env.options(names).items()}
        return cls(**{**values, **overrides})

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes, or None when the engine is to decide."""
        return None if self.kv_cache_memory is None else parse_size(self.kv_cache_memory, "kv_cache_memory")

    @property
    def routed_experts_bytes(self) -> int | None:
        """`routed_experts_memory` in bytes, or None when the engine is to decide."""
        return None if self.routed_experts_memory is None else parse_size(self.routed_experts_memory, "routed_experts_memory")


@dataclass(frozen=True)
class ServerArgs:
    """How the HTTP server listens and bounds its work. Every field is a flag of `pocketllm serve`.

    Raises:
        ConfigurationError: an option is unknown, has the wrong type, or is out of range; `param` names it.
    """

    host: str = option("127.0.0.1", "address to listen on; 0.0.0.0 is every interface, to be used with --api-key")
    port: int = option(8000, "TCP port to listen on; 0 takes a free one and prints it", minimum=0)
    api_key: str | None = option(None, "key that clients send as a bearer token [POCKETLLM_API_KEY]; /health, /alive and /ready stay open")
    served_model_name: str | None = option(None, "model id in responses and /v1/models [derived from the checkpoint]")
    allow_origin: str | None = option(None, "origin that browsers may call from (CORS), or *")
    default_max_tokens: int | None = option(None, "budget of chat requests that send no max_tokens [until EOS or a full context]", minimum=1)
    request_timeout: float = option(900.0, "seconds until a request is ended with 504; 0 is off", minimum=0)
    keep_alive_interval: float = option(15.0, "seconds of silence after which a stream sends a comment; 0 is off", minimum=0)
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM", minimum=0)
    max_queued_requests: int = option(256, "choices in the engine before new requests get 429", minimum=1)
    surface: Surface = option("full", "guide answers only what the API guide has, and refuses the rest")
    max_body_bytes: int = option(8 * 2**20, "largest request body, in bytes", minimum=1024)

    def __new__(cls, *_args: Any, **options: Any) -> ServerArgs:
        _refuse_unknown(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        validate_options(self)
        if self.port > 65535:
            raise ConfigurationError(f'"port" = {self.port} is not valid: send a whole number from 0 to 65535.', param="port")
        if self.api_key is None and (key := env.api_key()):
            object.__setattr__(self, "api_key", key)
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            # No header carries such a key, and an empty one would let everybody in. The key itself is not shown.
            raise ConfigurationError('"api_key" is not valid: send at least one character, all of them printable ASCII and none a space.', param="api_key")


@dataclass(frozen=True)
class SupervisorArgs:
    """How `pocketllm serve` starts and stops the ranks of a model that several devices share. Every field is a flag of `pocketllm serve`.

    Raises:
        ConfigurationError: an option is unknown, has the wrong type, or is out of range; `param` names it.
    """

    tensor_parallel_supervisor: bool = option(True, "start and watch all ranks on this machine; off where torchrun or another launcher starts them")
    tensor_parallel_startup_timeout: float = option(1800.0, "seconds until every rank has to be ready", minimum=0)
    tensor_parallel_shutdown_timeout: float | None = option(
        None, "seconds until ranks that were asked to stop are killed [shutdown_timeout and 15 more]", minimum=0
    )
    tensor_parallel_master_addr: str = option(_LOOPBACK, "address at which ranks meet rank 0, for a master port")
    tensor_parallel_master_port: int | None = option(
        None, "TCP port of rank 0 at which ranks meet [none: they meet in files of the rendezvous directory]", minimum=1
    )
    tensor_parallel_rendezvous_dir: str | None = option(
        None, "directory in which a private one is made for each run, and removed at its end [the system's temporary directory]"
    )

    def __new__(cls, *_args: Any, **options: Any) -> SupervisorArgs:
        _refuse_unknown(cls, options)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        validate_options(self)
        port = self.tensor_parallel_master_port
        if port is not None and port > 65535:
            raise ConfigurationError(
                f'"tensor_parallel_master_port" = {port} is not valid: send a whole number from 1 to 65535.', param="tensor_parallel_master_port"
            )
        address = self.tensor_parallel_master_addr
        if not address.strip():
            raise ConfigurationError(
                f'"tensor_parallel_master_addr" = {address!r} is not valid: send a host name or an address of rank 0, or leave it out for {_LOOPBACK}.',
                param="tensor_parallel_master_addr",
            )
        if port is None and address != _LOOPBACK:
            raise ConfigurationError(
                f'"tensor_parallel_master_addr" = {address!r} is of no use without a port, since the ranks would meet in files: '
                'send "tensor_parallel_master_port" too.',
                param="tensor_parallel_master_addr",
            )


def parse_size(value: int | str, name: str) -> int:
    """Bytes of 1073741824, "1GiB", "1.5G" or "512MB" (every unit is a power of 1024).

    Raises:
        ConfigurationError: `value` is not a positive size; `param` is `name`.
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,15})?)\s*([kmgt]?)i?b?\s*", str(value), re.IGNORECASE)
    number = float(match[1]) * _UNITS[match[2].lower()] if match and not isinstance(value, bool) else 0.0
    size = int(number) if number < 2**63 else 0
    if size < 1:
        raise ConfigurationError(f'"{name}" = {value!r} is not a size: send bytes, or a number with a unit such as 512MiB or 2GiB.', param=name)
    return size


def parse_option(cls: type, name: str, text: str) -> Any:
    """Value of field `name` of an options class, read from the text of a flag or a variable.

    Raises:
        ConfigurationError: the text does not spell a value of the field's type; `param` names the field.
    """
    hint = typing.get_type_hints(cls)[name]
    kinds = _members(hint)
    try:
        if hint is bool:
            return {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}[text.strip().lower()]
        if typing.get_origin(hint) is Literal or str in kinds:
            return text
        if float in kinds:
            return float(text)
        if int in kinds:
            return int(text)
        value = json.loads(text)
        if not isinstance(value, dict):
            raise ValueError(text)
        return value
    except (KeyError, ValueError):
        raise ConfigurationError(f'"{name}" = {text!r} is not valid: send {_wanted(hint)}.', param=name) from None


def _refuse_unknown(cls: type, options: Mapping[str, Any]) -> None:
    known = [f.name for f in dataclasses.fields(cls)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, 1)
            hint = f' Did you mean "{close[0]}"?' if close else f" Known options: {', '.join(known)}."
            raise ConfigurationError(f'"{name}" is not an option of {cls.__name__}.{hint}', param=name)


def validate_options(args: Any) -> None:
    """Check each field of an options class, whose fields `option` made, against its type and its least value.

    Raises:
        ConfigurationError: one does not hold; `param` names it.
    """
    hints = typing.get_type_hints(type(args))
    for knob in dataclasses.fields(args):
        value, hint = getattr(args, knob.name), hints[knob.name]
        if not _is_a(value, hint):
            raise ConfigurationError(f'"{knob.name}" = {value!r} is not valid: send {_wanted(hint)}.', param=knob.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigurationError(f'"{knob.name}" = {value!r} is not valid: send a finite number.', param=knob.name)
        minimum = knob.metadata["minimum"]
        if minimum is not None and value is not None and not value >= minimum:
            raise ConfigurationError(f'"{knob.name}" = {value!r} is not valid: the least is {minimum}.', param=knob.name)


def _members(hint: Any) -> tuple[Any, ...]:
    return typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)


def _is_a(value: object, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return isinstance(value, str) and value in typing.get_args(hint)
    for kind in _members(hint):
        plain = typing.get_origin(kind) or kind
        if plain is float and isinstance(value, (int, float)) and not isinstance(value, bool):
            return abs(value) <= sys.float_info.max  # neither infinite nor an int too large for a float
        if isinstance(value, plain) and (plain is bool or not isinstance(value, bool)):
            return True
    return False


def _wanted(hint: Any) -> str:
    if typing.get_origin(hint) is Literal:
        return "one of " + ", ".join(typing.get_args(hint))
    kinds = _members(hint)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
    words = [names[kind] for kind in kinds if kind in names]
    return " or ".join(words) if words else "a JSON object"
