"""The scheduler against the traces that every plane's scheduler replays."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from scheduler_trace import read_trace, replay

TRACES = Path(__file__).parents[2] / "traces" / "scheduler"
PATHS = sorted(TRACES.glob("*.json"))


def test_there_are_traces() -> None:
    assert {path.stem for path in PATHS} >= {"single", "staggered_batch", "chunked_prefill", "preemption", "prefix_reuse", "cancel"}
    assert {path.stem for path in PATHS} >= {"chunks_beside_answers", "ahead", "ahead_preemption", "hybrid_ahead"}
    assert {path.stem for path in PATHS} >= {
        "hybrid_snapshots",
        "hybrid_conversation",
        "hybrid_preemption",
        "hybrid_eviction",
        "hybrid_long_prompt",
        "ranked_prompt",
    }


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    trace = read_trace(path)
    observed, cached_tokens = replay(trace)
    for number, (got, wanted) in enumerate(zip(observed, trace["steps"], strict=True)):
        assert got == wanted, f"step {number} of {path.name}"
    assert cached_tokens == {name: request["cached_tokens"] for name, request in trace["requests"].items()}
    assert observed[-1]["blocks_used"] == 0, "a trace ends when all rows have left"


def test_a_wrong_expectation_is_noticed() -> None:
    trace = read_trace(TRACES / "single.json")
    trace["steps"][1]["blocks_used"] += 1
    observed, _ = replay(trace)
    assert observed != trace["steps"]


@pytest.mark.parametrize("place", ["trace", "options", "request", "step"])
def test_an_unknown_key_is_refused(place: str, tmp_path: Path) -> None:
    trace: dict[str, Any] = json.loads((TRACES / "single.json").read_text(encoding="utf-8"))
    {"trace": trace, "options": trace["options"], "request": trace["requests"]["a"], "step": trace["steps"][0]}[place]["preemted"] = []
    path = tmp_path / "misspelt.json"
    path.write_text(json.dumps(trace), encoding="utf-8")
    with pytest.raises(ValueError, match=r"misspelt\.json: the keys \['preemted'\]"):
        read_trace(path)
