"""Runs scheduled rows on a GPU: steps are queued there and read back later, and steps in which every row decodes are CUDA graphs.

The ids that a step draws stay on the GPU for the next one, which is launched before the host has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.device_sampler import NOT_FINITE, DeviceSampler, DrawnTokens
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.layers.state_cache import HybridCache
from pocketllm.torch_engine.masks import Masks
from pocketllm.torch_engine.model_runner import not_finite, nothing_allowed
from pocketllm.torch_engine.models.model import Model
from pocketllm.torch_engine.runner import Draw
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy
from pocketllm.torch_engine.step_inputs import StepInputs


class GpuRunner:
    """One model with its cache on one GPU; see runner.Runner.

    Args:
        model: loaded.
        cache: blocks that the scheduler's pool counts.
        block_size: tokens a block.
        max_rows: most running rows.
        max_blocks: most blocks of a row.
    """

    def __init__(self, model: Model, cache: KVCache, block_size: int, max_rows: int, max_blocks: int) -> None:
        self.model, self.cache, self.block_size, self.max_rows = model, cache, block_size, max_rows
        self.vocab_size = model.vocab_size
        self.device = cache.device
        self.runs_ahead = True
        self._is_hybrid = isinstance(cache, HybridCache)
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=self.device)
        self._written: dict[int, tuple[list[int], int]] = {}  # by slot: the row's blocks, and how many of them the table has
        self._last_ids = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)  # by slot; the last is nobody's
        self._sampler = DeviceSampler(max_rows, model.vocab_size, self.device)
        self._graphs: dict[int, _DecodeGraph] = {}

    def release(self, row: Row) -> None:
        """The table's line of its slot is written anew for the next row there."""
        self._written.pop(row.slot, None)

    @torch.inference_mode()
    def capture(self, batch_sizes: Sequence[int], on_graph: Callable[[int], None]) -> None:
        """Capture decoding as a CUDA graph for each number of rows, the largest first, whose memory the others then share."""
        pool: Any = None  # torch's own handle
        for done, size in enumerate(sorted(batch_sizes, reverse=True), 1):
            graph = _DecodeGraph(self, size, pool)
            pool = graph.pool
            self._graphs[size] = graph
            on_graph(done)

    @torch.inference_mode()
    def launch(self, step: Sequence[ScheduledRow], masks: Masks, copies: Sequence[StateCopy]) -> GpuFlight:
        """See runner.Runner."""
        if copies:
            assert isinstance(self.cache, HybridCache)
            self.cache.states.run(copies)
        self._write_tables(step)
        order = sorted(range(len(step)), key=lambda place: step[place].num_tokens != 1)  # decoding rows first
        rows = [step[place] for place in order]
        sampling = [place for place in order if step[place].samples]
        words, errors = masks.take_all([step[place].row for place in sampling])
        query_lengths = tuple(one.num_tokens for one in rows if one.num_tokens != 1)
        graph = self._graph_for(len(rows)) if not query_lengths and len(sampling) == len(rows) else None
        inputs = graph.inputs if graph is not None else StepInputs(len(rows) - len(query_lengths), query_lengths, len(sampling), self.max_rows, self.device)
        inputs.send(rows, self.block_size, is_hybrid=self._is_hybrid)
        logits = self.compute(inputs) if graph is None else graph.replay()
        requests = [step[place].row.request for place in sampling]
        if not sampling:
            return GpuFlight((), (), {}, None)
        self._sampler.prepare(requests, [step[place].row.num_generated for place in sampling], words)
        drawn = self._sampler.draw(logits[: len(sampling)])
        slots = inputs["row_slots"][: len(sampling)].long() if graph is not None else inputs["sample_slots"]
        self._last_ids.index_copy_(0, slots, drawn.ids)
        return GpuFlight(sampling, requests, errors, drawn)

    def compute(self, inputs: StepInputs) -> torch.Tensor:
        """Queue a step of the model. Returns logits [num_samples, vocab_size] float32, of all rows in a graph; none where no row samples."""
        token_ids, count = inputs["token_ids"], inputs.num_decode
        if count:
            known = token_ids[:count]
            drawn = torch.where(known < 0, self._last_ids[inputs["input_slots"]], known)
            token_ids = drawn if not inputs.query_lengths else torch.cat([drawn, token_ids[count:]])
        hidden = self.model.forward(inputs.batch(token_ids, self._tables), self.cache)
        if inputs.num_samples is not None:
            hidden = hidden[inputs["sample_index"]]
        return self.model.logits(hidden) if hidden.shape[0] else hidden

    def _graph_for(self, num_rows: int) -> _DecodeGraph | None:
        size = min((size for size in self._graphs if size >= num_rows), default=None)
        return None if size is None else self._graphs[size]

    def _write_tables(self, step: Sequence[ScheduledRow]) -> None:
        """Bring the device's block tables up to date."""
        places: list[int] = []
        blocks: list[int] = []
        width = self._tables.shape[1]
        for one in step:
            row = one.row
            table, count = self._written.get(row.slot, (None, 0))
            if table is not row.block_table:  # a row's list of blocks is made anew whenever it starts
                count = 0
            if count < len(row.block_table):
                places += range(row.slot * width + count, row.slot * width + len(row.block_table))
                blocks += row.block_table[count:]
                self._written[row.slot] = row.block_table, len(row.block_table)
        if places:
            both = torch.tensor([places, blocks], dtype=torch.int64, pin_memory=self.device.type == "cuda").to(self.device, non_blocking=True)
            self._tables.view(-1).index_copy_(0, both[0], both[1].int())


class GpuFlight:
    """A step under way; see runner.Flight.

    Args:
        places: in the step, of the rows that sample.
        requests: of those.
        errors: by sample, of rows whose mask failed.
        drawn: what they drew, in their order; None where none samples.
    """

    def __init__(self, places: Sequence[int], requests: Sequence[EngineRequest], errors: Mapping[int, BaseException], drawn: DrawnTokens | None) -> None:
        self._places, self._requests, self._errors, self._drawn = places, requests, errors, drawn

    def result(self) -> dict[int, Draw | BaseException]:
        if self._drawn is None:
            return {}
        ids, status = self._drawn.wait()
        results: dict[int, Draw | BaseException] = {}
        for sample, (place, request) in enumerate(zip(self._places, self._requests, strict=True)):
            if sample in self._errors:
                results[place] = self._errors[sample]
            elif status[sample]:
                results[place] = not_finite() if status[sample] == NOT_FINITE else nothing_allowed()
            elif request.logprobs is None or ids[sample] in request.eos_token_ids:
                results[place] = Draw(ids[sample])
            else:
                results[place] = Draw(ids[sample], (self._drawn.logprobs(sample, request.logprobs),))
        return results


class _DecodeGraph:
    """Decoding of up to `size` rows, up to their logits, as a CUDA graph."""

    def __init__(self, runner: GpuRunner, size: int, pool: Any) -> None:
        self.inputs = StepInputs(size, (), None, runner.max_rows, runner.device)
        self.inputs.send((), runner.block_size, is_hybrid=False)
        stream = torch.cuda.Stream(runner.device)
        stream.wait_stream(torch.cuda.current_stream(runner.device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # what a kernel's first launch does can't be captured
                runner.compute(self.inputs)
        torch.cuda.current_stream(runner.device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._logits = runner.compute(self.inputs)
        self.pool = self._graph.pool()

    def replay(self) -> torch.Tensor:
        """Logits [size, vocab_size] float32, until the next replay of any graph."""
        self._graph.replay()
        return self._logits
