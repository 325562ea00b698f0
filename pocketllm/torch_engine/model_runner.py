"""Runs scheduled rows through the model: batch, forward, logits, sampler. Owns the weights and the KV cache."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from pocketllm.backends.base import EngineRequest, TokenLogprobs
from pocketllm.errors import ConfigurationError, PocketLLMError
from pocketllm.torch_engine.batch import Batch, build_batch
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.logit_edits import LogitEdits, edits_of
from pocketllm.torch_engine.logprobs import rank
from pocketllm.torch_engine.masks import MaskSource, Words
from pocketllm.torch_engine.models.model import Model
from pocketllm.torch_engine.rank_group import RankGroup
from pocketllm.torch_engine.runner import Draw, Landed, Ranked, Result
from pocketllm.torch_engine.sampler import sample
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.sharded_sampler import ShardedSampler
from pocketllm.torch_engine.state_pool import StateCopy

RANKED_AT_ONCE = 64  # tokens of a prompt whose logits over the whole vocabulary are in memory


class ModelRunner:
    """One model with its cache.

    Args:
        model: loaded.
        cache: blocks that the scheduler's pool counts.
        block_size: tokens a block.
        num_threads: threads of torch's operators.
        group: the ranks that share the model, or None for one; only rank 0's results are to be used.
    """

    def __init__(self, model: Model, cache: KVCache, block_size: int, num_threads: int, group: RankGroup | None = None) -> None:
        self._sharded = None if group is None else ShardedSampler(group, model.vocab_size)
        self.model = model
        self.cache = cache
        self.block_size = block_size
        self.num_threads = num_threads
        self.vocab_size = model.vocab_size
        self.runs_ahead = False

    def launch(self, step: Sequence[ScheduledRow], masks: MaskSource, copies: Sequence[StateCopy]) -> Landed:
        """`execute`, whose result is there at once."""
        return Landed(self.execute(step, masks, copies))

    def release(self, row: Row) -> None:
        """Nothing is kept of a row."""

    def close(self, *, has_failed: bool) -> None:
        """Nothing is left to do."""

    @torch.inference_mode()
    def execute(self, step: Sequence[ScheduledRow], masks: MaskSource, copies: Sequence[StateCopy] = ()) -> dict[int, Result]:
        """Compute one step, after `copies` between state slots. Masks are waited for only once the logits are there.

        Returns:
            By place in `step`: what each row that samples or ranks its prompt was given, or why it could not; the latter also for a row that
            computed values which are not finite without sampling.
        """
        if copies:
            assert self.cache.states is not None
            self.cache.states.run(copies)
        batch = build_batch(step, self.block_size, self.cache.dtype)
        # A native step has its own threads; OpenMP's, which spin for milliseconds after each operator, would take their cores.
        self._use_threads(1 if self.model.is_native(batch, self.cache) and not batch.prefills else self.num_threads)
        hidden = self.model.forward(batch, self.cache)
        places = {id(scheduled): place for place, scheduled in enumerate(step)}
        results: dict[int, Result] = {}
        if batch.sampling:
            drawn = self._draw(self.model.logits(hidden[batch.sample_index]), [scheduled.row for scheduled in batch.sampling], masks)
            results = {places[id(scheduled)]: result for scheduled, result in zip(batch.sampling, drawn, strict=True)}
        if any(scheduled.row.request.prompt_logprobs is not None for scheduled in step):
            self._rank_prompts(batch, hidden, places, results)
        if not math.isfinite(float(hidden.sum())):
            for scheduled in self._clear_broken(batch, hidden):
                results[places[id(scheduled)]] = not_finite()
        return results

    def _draw(self, logits: torch.Tensor, rows: Sequence[Row], masks: MaskSource) -> list[Draw | BaseException]:
        """One result a row of `logits` [num_rows, vocab_size], or of the ids of this rank."""
        words, errors = masks.take_all(rows)
        edits = {place: found for place, row in enumerate(rows) if (found := edits_of(row)) is not None}
        if self._sharded is not None:
            return self._draw_shared(self._sharded, logits, rows, words, errors, edits)
        results: list[Draw | BaseException] = []
        for place, token_id in enumerate(sample(logits, [row.request for row in rows], [row.num_generated for row in rows], words, edits)):
            request = rows[place].request
            if place in errors:
                results.append(errors[place])
            elif token_id is None:
                results.append(nothing_allowed(request) if (place in words or place in edits) and math.isfinite(logits[place].max()) else not_finite())
            elif request.logprobs is None or token_id in request.eos_token_ids:
                results.append(Draw(token_id))
            else:
                results.append(Draw(token_id, (rank(logits[place], token_id, request.logprobs),)))
        return results

    def _rank_prompts(self, batch: Batch, hidden: torch.Tensor, places: Mapping[int, int], results: dict[int, Result]) -> None:
        """Add to `results` the log probabilities of the prompt tokens that `hidden` [num_tokens, hidden_size] ranks."""
        first = 0
        for scheduled in batch.rows:
            if ranked := scheduled.ranked:
                place, begin = places[id(scheduled)], first + ranked.start - 1 - scheduled.row.num_computed_tokens
                found = self._rank(hidden[begin : begin + len(ranked)], scheduled.ranked_ids, scheduled.row)
                drawn_too = results.get(place)
                if drawn_too is None:
                    results[place] = Ranked(found)
                elif isinstance(drawn_too, Draw):
                    results[place] = replace(drawn_too, prompt_logprobs=found)
            first += scheduled.num_tokens

    def _rank(self, hidden: torch.Tensor, token_ids: Sequence[int], row: Row) -> tuple[TokenLogprobs, ...]:
        """Log probabilities of `token_ids`, the first by hidden[0] [num_tokens, hidden_size] and so on; logits of few tokens are there at once."""
        num_top, found = row.request.prompt_logprobs, []
        assert num_top is not None
        for start in range(0, len(token_ids), RANKED_AT_ONCE):
            logits = self.model.logits(hidden[start : start + RANKED_AT_ONCE])
            if self._sharded is not None:
                logits = self._sharded.whole(logits)
            found += [rank(line, token_id, num_top) for line, token_id in zip(logits, token_ids[start:], strict=False)]
        return tuple(found)

    def _draw_shared(
        self,
        sampler: ShardedSampler,
        logits: torch.Tensor,
        rows: Sequence[Row],
        words: Mapping[int, Words],
        errors: Mapping[int, BaseException],
        edits: Mapping[int, LogitEdits],
    ) -> list[Draw | BaseException]:
        results: list[Draw | BaseException] = []
        for place, drawn in enumerate(sampler.draw(logits, [row.request for row in rows], [row.num_generated for row in rows], words, edits)):
            if place in errors:
                results.append(errors[place])
            elif drawn.token_id is None:
                results.append(nothing_allowed(rows[place].request) if (place in words or place in edits) and drawn.is_finite else not_finite())
            elif drawn.logprobs is None or drawn.token_id in rows[place].request.eos_token_ids:
                results.append(Draw(drawn.token_id))
            else:
                results.append(Draw(drawn.token_id, (drawn.logprobs,)))
        return results

    def _use_threads(self, count: int) -> None:
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)

    def _clear_broken(self, batch: Batch, hidden: torch.Tensor) -> list[ScheduledRow]:
        """Rows with a token in `hidden` [num_tokens, hidden_size] that is not finite. What those tokens left in the cache is zeroed."""
        broken = ~torch.isfinite(hidden).all(dim=-1)  # [num_tokens]
        self.cache.clear(batch.slot_mapping[broken])
        counts = torch.tensor([scheduled.num_tokens for scheduled in batch.rows])
        rows = torch.arange(len(batch.rows)).repeat_interleave(counts)  # [num_tokens]
        return [batch.rows[row] for row in sorted(set(rows[broken].tolist()))]


def not_finite() -> PocketLLMError:
    return PocketLLMError("The model computed values that are not finite, so no token can be drawn from them.")


def nothing_allowed(request: EngineRequest) -> PocketLLMError:
    if request.terms is not None:
        return ConfigurationError(
            'What this request allows leaves no token here, so its answer can be neither continued nor ended: relax "allowed_token_ids", "bad_words", '
            '"min_tokens", or the form that the answer is held to.',
            param="allowed_token_ids" if request.terms.allowed_token_ids is not None else "bad_words" if request.terms.bad_words else "min_tokens",
        )
    return PocketLLMError("The constraint on this answer allows no token here, so it can be neither continued nor ended.")
