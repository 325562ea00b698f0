"""Log probabilities of a step's prompt tokens on the GPU, computed where the logits are: few tokens' logits are there at once, and ranks alone come back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pocketllm.backends.base import MAX_LOGPROBS, TokenLogprobs
from pocketllm.torch_engine.kernels.logprobs import device_logprobs
from pocketllm.torch_engine.model_runner import RANKED_AT_ONCE
from pocketllm.torch_engine.models.model import Model
from pocketllm.torch_engine.scheduler import ScheduledRow


def prompt_ranks(rows: Sequence[ScheduledRow], places: Sequence[int]) -> PromptRanks | None:
    """What the rows of one step ask for of their prompts, or None where none does. Arguments are those of PromptRanks."""
    if all(one.row.request.prompt_logprobs is None for one in rows):
        return None
    found = PromptRanks(rows, places)
    return found if found.num_ranked else None


class PromptRanks:
    """What the rows of one step ask for of their prompts.

    Args:
        rows: in the order of their tokens, those that compute one token first.
        places: of each in the step as it was scheduled.
    """

    def __init__(self, rows: Sequence[ScheduledRow], places: Sequence[int]) -> None:
        self._rows: list[tuple[int, int, int]] = []  # place in the step, how many of the ranked tokens are its, how many alternatives it asks for
        self._tokens: list[int] = []  # whose hidden states rank the next token
        self._ids: list[int] = []  # of the ranked tokens
        self._packed: torch.Tensor | None = None
        self._ready: torch.cuda.Event | None = None
        self._num_top = 0
        first = 0
        for place, one in zip(places, rows, strict=True):
            if ranked := one.ranked:
                begin = first + ranked.start - 1 - one.row.num_computed_tokens
                self._rows.append((place, len(ranked), one.row.request.prompt_logprobs or 0))
                self._tokens += range(begin, begin + len(ranked))
                self._ids += one.ranked_ids
            first += one.num_tokens

    @property
    def num_ranked(self) -> int:
        return len(self._tokens)

    def compute(self, hidden: torch.Tensor, model: Model) -> None:
        """Queue the ranking of tokens by `hidden` [num_tokens, hidden_size] float32, and the way of the results to the host."""
        device = hidden.device
        wanted = max(count for _, _, count in self._rows)
        self._num_top = 0 if wanted == 0 else MAX_LOGPROBS  # each number is a kernel of its own
        index = torch.tensor([self._tokens, self._ids], dtype=torch.int64, pin_memory=device.type == "cuda").to(device, non_blocking=True)
        parts = []
        for start in range(0, len(self._tokens), RANKED_AT_ONCE):
            tokens, ids = index[:, start : start + RANKED_AT_ONCE]
            logprob, top_ids, top = device_logprobs(model.logits(hidden[tokens]), ids.contiguous(), self._num_top)
            parts.append(torch.cat([logprob.unsqueeze(1).view(torch.int64), top_ids.long(), top.view(torch.int64)], dim=1))
        packed = torch.cat(parts)  # [num_ranked, 1 + 2 * num_top] int64, the numbers as their bits
        if device.type != "cuda":
            self._packed = packed
            return
        self._packed = torch.empty(packed.shape, dtype=torch.int64, pin_memory=True)
        self._packed.copy_(packed, non_blocking=True)
        self._ready = torch.cuda.Event()
        self._ready.record()

    def wait(self) -> dict[int, tuple[TokenLogprobs, ...]]:
        """Wait for the device: by place in the step, what each row's ranked tokens were given."""
        assert self._packed is not None, "computed before"
        if self._ready is not None:
            self._ready.synchronize()
        num_top = (self._packed.shape[1] - 1) // 2  # a small vocabulary has no more
        ids = self._packed[:, 1 : 1 + num_top].tolist()
        own = self._packed[:, :1].contiguous().view(torch.float64)[:, 0].tolist()
        values = self._packed[:, 1 + num_top :].contiguous().view(torch.float64).tolist() if num_top else [[] for _ in own]
        found, first = {}, 0
        for place, length, count in self._rows:
            lines = range(first, first + length)
            found[place] = tuple(TokenLogprobs(own[line], tuple(zip(ids[line][:count], values[line][:count], strict=True))) for line in lines)
            first += length
        return found
