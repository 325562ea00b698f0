"""Runs scheduled rows on a GPU: steps are queued there and read back later, and all but long ones are CUDA graphs.

The ids that a step draws stay on the GPU for the next one, which is launched before the host has read them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from pocketllm.backends.base import EngineRequest
from pocketllm.torch_engine.device_sampler import NOT_FINITE, DeviceSampler, DrawnTokens
from pocketllm.torch_engine.kernels.sampler import LastIds
from pocketllm.torch_engine.layers.attention import KVCache
from pocketllm.torch_engine.logit_edits import edits_of
from pocketllm.torch_engine.masks import MaskSource
from pocketllm.torch_engine.model_runner import not_finite, nothing_allowed
from pocketllm.torch_engine.models.model import Model
from pocketllm.torch_engine.prompt_ranks import PromptRanks, prompt_ranks
from pocketllm.torch_engine.runner import Draw, Ranked, Result
from pocketllm.torch_engine.scheduler import Row, ScheduledRow
from pocketllm.torch_engine.state_pool import StateCopy
from pocketllm.torch_engine.step_inputs import StepInputs
from pocketllm.torch_engine.step_shape import StepShape


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
        self._is_hybrid = cache.states is not None
        self._tables = torch.zeros(max_rows, max_blocks, dtype=torch.int32, device=self.device)
        self._written: dict[int, tuple[list[int], int]] = {}  # by slot: the row's blocks, and how many of them the table has
        self._last_ids = torch.zeros(max_rows + 1, dtype=torch.int64, device=self.device)  # by slot; the last is nobody's
        self._sampler = DeviceSampler(max_rows, model.vocab_size, self.device)
        self._fixed: list[_FixedStep] = []  # the smallest first

    def release(self, row: Row) -> None:
        """The table's line of its slot is written anew for the next row there."""
        self._written.pop(row.slot, None)

    def close(self, *, has_failed: bool) -> None:
        """Nothing is left to do."""

    @torch.inference_mode()
    def compile_sampler(self) -> None:
        """See DeviceSampler.compile. No step may be under way."""
        self._sampler.compile(LastIds(self._last_ids, torch.full((1,), self.max_rows, dtype=torch.int64, device=self.device)))

    @torch.inference_mode()
    def capture(self, shapes: Sequence[StepShape], on_graph: Callable[[int], None]) -> None:
        """Compute steps that one of `shapes` holds in the first that does, as a CUDA graph; without CUDA they are computed in it all the same.

        The largest is captured first, whose memory the others then share.

        Args:
            on_graph: told after each how many are done.
        """
        pool: Any = None  # torch's own handle
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None  # one for all: each has memory and cuBLAS a workspace of its own
        for done, shape in enumerate(reversed(shapes), 1):
            fixed = _FixedStep(self, shape)
            if stream is not None:
                pool = fixed.capture(stream, pool)
            self._fixed.insert(0, fixed)
            on_graph(done)

    @torch.inference_mode()
    def launch(self, step: Sequence[ScheduledRow], masks: MaskSource, copies: Sequence[StateCopy]) -> GpuFlight:
        """See runner.Runner."""
        if copies:
            assert self.cache.states is not None
            self.cache.states.run(copies)
        self._write_tables(step)
        order = sorted(range(len(step)), key=lambda place: step[place].num_tokens != 1)  # decoding rows first
        rows = [step[place] for place in order]
        sampling = [place for place in order if step[place].samples]
        words, errors = masks.take_all([step[place].row for place in sampling])
        shape = StepShape.of(rows)
        ranks = prompt_ranks(rows, order)
        # What a graph gives is of the last tokens alone.
        fixed = None if ranks is not None else next((fixed for fixed in self._fixed if fixed.shape.holds(shape)), None)
        step_inputs = StepInputs(shape, self.max_rows, self.device) if fixed is None else fixed.inputs
        step_inputs.send(rows, self.block_size, is_hybrid=self._is_hybrid)
        requests = [step[place].row.request for place in sampling]
        if sampling:  # ahead of the step, for between its kernels the device would wait for the copy
            edits = {sample: found for sample, place in enumerate(sampling) if (found := edits_of(step[place].row)) is not None}
            draws, slots = [step[place].row.num_generated for place in sampling], [step[place].row.slot for place in sampling] if edits else ()
            self._sampler.prepare(requests, draws, words, edits, slots)
        if ranks is not None:
            hidden = self._hidden(step_inputs)
            ranks.compute(hidden, self.model)
            output = self._wanted(hidden, step_inputs)
        else:
            output = self.compute(step_inputs) if fixed is None else fixed.run()
        if not sampling:
            return GpuFlight((), (), {}, None, ranks)
        logits = (output if step_inputs.shape.all_sample else self.model.logits(output[: len(sampling)]))[: len(sampling)]
        drawn = self._sampler.draw(logits, LastIds(self._last_ids, step_inputs["sample_slots"]))
        return GpuFlight(sampling, requests, errors, drawn, ranks)

    def compute(self, inputs: StepInputs) -> torch.Tensor:
        """Queue a step of the model, as far as a graph holds it.

        Returns:
            Where all rows decode and sample, their logits [num_samples, vocab_size] float32; else [num_samples, hidden_size] float32, of the tokens whose
            logits are wanted, so that the output head is computed for just as many as there are.
        """
        return self._wanted(self._hidden(inputs), inputs)

    def _hidden(self, inputs: StepInputs) -> torch.Tensor:
        """[num_tokens, hidden_size] float32 of a step's tokens."""
        token_ids, shape = inputs["token_ids"], inputs.shape
        if shape.num_decode:
            known = token_ids[: shape.num_decode]
            drawn = torch.where(known < 0, self._last_ids[inputs["input_slots"]], known)
            token_ids = torch.cat([drawn, token_ids[shape.num_decode :]]) if shape.num_prompts else drawn
        return self.model.forward(inputs.batch(token_ids, self._tables), self.cache)

    def _wanted(self, hidden: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        return self.model.logits(hidden) if inputs.shape.all_sample else hidden[inputs["sample_index"]]

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
        ranks: of the prompts that are ranked; None where none is.
    """

    def __init__(
        self,
        places: Sequence[int],
        requests: Sequence[EngineRequest],
        errors: Mapping[int, BaseException],
        drawn: DrawnTokens | None,
        ranks: PromptRanks | None,
    ) -> None:
        self._places, self._requests, self._errors, self._drawn, self._ranks = places, requests, errors, drawn, ranks

    def result(self) -> dict[int, Result]:
        results = self._draws()
        if self._ranks is None:
            return results
        for place, found in self._ranks.wait().items():
            drawn = results.get(place)
            if drawn is None:
                results[place] = Ranked(found)
            elif isinstance(drawn, Draw):
                results[place] = replace(drawn, prompt_logprobs=found)
        return results

    def _draws(self) -> dict[int, Result]:
        if self._drawn is None:
            return {}
        ids, status = self._drawn.wait()
        results: dict[int, Result] = {}
        for sample, (place, request) in enumerate(zip(self._places, self._requests, strict=True)):
            if sample in self._errors:
                results[place] = self._errors[sample]
            elif status[sample]:
                results[place] = not_finite() if status[sample] == NOT_FINITE else nothing_allowed(request)
            elif request.logprobs is None or ids[sample] in request.eos_token_ids:
                results[place] = Draw(ids[sample])
            else:
                results[place] = Draw(ids[sample], (self._drawn.logprobs(sample, request.logprobs),))
        return results


class _FixedStep:
    """Steps that are computed in one shape, up to what GpuRunner.compute returns."""

    def __init__(self, runner: GpuRunner, shape: StepShape) -> None:
        self.shape = shape
        self.inputs = StepInputs(shape, runner.max_rows, runner.device)
        self._runner = runner
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: torch.Tensor

    def capture(self, stream: torch.cuda.Stream, pool: Any) -> Any:
        """Make it a CUDA graph with memory of `pool`, or of a new one where that is None, after trying it on `stream`. Returns the pool."""
        runner, device = self._runner, self._runner.device
        self.inputs.send((), runner.block_size, is_hybrid=False)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):  # what a kernel's first launch does can't be captured
                runner.compute(self.inputs)
        torch.cuda.current_stream(device).wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
            self._output = runner.compute(self.inputs)
        return self._graph.pool()

    def run(self) -> torch.Tensor:
        """Queue the step that the inputs hold. What it returns is there until the next step of any captured shape."""
        if self._graph is None:
            return self._runner.compute(self.inputs)
        self._graph.replay()
        return self._output
