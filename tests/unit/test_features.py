"""What is acted on, by engine and by surface."""

from __future__ import annotations

import dataclasses
import time

from pocketllm.backends.base import Capabilities
from pocketllm.config import ServerArgs
from pocketllm.protocol.features import GRAMMAR_FEATURES, GUIDE_FLAGS, HOST_FEATURES, RANKING_FEATURES, SURFACES, features
from pocketllm.protocol.fields import check_fields
from pocketllm.protocol.rules import RULES

FLAGS = [option.name for option in dataclasses.fields(Capabilities) if option.type == "bool"]
EVERY_FLAG = Capabilities("fake", "none", 4, 1024, 256, **dict.fromkeys(FLAGS, True))


def test_features() -> None:
    bare = dataclasses.replace(EVERY_FLAG, structured_outputs=False, logprobs=False, penalties=False)
    assert features(EVERY_FLAG, "full") == set(FLAGS) | set(HOST_FEATURES) | set(GRAMMAR_FEATURES) | set(RANKING_FEATURES)
    assert features(EVERY_FLAG, "guide") == set(FLAGS) & GUIDE_FLAGS == GUIDE_FLAGS
    assert not GUIDE_FLAGS & {"penalties", "repetition_penalty", "logit_bias", "min_p", "min_tokens", "allowed_token_ids", "bad_words", "stop_token_ids"}
    assert not GUIDE_FLAGS & {"ignore_eos", "priority", "prompt_logprobs"}
    assert features(bare, "full") == set(FLAGS) - {"structured_outputs", "logprobs", "penalties"} | set(HOST_FEATURES)
    assert features(bare, "guide") == GUIDE_FLAGS - {"structured_outputs", "logprobs"}


def test_full_is_what_a_server_is_unless_told_otherwise() -> None:
    assert ServerArgs().surface == "full"
    assert SURFACES == ("full", "guide")


def test_no_feature_of_the_host_bears_the_name_of_a_flag() -> None:
    assert not (set(HOST_FEATURES) | set(GRAMMAR_FEATURES) | set(RANKING_FEATURES)) & set(FLAGS)
    assert set(FLAGS) >= GUIDE_FLAGS


def test_a_rule_is_about_the_form_or_about_a_feature() -> None:
    for rule in RULES:
        assert not (rule.is_shape and rule.feature), rule.field


def test_the_check_of_a_usual_body_is_fast() -> None:
    acted_on = features(EVERY_FLAG, "full")
    body = {"model": "m", "messages": [], "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "n": 1, "stop": ["a"], "seed": 1, "stream": True, "user": "u"}
    best = 1.0
    for _ in range(200):
        begun = time.perf_counter()
        check_fields(body, "chat", acted_on)
        best = min(best, time.perf_counter() - begun)
    assert best < 50e-6
