"""SamplingParams: what passes, and what is refused by name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pocketllm import ConfigurationError, SamplingParams


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 1},
        {"temperature": 0},
        {"temperature": 0.0},
        {"temperature": 5.5},
        {"top_p": 1},
        {"top_p": 1e-9},
        {"top_k": -1},
        {"top_k": 0},
        {"top_k": 50},
        {"seed": 0},
        {"seed": 2**63 - 1},
    ],
)
def test_valid(fields: dict[str, Any]) -> None:
    params = SamplingParams(**fields)
    for name in ("max_tokens", "temperature", "top_p", "top_k", "seed"):
        assert getattr(params, name) == fields.get(name)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.0),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "1"),
        ("temperature", False),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("top_k", -2),
        ("top_k", 1.5),
        ("seed", -1),
        ("seed", 2**63),
        ("seed", "1"),
    ],
)
def test_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f'"{name}" = .* is not valid: send ') as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert "\n" not in str(caught.value)


def test_fixed_once_made() -> None:
    with pytest.raises(AttributeError):
        SamplingParams().seed = 1  # type: ignore[misc]
