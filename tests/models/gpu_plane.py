"""The GPU's plane on a tiny checkpoint: on a GPU where there is one, else with its kernels in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.checkpoint import open_checkpoint
from pocketllm.config import EngineArgs
from pocketllm.torch_engine.gpu_plane import load_on_gpu
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.plane import Order, Plane
from pocketllm.torch_engine.runner import Draw, Flight
from pocketllm.torch_engine.scheduler import Row, ScheduledRow

DEVICE = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def load(path: Path, dtype: str = "float32", *, cuda_graphs: bool = True, context_length: int = 256, **options: Any) -> Plane:
    """The plane for `path`, loaded on this thread."""
    args = EngineArgs(dtype=dtype, **{"max_batch_size": 8, "kv_cache_memory": "4MiB", "prefill_chunk_tokens": 24, **options})
    return load_on_gpu(Order(args, open_checkpoint(path), context_length, lambda progress: None, lambda: None), DEVICE, cuda_graphs=cuda_graphs)


def run(plane: Plane, requests: Sequence[EngineRequest]) -> dict[str, list[int]]:
    """Answers of `requests`, which run together, launched ahead as the engine does; an error is raised. They fit into the context."""
    scheduler, runner = plane.scheduler, plane.runner
    scheduler.on_release = runner.release
    masks = Masks(runner.vocab_size)
    answers: dict[str, list[int]] = {request.request_id: [] for request in requests}
    rows: list[Row] = [scheduler.add(request) for request in requests]
    flying: tuple[list[ScheduledRow], Flight] | None = None
    while flying is not None or any(row in scheduler.running or row in scheduler.waiting for row in rows):
        step = scheduler.schedule() if flying is None or scheduler.can_run_ahead() else []
        flight = runner.launch(step, masks, scheduler.take_copies()) if step else None
        if flying is not None:
            results = flying[1].result()
            drawn = {}
            for place, result in results.items():
                if flying[0][place].row.slot >= 0:
                    assert isinstance(result, Draw), result
                    drawn[place] = result.token_id
            for update in scheduler.resolve(flying[0], drawn):
                answers[update.row.request.request_id] += update.token_ids
        if flight is not None:
            scheduler.advance(step)
        flying = None if flight is None else (step, flight)
    masks.close()
    return answers
