"""A mixture of experts on a GPU: each token's experts alone are computed, all of them in two grouped products, and nothing is read on the host.

The pairs of token and expert are sorted by expert, each expert's part padded to whole blocks of rows, so that a program of a product works for one
expert. How many blocks there are is known on the device alone: as many programs are started as there can be at most, and those without a block end at
once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.activation import ACTIVATIONS, activate, gated_activation_reference
from pocketllm.torch_engine.kernels.launch import capability, launch_options, wait_for_inputs

_SORT_STEP = 1024  # pairs that a program of the sort reads at once


@dataclass(frozen=True, slots=True)
class GroupedConfig:
    """Tiles of one grouped product: rows, columns and the depth of a step, powers of two of at least 16."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def choose_configs(num_tokens: int, num_experts: int, top_k: int, element_size: int, arch: tuple[int, int] = (9, 0)) -> tuple[GroupedConfig, GroupedConfig]:
    """Tiles of the gate and up product, and of the down product; both have the same block_m, the rows that an expert has on average or a little more."""
    per_expert = num_tokens * top_k / num_experts
    block_m = 16 if per_expert <= 8 else 32 if per_expert <= 24 else 64 if per_expert <= 64 else 128
    if element_size == 4 or arch < (8, 0):  # no tensor cores, as Triton has them: operands in registers, so small tiles
        own = {16: GroupedConfig(16, 32, 32, 4, 2), 32: GroupedConfig(32, 64, 16, 4, 2)}.get(block_m, GroupedConfig(64, 64, 16, 8, 2))
        return own, own
    depth = 128 // element_size  # 128 bytes of a weight's row
    stages = 4 if arch >= (9, 0) or arch == (8, 0) else 3  # the others have 100 KiB of shared memory or less
    if block_m == 16:  # bound by the weights: many programs, each with long reads
        return GroupedConfig(16, 32, 2 * depth, 4, stages), GroupedConfig(16, 32, 2 * depth, 4, stages)
    if block_m == 32:
        return GroupedConfig(32, 64, depth, 4, stages), GroupedConfig(32, 64, depth, 4, stages)
    if block_m == 64:
        return GroupedConfig(64, 64, depth, 4, stages), GroupedConfig(64, 128, depth, 4, stages)
    return GroupedConfig(128, 64, depth, 8, stages), GroupedConfig(128, 128, depth, 8, stages)


def mixture_of_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    *,
    normalize: bool,
    activation: str,
    add_to: torch.Tensor | None = None,
    configs: tuple[GroupedConfig, GroupedConfig] | None = None,
) -> torch.Tensor:
    """layers.feed_forward.MixtureOfExperts of dense experts.

    Args:
        x: [T, K], in the experts' dtype.
        router: [E, K] float32; it computes in float32.
        gate_up: [E, 2 * N, K], each expert's gate rows first.
        down: [E, K, N].
        top_k: experts a token, the most likely ones; of equally likely ones the first.
        normalize: divide the chosen shares by their sum.
        activation: "silu" or "gelu_tanh".
        add_to: [T, K] float32 that the result is added to, in place; it is then what is returned.
        configs: tiles of both products; None chooses by the shape.

    Returns:
        [T, K] in x's dtype, or `add_to`.
    """
    T, K = x.shape
    E, N = down.shape[0], down.shape[2]
    assert gate_up.shape == (E, 2 * N, K)
    assert down.shape == (E, K, N)
    assert gate_up.dtype == down.dtype == x.dtype
    assert gate_up.is_contiguous()
    assert down.is_contiguous()
    assert x.stride(1) == 1
    out = torch.empty_like(x) if add_to is None else add_to
    if T == 0:
        return out
    options = launch_options(x.device)
    up_config, down_config = configs or choose_configs(T, E, top_k, x.element_size(), capability(x.device))
    block_m = up_config.block_m
    assert down_config.block_m == block_m
    weights, chosen = route(torch.mm(x.float(), router.t()), top_k, normalize=normalize)
    pairs, block_experts = sort_by_expert(chosen, E, block_m)
    total, num_blocks = T * top_k, block_experts.shape[0]
    inner = torch.empty((total, N), dtype=x.dtype, device=x.device)
    outer = torch.empty((total, K), dtype=x.dtype, device=x.device)
    shared = {"TOP_K": top_k, "BLOCK_M": block_m, **options}
    _gate_up_kernel[(num_blocks * triton.cdiv(N, up_config.block_n),)](
        x, x.stride(0), gate_up, inner, pairs, block_experts, total, N, K, ACTIVATION=ACTIVATIONS[activation], EVEN_K=K % up_config.block_k == 0,
        BLOCK_N=up_config.block_n, BLOCK_K=up_config.block_k, num_warps=up_config.num_warps, num_stages=up_config.num_stages, **shared,
    )  # fmt: skip
    _down_kernel[(num_blocks * triton.cdiv(K, down_config.block_n),)](
        inner, down, outer, pairs, block_experts, total, K, N, EVEN_K=N % down_config.block_k == 0,
        BLOCK_N=down_config.block_n, BLOCK_K=down_config.block_k, num_warps=down_config.num_warps, num_stages=down_config.num_stages, **shared,
    )  # fmt: skip
    return combine(outer, weights, out, add=add_to is not None)


