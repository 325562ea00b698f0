"""Log probabilities of drawn ids and of the most likely ids, for many rows on the device: torch_engine/logprobs.py without a host in between."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine import logprobs
from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs
from pocketllm.torch_engine.kernels.sampler import LOWEST_ORDER, MAX_VOCAB_SIZE, order_of

_LOWEST = tl.constexpr(logprobs.LOWEST)


def device_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, num_top: int, rows: torch.Tensor | None = None, *, chunk: int = 4096
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log probabilities over the whole vocabulary, as the logits give them. Reads nothing on the host.

    Args:
        logits: [num_rows, vocab_size] float32, a row's values side by side.
        ids: [num_rows] int64, the id that each row drew.
        num_top: most likely ids wanted of each row.
        rows: [num_ranked] int64, the rows that are ranked; None is all of them.
        chunk: ids that one program reads, a power of two.

    Returns:
        logprob [num_ranked] float64, of the drawn ids; top_ids [num_ranked, num_top] int32, most likely first and of equal ones the lower id first; and
        top_logprobs, of their shape in float64. None is below logprobs.LOWEST. A row whose logits are not finite has no meaningful results.
    """
    num_rows, vocab_size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    assert vocab_size <= MAX_VOCAB_SIZE
    num_top = min(num_top, vocab_size)
    num_ranked = num_rows if rows is None else rows.shape[0]
    device = logits.device
    chunk = max(chunk, triton.next_power_of_2(max(num_top, 1)))
    num_chunks = triton.cdiv(vocab_size, chunk)
    sums = torch.empty((2, num_ranked, num_chunks), dtype=torch.float32, device=device)  # largest logit, sum of exp(logit - largest)
    orders = torch.empty((num_ranked, num_chunks, max(num_top, 1)), dtype=torch.int64, device=device)
    drawn = torch.empty(num_ranked, dtype=torch.float64, device=device)
    top_ids = torch.empty((num_ranked, num_top), dtype=torch.int32, device=device)
    top = torch.empty((num_ranked, num_top), dtype=torch.float64, device=device)
    fixed = {"NUM_TOP": num_top, **launch_options(device)}
    index = torch.arange(num_rows, device=device) if rows is None else rows
    _rank_chunk[(num_chunks, num_ranked)](
        logits, logits.stride(0), vocab_size, index, sums, orders, CHUNK=chunk, num_warps=max(1, min(8, chunk // 512)), **fixed
    )
    _merge[(num_ranked,)](
        logits, logits.stride(0), index, ids, sums, orders, drawn, top_ids, top, NUM_CHUNKS=num_chunks, PADDED_CHUNKS=triton.next_power_of_2(num_chunks),
        PADDED_ORDERS=triton.next_power_of_2(num_chunks * max(num_top, 1)), num_warps=4, **fixed,
    )  # fmt: skip
    return drawn, top_ids, top


@triton.jit
def _rank_chunk(
    logits, row_stride, vocab_size, rows, sums, orders, CHUNK: tl.constexpr, NUM_TOP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    chunk, place = tl.program_id(0), tl.program_id(1)
    num_chunks, num_ranked = tl.num_programs(0), tl.num_programs(1)
    wait_for_inputs(PDL)
    row = tl.load(rows + place)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = ids < vocab_size
    values = tl.load(logits + row * row_stride + ids, mask=inside, other=float("-inf"))
    largest = tl.max(values, 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)  # a chunk of minus infinities has a sum of 0
    at = place * num_chunks + chunk
    tl.store(sums + at, largest)
    tl.store(sums + num_ranked * num_chunks + at, tl.sum(tl.exp(values - base), 0))
    if NUM_TOP > 0:
        order = tl.where(inside, order_of(values, ids), LOWEST_ORDER)
        for number in range(0, NUM_TOP):
            best = tl.max(order, 0)
            tl.store(orders + at * NUM_TOP + number, best)
            order = tl.where(order == best, LOWEST_ORDER, order)


@triton.jit
def _merge(
    logits, row_stride, rows, drawn_ids, sums, orders, drawn_out, ids_out, top_out,
    NUM_CHUNKS: tl.constexpr, PADDED_CHUNKS: tl.constexpr, PADDED_ORDERS: tl.constexpr, NUM_TOP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    num_ranked = tl.num_programs(0)
    wait_for_inputs(PDL)
    row = tl.load(rows + place)
    lane = tl.arange(0, PADDED_CHUNKS)
    at = sums + place * NUM_CHUNKS + lane
    maxima = tl.load(at, mask=lane < NUM_CHUNKS, other=float("-inf"))
    largest = tl.max(maxima, 0)
    parts = tl.load(at + num_ranked * NUM_CHUNKS, mask=lane < NUM_CHUNKS, other=0.0)
    total = largest.to(tl.float64) + tl.log(tl.sum(parts.to(tl.float64) * tl.exp(maxima - largest).to(tl.float64), 0))
    own = tl.load(logits + row * row_stride + tl.load(drawn_ids + row)).to(tl.float64)
    tl.store(drawn_out + place, tl.maximum(own - total, _LOWEST))
    if NUM_TOP > 0:
        lanes = tl.arange(0, PADDED_ORDERS)
        order = tl.load(orders + place * NUM_CHUNKS * NUM_TOP + lanes, mask=lanes < NUM_CHUNKS * NUM_TOP, other=LOWEST_ORDER)
        for number in range(0, NUM_TOP):
            best = tl.max(order, 0)
            key = (best >> 20).to(tl.int32)
            value = (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
            tl.store(ids_out + place * NUM_TOP + number, (1048575 - (best & 1048575)).to(tl.int32))
            tl.store(top_out + place * NUM_TOP + number, tl.maximum(value.to(tl.float64) - total, _LOWEST))
            order = tl.where(order == best, LOWEST_ORDER, order)
