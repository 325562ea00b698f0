"""A rank as a program of its own: computes cases one after another, over several ranks and, on rank 0, alone.

python rank_program.py RANK CASES OUTPUT: CASES is JSON, a list of {"path", "size", "directory", "options"}; rank 0 writes answers to OUTPUT.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from pocketllm.backends.base import EngineRequest
from pocketllm.backends.select import select_backend
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from tests.id_constraint import IdConstraint
from tests.logit_reference import rows_of_terms
from tests.row_listener import run

NEW_TOKENS = 8


def requests(vocab_size: int) -> list[EngineRequest]:
    """Rows that run together: greedy ones, one longer than a step, and draws of every kind."""
    prompts = [tuple((7 * place + 3 * length) % vocab_size for place in range(length)) for length in (1, 9, 33, 70)]
    rows = [EngineRequest(f"greedy {place}", prompt, NEW_TOKENS, logprobs=3 * place) for place, prompt in enumerate(prompts)]
    draws: dict[str, dict[str, Any]] = {
        "hot": {"temperature": 1.5},
        "nucleus": {"temperature": 1.0, "top_p": 0.5, "logprobs": 2},
        "wide nucleus": {"temperature": 30.0, "top_p": 0.999},
        "top_k": {"temperature": 2.0, "top_k": 5},
        "top_k 1": {"temperature": 2.0, "top_k": 1},
        "huge top_k": {"temperature": 2.0, "top_k": 10**6, "logprobs": 0},
        "held": {"temperature": 3.0, "constraint": IdConstraint(range(5, vocab_size - 3, 7)), "logprobs": 1},
        "held greedy": {"constraint": IdConstraint({vocab_size - 1, vocab_size - 2})},
        "held to nothing": {"constraint": IdConstraint(())},
    }
    rows.append(EngineRequest("scored", prompts[3], 0, prompt_logprobs=3))
    rows += [EngineRequest(name, prompts[1], NEW_TOKENS, seed=2**63 + 5, **options) for name, options in draws.items()]
    terms = rows_of_terms(vocab_size, frozenset({0, 9}), NEW_TOKENS)[2:]
    return rows + [replace(row, request_id=f"terms {row.request_id}", logprobs=1 if place % 2 else None) for place, row in enumerate(terms)]


def backend_of(path: str, size: int, rank: int, options: dict[str, Any]) -> Any:
    chosen = {"backend": "torch", "dtype": "float32", "max_batch_size": 16, "prefill_chunk_tokens": 40, "backend_options": {"num_threads": 1}, **options}
    args = EngineArgs(device="cpu", tensor_parallel_size=size, tensor_parallel_rank=rank, **chosen)
    return select_backend(args, open_checkpoint(Path(path)))


def answers(path: str, size: int, options: dict[str, Any]) -> dict[str, Any]:
    backend = backend_of(path, size, 0, options)
    backend.load(lambda progress: None)
    try:
        rows = run(backend, *requests(backend.capabilities.vocab_size))
        again = run(backend, *requests(backend.capabilities.vocab_size)[3:4])  # from the prefix cache
    finally:
        backend.close()
    assert again[0].outputs[0].cached_tokens > 0
    return {
        row.outputs[0].request_id + (" again" if row is again[0] else ""): {
            "finish": row.outputs[-1].finish_reason,
            "ids": row.token_ids,
            "logprobs": [[entry.logprob, *entry.top] for entry in (*row.logprobs, *row.outputs[0].prompt_logprobs)],
        }
        for row in [*rows, *again]
    }


def main() -> None:
    rank, cases, output = int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    found = []
    for case in cases:
        if rank >= case["size"]:
            continue
        os.environ.update({"TP_RANK": str(rank), "TP_WORLD": str(case["size"]), "POCKETLLM_TP_DIR": case["directory"]})
        if rank > 0:
            backend_of(case["path"], case["size"], rank, case["options"]).follow(lambda progress: None, lambda: None)
            continue
        shared = answers(case["path"], case["size"], case["options"])
        found.append({"shared": shared, "alone": answers(case["path"], 1, case["options"])})
    if rank == 0:
        output.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
