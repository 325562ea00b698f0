"""EngineArgs, ServerArgs, and the values of flags and variables."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import pytest

from pocketllm import ConfigurationError, EngineArgs, env
from pocketllm.config import ServerArgs, parse_option, parse_size


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.startswith("POCKETLLM_")]:
        monkeypatch.delenv(name)


def test_defaults_are_valid_and_fixed() -> None:
    args = EngineArgs()
    assert args.backend == "auto"
    with pytest.raises(dataclasses.FrozenInstanceError):
        args.model = "x"  # type: ignore[misc]


def test_unknown_option_names_the_closest() -> None:
    with pytest.raises(ConfigurationError, match=r'"max_model_length" is not an option of EngineArgs\. Did you mean "max_model_len"\?') as caught:
        EngineArgs(max_model_length=5)  # type: ignore[call-arg]
    assert caught.value.param == "max_model_length"
    with pytest.raises(ConfigurationError, match="Known options: host, port"):
        ServerArgs(xyzzy=5)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("cls", "name", "value"),
    [
        (EngineArgs, "model", 5),
        (EngineArgs, "backend", "cuda"),
        (EngineArgs, "dtype", "int8"),
        (EngineArgs, "max_model_len", 1),
        (EngineArgs, "max_model_len", "5"),
        (EngineArgs, "max_model_len", True),
        (EngineArgs, "max_batch_size", 0),
        (EngineArgs, "max_batch_size", 1.0),
        (EngineArgs, "prefill_chunk_tokens", -1),
        (EngineArgs, "enable_prefix_caching", 1),
        (EngineArgs, "kv_cache_memory", "lots"),
        (EngineArgs, "kv_cache_memory", 0),
        (EngineArgs, "seed", -1),
        (EngineArgs, "tensor_parallel_rank", 1),
        (EngineArgs, "backend_options", [1]),
        (ServerArgs, "port", -1),
        (ServerArgs, "port", 65536),
        (ServerArgs, "port", "8000"),
        (ServerArgs, "request_timeout", -1),
        (ServerArgs, "request_timeout", float("inf")),
        (ServerArgs, "shutdown_timeout", float("nan")),
        (ServerArgs, "shutdown_timeout", 10**400),
        (ServerArgs, "request_timeout", True),
        (ServerArgs, "max_queued_requests", 0),
        (ServerArgs, "api_key", 5),
        (ServerArgs, "api_key", ""),
        (ServerArgs, "api_key", "two words"),
        (ServerArgs, "api_key", "ends in a line\n"),
        (ServerArgs, "api_key", "clé"),
        (ServerArgs, "request_timeout", float("nan")),
        (ServerArgs, "shutdown_timeout", float("inf")),
    ],
)
def test_refused_by_name(cls: type[Any], name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        cls(**{name: value})
    assert caught.value.param == name
    assert f'"{name}"' in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "size"),
    [("5", 5), (5, 5), ("1k", 1024), ("512MiB", 512 * 2**20), ("1.5G", 3 * 2**29), ("2 gb", 2**31), ("1TiB", 2**40)],
)
def test_sizes(text: int | str, size: int) -> None:
    assert parse_size(text, "kv_cache_memory") == size
    assert EngineArgs(kv_cache_memory=text).kv_cache_bytes == size


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5.5", "1PiB", "1 2", "G", "9" * 400, "99999999T", True, 0, -5])
def test_other_sizes_are_refused(text: Any) -> None:
    with pytest.raises(ConfigurationError, match="is not a size"):
        parse_size(text, "kv_cache_memory")


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("model", "owner/name", "owner/name"),
        ("backend", "torch", "torch"),
        ("max_model_len", "2048", 2048),
        ("enable_prefix_caching", "off", False),
        ("enable_prefix_caching", "TRUE", True),
        ("kv_cache_memory", "1GiB", "1GiB"),
        ("backend_options", '{"a": 1}', {"a": 1}),
    ],
)
def test_text_of_a_flag(name: str, text: str, value: Any) -> None:
    assert parse_option(EngineArgs, name, text) == value


@pytest.mark.parametrize(("name", "text"), [("max_model_len", "2k"), ("enable_prefix_caching", "maybe"), ("backend_options", "[1]"), ("backend_options", "{")])
def test_text_that_spells_no_value(name: str, text: str) -> None:
    with pytest.raises(ConfigurationError, match=f'"{name}" = .* is not valid') as caught:
        parse_option(EngineArgs, name, text)
    assert caught.value.param == name


def test_from_env(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POCKETLLM_MAX_MODEL_LEN", "512")
    monkeypatch.setenv("POCKETLLM_ENABLE_PREFIX_CACHING", "0")
    monkeypatch.setenv("POCKETLLM_DTYPE", "")
    args = EngineArgs.from_env(max_batch_size=3)
    assert (args.max_model_len, args.enable_prefix_caching, args.dtype, args.max_batch_size) == (512, False, "auto", 3)
    assert EngineArgs.from_env(max_model_len=64).max_model_len == 64
    monkeypatch.setenv("POCKETLLM_MAX_MODEL_LEN", "many")
    with pytest.raises(ConfigurationError, match="\"max_model_len\" = 'many'"):
        EngineArgs.from_env()


def test_api_key_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ServerArgs().api_key is None
    monkeypatch.setenv("POCKETLLM_API_KEY", "secret")
    assert ServerArgs().api_key == "secret"
    assert ServerArgs(api_key="other").api_key == "other"
    monkeypatch.setenv("POCKETLLM_API_KEY", "a secret")
    with pytest.raises(ConfigurationError) as caught:
        ServerArgs()
    assert "a secret" not in str(caught.value)


def test_every_option_has_help() -> None:
    for cls in (EngineArgs, ServerArgs):
        for option in dataclasses.fields(cls):
            assert option.metadata["help"], option.name


def test_openmp_rests_only_where_nobody_has_said_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    with env.resting_openmp_threads(True):
        assert os.environ["OMP_WAIT_POLICY"] == "passive"
    assert "OMP_WAIT_POLICY" not in os.environ, "children of this process must not see it"
    with env.resting_openmp_threads(False):
        assert "OMP_WAIT_POLICY" not in os.environ
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    with env.resting_openmp_threads(True):
        assert os.environ["OMP_WAIT_POLICY"] == "active"
    assert os.environ["OMP_WAIT_POLICY"] == "active"