def combine(outer: torch.Tensor, shares: torch.Tensor, out: torch.Tensor, *, add: bool = False) -> torch.Tensor:
    """The weighted sum of what each token's experts gave.

    Args:
        outer: [T * top_k, K], contiguous, a token's experts one after another.
        shares: [T, top_k] float32, contiguous.
        out: [T, K], rows contiguous, which is written, or with `add` added to, and returned.
    """
    (T, K), top_k = out.shape, shares.shape[1]
    block = min(1024, triton.next_power_of_2(K))
    _combine_kernel[(T, triton.cdiv(K, block))](
        outer, shares, out, out.stride(0), K, TOP_K=top_k, ADD=add, BLOCK=block, num_warps=4, **launch_options(out.device)
    )  # fmt: skip
    return out


def route(scores: torch.Tensor, top_k: int, *, normalize: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """scores [T, E] float32, contiguous -> each token's `top_k` largest shares of their softmax [T, top_k] float32, largest first, and their experts, int32."""
    T, E = scores.shape
    weights = torch.empty((T, top_k), dtype=torch.float32, device=scores.device)
    chosen = torch.empty((T, top_k), dtype=torch.int32, device=scores.device)
    padded = triton.next_power_of_2(E)
    _route_kernel[(T,)](scores, weights, chosen, E, TOP_K=top_k, NORMALIZE=normalize, PADDED=padded, num_warps=1, **launch_options(scores.device))
    return weights, chosen


def sort_by_expert(chosen: torch.Tensor, num_experts: int, block_m: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of pairs that have one expert each.

    Args:
        chosen: [T, top_k] int32 experts; pair number i is expert number i % top_k of token i // top_k.

    Returns:
        pairs [num_blocks * block_m] int32: numbers of pairs, ascending in each expert's part, T * top_k where a block is padded; and each block's expert
        [num_blocks] int32, -1 for blocks that are not needed (whose pairs are not written).
    """
    total = chosen.numel()
    num_blocks = total // block_m + min(num_experts, total)  # each expert that has pairs pads one block at most
    pairs = torch.empty(num_blocks * block_m, dtype=torch.int32, device=chosen.device)
    block_experts = torch.empty(num_blocks, dtype=torch.int32, device=chosen.device)
    step = max(32, min(_SORT_STEP, triton.next_power_of_2(total)))
    _sort_kernel[(num_experts,)](
        chosen, pairs, block_experts, total, num_blocks, PADDED=max(32, triton.next_power_of_2(num_experts)), BLOCK_M=block_m, STEP=step,
        num_warps=max(1, step // 256), **launch_options(chosen.device),
    )  # fmt: skip
    return pairs, block_experts


@triton.jit
def _route_kernel(scores, weights, chosen, num_experts, TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0)
    lane = tl.arange(0, PADDED)
    wait_for_inputs(PDL)
    score = tl.load(scores + token.to(tl.int64) * num_experts + lane, mask=lane < num_experts, other=float("-inf"))
    largest = tl.max(score, 0)
    total = tl.sum(tl.exp(score - largest), 0)
    if NORMALIZE:  # by the sum of the chosen ones alone
        left = score
        total = tl.zeros([], tl.float32)
        for _ in tl.static_range(TOP_K):
            best = tl.max(left, 0)
            total += tl.exp(best - largest)
            left = tl.where(lane == tl.min(tl.where(left == best, lane, PADDED - 1), 0), float("-inf"), left)
    left = score  # shares far below the largest are equally 0, their scores are not equal
    for number in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        place = tl.min(tl.where(left == best, lane, PADDED - 1), 0)
        left = tl.where(lane == place, float("-inf"), left)
        tl.store(weights + token * TOP_K + number, tl.exp(best - largest) / total)
        tl.store(chosen + token * TOP_K + number, tl.minimum(place, num_experts - 1))  # of values that are no numbers too: an expert that there is


@triton.jit(do_not_specialize=["total", "num_blocks"])
def _sort_kernel(
    chosen, pairs, block_experts, total, num_blocks, PADDED: tl.constexpr, BLOCK_M: tl.constexpr, STEP: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    expert = tl.program_id(0)
    experts = tl.arange(0, PADDED)
    lane = tl.arange(0, STEP)
    wait_for_inputs(PDL)
    counts = tl.zeros([PADDED], tl.int32)
    for start in range(0, total, STEP):
        inside = start + lane < total
        counts += tl.histogram(tl.load(chosen + start + lane, mask=inside, other=0), PADDED)
        counts -= tl.where(experts == 0, tl.sum((start + lane >= total).to(tl.int32), 0), 0)  # those beyond the end counted as expert 0
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(experts < expert, blocks, 0), 0)
    own = tl.sum(tl.where(experts == expert, blocks, 0), 0)
    rows = tl.arange(0, BLOCK_M)
    for block in range(0, own):
        tl.store(block_experts + first + block, expert)
    if expert == tl.num_programs(0) - 1:
        for block in range(first + own, num_blocks):
            tl.store(block_experts + block, -1)
    if own > 0:
        end = tl.sum(tl.where(experts == expert, counts, 0), 0)
        last = (own - 1) * BLOCK_M + rows
        tl.store(pairs + first * BLOCK_M + last, tl.zeros([BLOCK_M], tl.int32) + total, mask=last >= end)
        written = first * BLOCK_M
        for start in range(0, total, STEP):
            is_own = tl.load(chosen + start + lane, mask=start + lane < total, other=-1) == expert
            place = tl.cumsum(is_own.to(tl.int32), 0)
            tl.store(pairs + written + place - 1, start + lane, mask=is_own)
            written += tl.sum(is_own.to(tl.int32), 0)


@triton.jit(do_not_specialize=["total"])
def _gate_up_kernel(
    x, x_stride, weight, out, pairs, block_experts, total, N, K,
    TOP_K: tl.constexpr, ACTIVATION: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_inputs(PDL)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        depth = tl.arange(0, BLOCK_K)
        x_at = x + (pair // TOP_K).to(tl.int64)[:, None] * x_stride + depth[None, :]
        gate_at = weight + (expert.to(tl.int64) * 2 * N + columns)[None, :] * K + depth[:, None]
        up_at = gate_at + N.to(tl.int64) * K
        has_row = (pair < total)[:, None]
        has_column = (columns < N)[None, :]
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            if EVEN_K:
                a = tl.load(x_at, mask=has_row, other=0.0)
                b = tl.load(gate_at, mask=has_column, other=0.0)
                c = tl.load(up_at, mask=has_column, other=0.0)
            else:
                inside = start + depth < K
                a = tl.load(x_at, mask=has_row & inside[None, :], other=0.0)
                b = tl.load(gate_at, mask=has_column & inside[:, None], other=0.0)
                c = tl.load(up_at, mask=has_column & inside[:, None], other=0.0)
            gate = tl.dot(a, b, gate, input_precision="ieee")
            up = tl.dot(a, c, up, input_precision="ieee")
            x_at += BLOCK_K
            gate_at += BLOCK_K
            up_at += BLOCK_K
        y = activate(gate, ACTIVATION) * up
        tl.store(out + pair.to(tl.int64)[:, None] * N + columns[None, :], y.to(out.dtype.element_ty), mask=has_row & has_column)


@triton.jit(do_not_specialize=["total"])
def _down_kernel(
    x, weight, out, pairs, block_experts, total, N, K,
    TOP_K: tl.constexpr, EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    num_columns = tl.cdiv(N, BLOCK_N)
    block = tl.program_id(0) // num_columns
    columns = tl.program_id(0) % num_columns * BLOCK_N + tl.arange(0, BLOCK_N)
    wait_for_inputs(PDL)
    expert = tl.load(block_experts + block)
    if expert >= 0:
        pair = tl.load(pairs + block * BLOCK_M + tl.arange(0, BLOCK_M))
        depth = tl.arange(0, BLOCK_K)
        x_at = x + pair.to(tl.int64)[:, None] * K + depth[None, :]
        weight_at = weight + (expert.to(tl.int64) * N + columns)[None, :] * K + depth[:, None]
        has_row = (pair < total)[:, None]
        has_column = (columns < N)[None, :]
        y = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in range(0, K, BLOCK_K):
            if EVEN_K:
                a = tl.load(x_at, mask=has_row, other=0.0)
                b = tl.load(weight_at, mask=has_column, other=0.0)
            else:
                inside = start + depth < K
                a = tl.load(x_at, mask=has_row & inside[None, :], other=0.0)
                b = tl.load(weight_at, mask=has_column & inside[:, None], other=0.0)
            y = tl.dot(a, b, y, input_precision="ieee")
            x_at += BLOCK_K
            weight_at += BLOCK_K
        tl.store(out + pair.to(tl.int64)[:, None] * N + columns[None, :], y.to(out.dtype.element_ty), mask=has_row & has_column)


@triton.jit
def _combine_kernel(outer, weights, out, out_stride, size, TOP_K: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    wait_for_inputs(PDL)
    at = out + token * out_stride + columns
    total = tl.zeros([BLOCK], tl.float32)
    for number in tl.static_range(TOP_K):
        part = tl.load(outer + (token * TOP_K + number) * size + columns, mask=inside, other=0.0)
        total += part.to(tl.float32) * tl.load(weights + token * TOP_K + number)
    if ADD:
        total += tl.load(at, mask=inside, other=0.0)
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


def mixture_of_experts_reference(
    x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, top_k: int, *, normalize: bool, activation: str
) -> torch.Tensor:
    """`mixture_of_experts` in torch and float32, one token after the other: [T, K] float32."""
    shares = (x.float() @ router.t()).softmax(-1)
    shares, chosen = shares.sort(dim=-1, descending=True, stable=True)
    shares, chosen = shares[:, :top_k], chosen[:, :top_k]
    if normalize:
        shares = shares / shares.sum(-1, keepdim=True)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for token, (weights, experts) in enumerate(zip(shares, chosen.tolist(), strict=True)):
        for weight, expert in zip(weights, experts, strict=True):
            inner = gated_activation_reference((x[token : token + 1].float() @ gate_up[expert].float().t()), activation)
            out[token] += weight * (inner @ down[expert].float().t())[0]
    return out
