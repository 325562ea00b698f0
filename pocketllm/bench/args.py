"""The options of `pocketllm bench`, one frozen class a command; the flags are made of their fields."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from pocketllm.bench.endpoint import Api, split_url
from pocketllm.bench.workload import Lengths, parse_arrivals, parse_goodput
from pocketllm.config import option, validate_options
from pocketllm.errors import ConfigurationError


@dataclass(frozen=True)
class ServeBenchArgs:
    """A load on a server.

    Raises:
        ConfigurationError: an option is not valid; `param` names it.
    """

    url: str = option("http://127.0.0.1:8000", "server to measure, any that is OpenAI-compatible")
    api: Api = option("chat", "endpoint: chat completions or completions")
    served_model_name: str | None = option(None, "model that requests name [the first of the server's /v1/models]")
    api_key: str | None = option(None, "key that is sent as a bearer token")
    request_rate: str | None = option(None, "requests a second, with the gaps of a Poisson process; several with commas, inf for all at once", metavar="RATES")
    concurrency: str | None = option(None, "clients that send one request after another; several with commas [1,8 without --request-rate]", metavar="CLIENTS")
    requests: int = option(64, "requests at each rate and each concurrency", minimum=1)
    warmup: int = option(2, "requests before, which are not counted", minimum=0)
    lengths: Lengths = option("fixed", "lengths of prompts and answers: those of --input-tokens and --output-tokens, or drawn as in shared conversations")
    input_tokens: int = option(128, "tokens of each prompt, about", minimum=1)
    output_tokens: int = option(64, "most tokens of each answer", minimum=1)
    goodput: str | None = option(None, "limits in milliseconds that a request must keep to count as good, such as ttft:500,tpot:50", metavar="LIMITS")
    timeout: float = option(600.0, "most seconds of a request", minimum=0)
    seed: int = option(0, "of lengths, words and arrivals", minimum=0)
    extra_body: Mapping[str, Any] = field(
        default_factory=dict,
        metadata={"help": "more fields of each request, such as '{\"ignore_eos\": true}'; null takes one away", "minimum": None, "metavar": "JSON"},
    )
    output: str | None = option(None, "write the report as JSON", metavar="FILE")
    plot: str | None = option(None, "write a picture as PNG; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        validate_options(self)
        split_url(self.url)
        parse_goodput(self.goodput)
        if self.request_rate is None and self.concurrency is None:
            object.__setattr__(self, "concurrency", "1,8")
        parse_arrivals(self.request_rate, self.concurrency)
        if not self.timeout > 0:
            raise ConfigurationError(f'"timeout" = {self.timeout} is not valid: send seconds above 0.', param="timeout")


@dataclass(frozen=True)
class LatencyBenchArgs:
    """One request at a time, on an engine in this machine. Raises as ServeBenchArgs does."""

    input_tokens: str = option("128,512", "tokens of the prompt; several with commas", metavar="TOKENS")
    output_tokens: int = option(64, "tokens that are decoded after it", minimum=2)
    repeats: int = option(5, "samples of each", minimum=1)
    warmup: int = option(1, "samples before, which are not counted", minimum=0)
    threads: int | None = option(None, "threads on a CPU [physical cores]", minimum=1)
    seed: int = option(0, "of the prompts", minimum=0)
    output: str | None = option(None, "write the report as JSON", metavar="FILE")
    plot: str | None = option(None, "write a picture as PNG; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        validate_options(self)
        whole_numbers(self.input_tokens, "input_tokens")


@dataclass(frozen=True)
class ThroughputBenchArgs:
    """Batches of requests, on an engine in this machine. Raises as ServeBenchArgs does."""

    batch_sizes: str = option("1,2,4,8", "requests at once; several with commas", metavar="SIZES")
    input_tokens: int = option(128, "tokens of each prompt", minimum=1)
    output_tokens: int = option(64, "tokens of each answer", minimum=8)
    repeats: int = option(3, "samples of each batch size", minimum=1)
    warmup: int = option(1, "samples before, which are not counted", minimum=0)
    threads: int | None = option(None, "threads on a CPU [physical cores]", minimum=1)
    seed: int = option(0, "of the prompts", minimum=0)
    output: str | None = option(None, "write the report as JSON", metavar="FILE")
    plot: str | None = option(None, "write a picture as PNG; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        validate_options(self)
        whole_numbers(self.batch_sizes, "batch_sizes")


@dataclass(frozen=True)
class CompareBenchArgs:
    """PocketLLM beside its peers, on the same checkpoint. Raises as ServeBenchArgs does."""

    input_tokens: int = option(512, "tokens of the prompt of prefill", minimum=1)
    output_tokens: int = option(64, "tokens of decode", minimum=2)
    context: int = option(16, "tokens of the prompt before decode", minimum=1)
    batch: int = option(4, "requests of a batch; 1 leaves the batch out", minimum=1)
    rounds: int = option(3, "alternating rounds", minimum=1)
    threads: int | None = option(None, "threads of each side on a CPU [physical cores]", minimum=1)
    seed: int = option(0, "of the prompts", minimum=0)
    output: str | None = option(None, "write the report as JSON", metavar="FILE")
    plot: str | None = option(None, "write a picture as PNG; needs matplotlib", metavar="FILE")

    def __post_init__(self) -> None:
        validate_options(self)


def whole_numbers(text: str, name: str) -> list[int]:
    """The positive whole numbers that `text` lists, with commas.

    Raises:
        ConfigurationError: it lists none; `param` is `name`.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d{0,8}", part) for part in parts):
        raise ConfigurationError(f'"{name}" = {text!r} is not valid: send positive whole numbers with commas between them, such as 1,8,64.', param=name)
    return [int(part) for part in parts]


def command_line(name: str, *args: Any, more: Sequence[str] = ()) -> str:
    """The command that `args` came from: what differs from the defaults, without this machine's folders and without a key."""
    words = ["pocketllm", "bench", name]
    for one in args:
        plain = type(one)()
        for knob in fields(one):
            value = getattr(one, knob.name)
            if value is None or value == getattr(plain, knob.name) or knob.name in ("api_key", "output", "plot"):
                continue
            flag = knob.name.replace("_", "-")
            if isinstance(value, bool):
                words.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                words += [f"--{flag}", _plain_text(value)]
    return shlex.join([*words, *map(_plain_text, more)])


def _plain_text(value: Any) -> str:
    if isinstance(value, Mapping):
        return json.dumps(dict(value))
    text = str(value)
    return Path(text).name if Path(text).is_absolute() else text
