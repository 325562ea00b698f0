"""Replays a JSON scheduler trace; tests/traces/README.md describes the format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.block_pool import BlockPool
from pocketllm.torch_engine.scheduler import Row, RowUpdate, ScheduledRow, Scheduler
from pocketllm.torch_engine.state_pool import StatePool

_KEYS = {"description", "options", "requests", "steps"}
_REQUEST_KEYS = {"prompt_token_ids", "max_tokens", "eos_token_ids", "draws", "cached_tokens"}
_STEP_KEYS = {"add", "cancel", "rows", "preempted", "finished", "blocks_used"}
_OPTION_KEYS = {"num_blocks", "block_size", "max_batch_size", "prefill_chunk_tokens", "prefill_chunk_beside_answers", "runs_ahead", "enable_prefix_caching"}
_HYBRID_OPTION_KEYS = {"num_snapshots", "interval_blocks"}
_HYBRID_STEP_KEYS = {"copies"}


def read_trace(path: Path) -> dict[str, Any]:
    """The trace in `path`. Raises ValueError where a key is missing or unknown: a misspelt expectation would never be checked."""
    trace: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    _check_keys(path, trace, _KEYS)
    is_hybrid = bool(_HYBRID_OPTION_KEYS & trace["options"].keys())
    _check_keys(path, trace["options"], _OPTION_KEYS | (_HYBRID_OPTION_KEYS if is_hybrid else set()))
    for request in trace["requests"].values():
        _check_keys(path, request, _REQUEST_KEYS | (request.keys() & {"priority", "ranks_prompt"}))
    for step in trace["steps"]:
        _check_keys(path, step, _STEP_KEYS | (_HYBRID_STEP_KEYS if is_hybrid else set()))
    return trace


def replay(trace: dict[str, Any]) -> tuple[list[dict[str, Any]], dict[str, int | None]]:
    """Run the arrivals and cancels of `trace`.

    Returns:
        Its steps as they came out, in the trace's own form, and each request's cached tokens.
    """
    options = dict(trace["options"])
    pool = BlockPool(options.pop("num_blocks"), options.pop("block_size"), enable_prefix_caching=options.pop("enable_prefix_caching"))
    states = None
    if "num_snapshots" in options:
        states = StatePool(options["max_batch_size"], options.pop("num_snapshots"), options.pop("interval_blocks"))
    runs_ahead = options.pop("runs_ahead")
    scheduler = Scheduler(pool, **options, states=states)
    flying: tuple[list[ScheduledRow], dict[int, int]] | None = None
    rows: dict[str, Row] = {}
    observed = []
    for step in trace["steps"]:
        for name in step["add"]:
            rows[name] = scheduler.add(_request(name, trace["requests"][name]))
        for name in step["cancel"]:
            scheduler.remove(rows[name])
        running = list(scheduler.running)
        scheduled = [] if flying is not None and not scheduler.can_run_ahead() else scheduler.schedule()
        copies = [[copy.source, copy.target] for copy in (scheduler.take_copies() if scheduled else ())]
        scheduler.check_integrity()
        preempted = [_name(row) for row in reversed(running) if row in scheduler.waiting]
        counts = [[_name(one.row), one.num_tokens] for one in scheduled]
        sampled = {place: trace["requests"][_name(one.row)]["draws"][one.row.num_generated] for place, one in enumerate(scheduled) if one.samples}
        updates: list[RowUpdate] = []
        if flying is not None:
            updates = scheduler.resolve(*flying)
            flying = None
        if scheduled:
            scheduler.advance(scheduled)
            scheduler.check_integrity()
            if runs_ahead:
                flying = scheduled, sampled
            else:
                updates = scheduler.resolve(scheduled, sampled)
        scheduler.check_integrity()
        observed.append(
            {
                "add": step["add"],
                "cancel": step["cancel"],
                "rows": counts,
                "preempted": preempted,
                "finished": [[_name(update.row), update.finish_reason] for update in updates if update.finish_reason is not None],
                "blocks_used": pool.num_used,
                **({} if states is None else {"copies": copies}),
            }
        )
    return observed, {name: row.cached_tokens for name, row in rows.items()}


def _request(name: str, given: dict[str, Any]) -> EngineRequest:
    eos, priority = frozenset(given["eos_token_ids"]), given.get("priority", 0)
    ranks = 0 if given.get("ranks_prompt") else None
    return EngineRequest(name, tuple(given["prompt_token_ids"]), given["max_tokens"], eos_token_ids=eos, priority=priority, prompt_logprobs=ranks)


def _name(row: Row) -> str:
    return row.request.request_id


def _check_keys(path: Path, given: dict[str, Any], wanted: set[str]) -> None:
    if given.keys() != wanted:
        raise ValueError(f"{path.name}: the keys {sorted(given.keys() ^ wanted)} are missing or unknown")
