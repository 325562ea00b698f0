"""Draws over ranks that each have the logits of some ids: ranks send candidates and sums of exponentials, and rank 0 draws as sampler.py does.

The best ids of all are among the best of each rank, and a sum of exponentials is that of its parts. Only a row whose nucleus is larger than its
candidates, or whose noise favours an id outside them, is sent whole.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from pocketllm.backends.base import EngineRequest, TokenLogprobs
from pocketllm.torch_engine.logit_edits import LogitEdits
from pocketllm.torch_engine.logprobs import LOWEST, largest
from pocketllm.torch_engine.masks import Words
from pocketllm.torch_engine.rank_group import RankGroup
from pocketllm.torch_engine.sampler import CANDIDATES, Candidates, bias, draw_among, edited, is_greedy

_NO_ID = -1.0


@dataclass(frozen=True, slots=True)
class SharedDraw:
    """What one row drew.

    Args:
        token_id: None where no id can be drawn.
        is_finite: the largest of the row's logits, before its mask, is.
        logprobs: where the row asked for them.
    """

    token_id: int | None
    is_finite: bool
    logprobs: TokenLogprobs | None


class ShardedSampler:
    """Every rank calls `draw` with the same rows, and its own logits.

    Args:
        group: the ranks.
        vocab_size: ids of all of them; a rank has those of Share.nearly(vocab_size).
    """

    def __init__(self, group: RankGroup, vocab_size: int) -> None:
        self._group, self._vocab_size = group, vocab_size
        self._mine = group.share.nearly(vocab_size)

    def draw(
        self, logits: torch.Tensor, requests: Sequence[EngineRequest], draws: Sequence[int], masks: Mapping[int, Words], edits: Mapping[int, LogitEdits]
    ) -> list[SharedDraw]:
        """One result a row of `logits` [num_rows, ids of this rank] float32. On the other ranks than 0 they are not to be used."""
        own = logits.clone() if masks or edits else logits
        for row, changes in edits.items():
            own[row] = edited(own[row], changes, self._mine.start)
        for row, words in masks.items():
            own[row] += bias(words, self._vocab_size)[self._mine.start : self._mine.stop]
        self._cut_unlikely(own, requests, {row: changes.terms.min_p for row, changes in edits.items() if changes.terms.min_p > 0})
        lines = [self._line(logits[row], own[row], request) for row, request in enumerate(requests)]
        told = torch.stack(self._group.gather(torch.tensor([number for line in lines for number in line], dtype=torch.float64)))  # [size, all widths]
        leads = self._group.share.index == 0
        rows = [_Row(part, request, self._vocab_size) for part, request in zip(told.split([len(line) for line in lines], dim=1), requests, strict=True)]
        ids = [row.draw(draws[place]) if leads else None for place, row in enumerate(rows)]
        if any(_may_need_all(request, self._vocab_size) for request in requests):
            wanted = torch.tensor([leads and row.needs_all for row in rows], dtype=torch.int64)
            wanted = self._group.gather(wanted)[0]  # as rank 0 says
            places = wanted.nonzero().squeeze(-1)
            if places.numel():
                whole = self.whole(own[places])
                raw = self.whole(logits[places]) if any(_reports_others(requests[place]) for place in places.tolist()) else whole
                for line, place in enumerate(places.tolist()):
                    if leads:
                        ids[place] = rows[place].draw(draws[place], whole[line], raw[line])
        return [SharedDraw(token_id, row.is_finite, row.logprobs()) for row, token_id in zip(rows, ids, strict=True)]

    def _cut_unlikely(self, own: torch.Tensor, requests: Sequence[EngineRequest], min_ps: Mapping[int, float]) -> None:
        """Minus infinity where an id of `own` is less likely than min_p of the row, by row, times the likeliest id of all ranks."""
        drawing = {row: min_p for row, min_p in min_ps.items() if not is_greedy(requests[row])}
        if not drawing:
            return
        largest = torch.stack(self._group.gather(own[list(drawing)].max(dim=-1).values)).max(dim=0).values.double()
        for best, (row, min_p) in zip(largest, drawing.items(), strict=True):
            own[row][(own[row].double() - best) / requests[row].temperature < math.log(min_p)] = -math.inf

    def whole(self, logits: torch.Tensor) -> torch.Tensor:
        """[num_rows, vocab_size] of every rank's `logits`."""
        return self._group.gather_columns(logits, [len(part) for part in self._group.share.all_nearly(self._vocab_size)])

    def _line(self, raw: torch.Tensor, own: torch.Tensor, request: EngineRequest) -> list[float]:
        """What this rank tells of a row: its largest logit, the largest that the mask allows, the logarithm of the sum of exp((logit - that) / temperature),
        that of exp(logit), then candidates and, where the row asked for log probabilities, the most likely ids: ids and logits, of candidates the model's
        logits too where the row reports others than it draws from. Its width is the request's."""
        best, best_own = float(raw.max()), float(own.max())
        line = [best, best_own, 0.0, 0.0]
        if math.isfinite(best) and math.isfinite(best_own) and not is_greedy(request):
            line[2] = float(((own.double() - best_own) / request.temperature).logsumexp(dim=-1))
        if request.logprobs is not None and math.isfinite(best):
            line[3] = float(raw.double().logsumexp(dim=-1))
        for values, count in ((own, _num_candidates(request, self._vocab_size)), (raw, request.logprobs or 0)):
            if not count:
                continue
            found, ids = largest(values, min(count, values.shape[0])) if math.isfinite(float(values.max())) else ([], [])
            missing = count - len(ids)
            line += [id_ + self._mine.start for id_ in ids] + [_NO_ID] * missing + found + [-math.inf] * missing
            if values is own and _reports_others(request):
                line += raw[ids].tolist() + [-math.inf] * missing
        return line


