"""A live server over the fake backend that says all that a model might."""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from typing import Any

import pytest

from pocketllm.backends.base import EngineRequest
from tests.fake_serving import LETTERS, LiveServer, StartServer, qwen_like, qwen_tokenizer
from tests.fuzz.bodies import ANSWERS
from tests.server.conftest import start_server

__all__ = ["start_server"]

NEIGHBOUR = "A neighbour asks."
_SCRIPTS = [answer and qwen_tokenizer().encode(answer, add_special_tokens=False) for answer in ANSWERS]
_NEIGHBOUR_IDS = tuple(NEIGHBOUR.encode())


def _answer(request: EngineRequest) -> Sequence[int]:
    """Of the prompt alone. The neighbour's has letters, as many as it asks for."""
    ids = request.prompt_token_ids
    digest = zlib.crc32(repr(ids).encode())
    is_neighbour = any(ids[at : at + len(_NEIGHBOUR_IDS)] == _NEIGHBOUR_IDS for at in range(len(ids)) if ids[at] == _NEIGHBOUR_IDS[0])
    return (not is_neighbour and _SCRIPTS[digest % len(_SCRIPTS)]) or random.Random(digest).choices(LETTERS, k=request.max_tokens)


@pytest.fixture
def start_any(start_server: StartServer) -> StartServer:
    """Starts such servers. Answers are 64 tokens long at most where a request asks for no length."""

    def start(**options: Any) -> LiveServer:
        return start_server(qwen_like(answers=_answer, context_length=4096, max_slots=16), default_max_tokens=64, **options)

    return start


@pytest.fixture
def server(start_any: StartServer) -> LiveServer:
    return start_any()
