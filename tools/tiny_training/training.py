"""The training loop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM

from .conversation import SKILL_NAMES
from .delta_rule import fast_training
from .rows import Batch

_REPORT_STEPS = 100
_WARM_UP = 0.03  # of the run
_LAST_RATE = 0.02  # of the highest learning rate


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run did.

    Args:
        steps: done.
        tokens: trained on, padding left out.
        seconds: taken.
        losses: of each skill over the last steps, in nats a token.
    """

    steps: int
    tokens: int
    seconds: float
    losses: dict[str, float]


class DivergedError(Exception):
    """The loss is no number any more."""


def train(model: Qwen3_5ForCausalLM, steps: Iterator[list[Batch]], *, seconds: float, max_steps: int | None, learning_rate: float) -> Outcome:
    """Train in place, on the model's device, until the time or the steps are over.

    The learning rate falls with the share of the run that is done, so that a short run ends as smoothly as a long one. The clock starts after one pass without
    an update, in which libraries are loaded.

    Raises:
        DivergedError: the loss is no number.
    """
    with fast_training():
        return _train(model, steps, seconds, max_steps, learning_rate)


def _train(model: Qwen3_5ForCausalLM, steps: Iterator[list[Batch]], seconds: float, max_steps: int | None, learning_rate: float) -> Outcome:
    optimizer = _optimizer(model)
    model.train()
    begin = time.monotonic()
    float(_backward(model, next(steps)).sum())
    optimizer.zero_grad(set_to_none=True)
    print(f"first pass: {time.monotonic() - begin:.0f} s", flush=True)

    sums = torch.zeros(2, len(SKILL_NAMES) + 1, device=model.device)
    step, tokens, losses = 0, 0, dict[str, float]()
    begin = time.monotonic()
    while True:
        done = max((time.monotonic() - begin) / seconds, step / max_steps if max_steps is not None else 0.0)
        if done < 1:
            rate = learning_rate * _rate(done)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batches = next(steps)
            sums += _backward(model, batches)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            tokens += sum(batch.num_tokens for batch in batches)
        if step % _REPORT_STEPS == 0 or step == 1 or done >= 1:
            losses = _means(sums) or losses
            elapsed = time.monotonic() - begin
            shown = "  ".join(f"{name} {loss:.4f}" for name, loss in losses.items())
            print(f"step {step:5}  {elapsed:4.0f} s  {tokens / elapsed / 1000:6.1f}k tok/s  rate {rate:.2e}  {shown}", flush=True)
            if not all(math.isfinite(loss) for loss in losses.values()):
                raise DivergedError(f"The loss is no number at step {step}: lower --learning-rate.")
            sums.zero_()
        if done >= 1:
            return Outcome(step, tokens, elapsed, losses)


def _optimizer(model: Qwen3_5ForCausalLM) -> torch.optim.AdamW:
    matrices = [weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed_tokens" not in name]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed_tokens" in name]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=model.device.type == "cuda")


def _rate(done: float) -> float:
    """Share of the highest learning rate at a share of the run: a short rise, then half a cosine."""
    if done < _WARM_UP:
        return 0.02 + 0.98 * done / _WARM_UP
    return _LAST_RATE + (1 - _LAST_RATE) * (1 + math.cos(math.pi * (done - _WARM_UP) / (1 - _WARM_UP))) / 2


def _backward(model: Qwen3_5ForCausalLM, batches: list[Batch]) -> torch.Tensor:
    """Add the gradients of one step. Returns, for each skill, the sum of the losses of its tokens and their number: [2, 1 + skills], on the device."""
    device = model.device
    total = sum(float(batch.weights.sum()) for batch in batches)
    found = torch.zeros(2, len(SKILL_NAMES) + 1, device=device)
    for batch in batches:
        places = np.flatnonzero(batch.weights[:, 1:])  # what is learnt alone meets the head
        targets, weights, skills = (array[:, 1:].reshape(-1)[places] for array in (batch.ids.astype(np.int64), batch.weights, batch.skills.astype(np.int64)))
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            hidden = model.model(input_ids=_send(batch.ids.astype(np.int64), device), use_cache=False).last_hidden_state  # [rows, width, hidden_size]
            chosen = hidden[:, :-1].flatten(0, 1)[_send(places, device)]
            logits = model.lm_head(chosen)
        losses = F.cross_entropy(logits.float(), _send(targets, device), reduction="none")
        (losses @ _send(weights, device) / total).backward()
        kinds = _send(skills, device)
        found[0].index_add_(0, kinds, losses.detach())
        found[1].index_add_(0, kinds, torch.ones_like(losses))
    return found


def _send(array: Any, device: torch.device) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _means(sums: torch.Tensor) -> dict[str, float]:
    totals, counts = sums.tolist()
    return {name: totals[index] / counts[index] for index, name in enumerate(SKILL_NAMES, start=1) if counts[index]}
