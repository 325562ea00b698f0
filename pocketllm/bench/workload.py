"""What the clients of a load ask for, and when: lengths, prompts and arrivals, all drawn from one seed; and what counts as good."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from pocketllm.errors import ConfigurationError

Lengths = Literal["fixed", "sharegpt-like"]

# Common English words, nearly all of which are one token, with the space before it, in the vocabularies of today.
_TEXT = (
    "the of and to in is was for that on as with by at from his her they this which have had not are but be or an were one all their has been more who "
    "also when out up about first two into some time new would other its after only no years over can could may there many most made him these such than "
    "then so what any her like my how work part city world life where each being under water use long great through school state well house while year day "
    "name small old high line both end still land large music right place own game team film book group number area river family public"
)
_WORDS = _TEXT.split()

# (median of prompts, sigma), (median of answers, sigma), in tokens: log-normal, as conversations that people have shared are, roughly.
_MIX = ((90, 1.2), (140, 0.9))
_MIX_BOUNDS = (4, 2048)
_GOODPUT = ("ttft", "tpot", "itl", "e2e")


@dataclass(frozen=True)
class Ask:
    """One request of a load.

    Args:
        prompt: text of about `prompt_tokens` tokens, whose own count is in what comes back; or for completions token ids.
        prompt_tokens: tokens that were aimed at.
        max_tokens: budget of the answer.
    """

    prompt: str | list[int]
    prompt_tokens: int
    max_tokens: int


def draw_asks(count: int, lengths: Lengths, input_tokens: int, output_tokens: int, seed: int) -> list[Ask]:
    """`count` requests whose prompts are random words, so that no two begin alike.

    Args:
        count: how many.
        lengths: "fixed" takes `input_tokens` and `output_tokens` for each; "sharegpt-like" draws both from log-normal laws (medians 90 and 140
            tokens, sigmas 1.2 and 0.9), cut to [4, 2048].
        input_tokens, output_tokens: of "fixed".
        seed: of the lengths and the words.
    """
    chooser = random.Random(seed)
    asks = []
    for _ in range(count):
        prompt_tokens, max_tokens = (input_tokens, output_tokens) if lengths == "fixed" else (_log_normal(chooser, *law) for law in _MIX)
        asks.append(Ask(" ".join(chooser.choices(_WORDS, k=prompt_tokens)), prompt_tokens, max_tokens))
    return asks


def _log_normal(chooser: random.Random, median: float, sigma: float) -> int:
    low, high = _MIX_BOUNDS
    return min(high, max(low, round(chooser.lognormvariate(math.log(median), sigma))))


@dataclass(frozen=True)
class Arrivals:
    """When requests are sent: at a rate, or as soon as one of so many clients is free. Exactly one of the two is given.

    Args:
        rate: requests a second, with the exponential gaps of a Poisson process; inf sends all at once.
        concurrency: clients, each of which sends its next request when its last one has ended.
    """

    rate: float | None = None
    concurrency: int | None = None

    @property
    def name(self) -> str:
        if self.rate is None:
            return f"{self.concurrency} client{'s' if self.concurrency != 1 else ''}"
        return "all at once" if math.isinf(self.rate) else f"{self.rate:g} requests/s"

    def times(self, seed: int) -> Iterator[float]:
        """Seconds from the start to each request; none for clients, who wait for answers."""
        chooser, now = random.Random(f"arrivals {seed}"), 0.0
        while self.rate is not None:
            yield now
            now += 0.0 if math.isinf(self.rate) else chooser.expovariate(self.rate)


def parse_arrivals(rates: str | None, concurrency: str | None) -> list[Arrivals]:
    """The load points that two flags spell, each a list with commas: rates first.

    Raises:
        ConfigurationError: a number is not valid, or there is none; `param` names the flag.
    """
    points = [Arrivals(rate=_number(text, "request_rate")) for text in (rates or "").split(",") if text.strip()]
    for text in (concurrency or "").split(","):
        if text.strip():
            value = _number(text, "concurrency")
            if value != int(value if math.isfinite(value) else 0):
                raise ConfigurationError(f'"concurrency" = {text!r} is not valid: send whole numbers, such as 1,8,64.', param="concurrency")
            points.append(Arrivals(concurrency=int(value)))
    if not points:
        raise ConfigurationError("There is no load: send --request-rate, --concurrency, or both, such as --concurrency 1,8,64.", param="concurrency")
    return points


def parse_goodput(text: str | None) -> dict[str, float]:
    """Limits in milliseconds that "ttft:500,tpot:50" spells; `itl` is a request's own 99th percentile.

    Raises:
        ConfigurationError: it spells none.
    """
    limits: dict[str, float] = {}
    for part in (text or "").replace(" ", ",").split(","):
        if not part:
            continue
        match = re.fullmatch(rf"({'|'.join(_GOODPUT)}):(\d+(?:\.\d+)?)", part)
        if match is None:
            raise ConfigurationError(f'"goodput" = {part!r} is not valid: send limits in milliseconds such as ttft:500,tpot:50.', param="goodput")
        limits[match[1]] = float(match[2])
    return limits


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not value > 0:
        raise ConfigurationError(f'"{name}" = {text!r} is not valid: send positive numbers with commas between them, such as 1,8,64.', param=name)
    return value