class _Row:
    """What all ranks have told of one row.

    Args:
        told: [size, width] float64, lines of ShardedSampler._line.
    """

    def __init__(self, told: torch.Tensor, request: EngineRequest, vocab_size: int) -> None:
        num_candidates = _num_candidates(request, vocab_size)
        self._request = request
        self._bests = told[:, 0]
        self.is_finite = math.isfinite(float(self._bests.max()))  # a NaN anywhere is the maximum
        self._own_bests, self._scaled_sums, self._sums = told[:, 1], told[:, 2], told[:, 3]
        self._candidates = _merged(told[:, 4:], num_candidates)
        end = 4 + 2 * num_candidates
        self._raw = dict(self._candidates)
        if _reports_others(request):
            ids, values = told[:, 4 : 4 + num_candidates].flatten().tolist(), told[:, end : end + num_candidates].flatten().tolist()
            self._raw = {int(id_): value for id_, value in zip(ids, values, strict=True) if id_ != _NO_ID}
            end += num_candidates
        self._top = _merged(told[:, end:], request.logprobs or 0)
        self._drawn: tuple[int, float] | None = None  # and the model's logit of it
        self.needs_all = False

    def draw(self, number: int, whole: torch.Tensor | None = None, raw: torch.Tensor | None = None) -> int | None:
        """Draw number `number`. Where it can't be told from the candidates, `needs_all` is set, until `whole`, the row's logits after its edits and its mask,
        and `raw`, those of the model, are there."""
        best = float(self._own_bests.max())
        if not self.is_finite or not math.isfinite(best):
            return None
        request = self._request
        if is_greedy(request):
            best_id = self._candidates[0][0]
            self._drawn = best_id, self._raw[best_id]
            return best_id
        weights = (self._own_bests - best) / request.temperature + self._scaled_sums
        weights[~torch.isfinite(self._own_bests)] = -math.inf
        values = torch.tensor([logit for _, logit in self._candidates], dtype=torch.float64)
        ids = torch.tensor([token_id for token_id, _ in self._candidates])
        scaled = None if whole is None else (whole.double() - best) / request.temperature
        candidates = Candidates((values - best) / request.temperature, ids, float(weights.logsumexp(dim=-1)))
        token_id = draw_among(candidates, request, number, scaled)
        self.needs_all = token_id is None
        if token_id is None:
            return None
        self._drawn = token_id, self._raw[token_id] if raw is None else float(raw[token_id])
        return token_id

    def logprobs(self) -> TokenLogprobs | None:
        wanted = self._request.logprobs
        if wanted is None or self._drawn is None:
            return None
        total = float(self._sums.logsumexp(dim=-1))
        top = tuple((token_id, max(logit - total, LOWEST)) for token_id, logit in self._top)
        return TokenLogprobs(max(self._drawn[1] - total, LOWEST), top)


def _merged(told: torch.Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` best (id, logit) of all ranks, best first, of equal ones the lower id."""
    ids, values = told[:, :count].flatten().tolist(), told[:, count : 2 * count].flatten().tolist()
    found = [(int(id_), value) for id_, value in zip(ids, values, strict=True) if id_ != _NO_ID]
    return sorted(found, key=lambda one: (-one[1], one[0]))[:count]


def _num_candidates(request: EngineRequest, vocab_size: int) -> int:
    if is_greedy(request):
        return 1
    return request.top_k if 0 < request.top_k < vocab_size else min(CANDIDATES, vocab_size)


def _reports_others(request: EngineRequest) -> bool:
    """Whether the row's log probabilities are of other logits than those that it draws from."""
    return request.terms is not None and request.logprobs is not None


def _may_need_all(request: EngineRequest, vocab_size: int) -> bool:
    return not is_greedy(request) and not 0 < request.top_k < vocab_size
