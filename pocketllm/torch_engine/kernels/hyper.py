"""Hyper-connections of few tokens on a GPU, in two kernels a site: the lanes take what the block before gave and are scored, then they are gathered.

See layers/hyper_connection.py for what is computed. The scores' matrix is read by many programs, each with some columns of all lanes; the sums of all of
them are known to the second kernel alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pocketllm.torch_engine.kernels.launch import launch_options, wait_for_inputs

_COLUMNS = 64  # of each lane, that a program scores


@dataclass(frozen=True, slots=True)
class LaneScores:
    """What each program of `spread_and_score` found.

    Args:
        sums: [T, num_parts, padded] float32, products with the rows of the matrix.
        squares: [T, num_parts] float32.
    """

    sums: torch.Tensor
    squares: torch.Tensor


def spread_and_score(
    lanes: torch.Tensor, matrix: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None
) -> tuple[torch.Tensor, LaneScores]:
    """The lanes after a block, and their products with `matrix`.

    Args:
        lanes: [T, num_lanes, H] float32, each lane's values adjacent. num_lanes is a power of two.
        matrix: [count, num_lanes * H] float32, contiguous.
        given: what the block gave [T, H], the lanes' shares of it [T, num_lanes] float32, and their mixing [T, num_lanes, num_lanes] float32, all contiguous;
            None leaves the lanes as they are.

    Returns:
        The lanes, and their scores.
    """
    T, num_lanes, H = lanes.shape
    padded, parts = triton.next_power_of_2(matrix.shape[0]), triton.cdiv(H, _COLUMNS)
    sums = torch.empty(T, parts, padded, dtype=torch.float32, device=lanes.device)
    squares = torch.empty(T, parts, dtype=torch.float32, device=lanes.device)
    out = lanes if given is None else torch.empty(T, num_lanes, H, dtype=torch.float32, device=lanes.device)
    output, shares, mixing = given or (lanes, lanes, lanes)
    _score_kernel[(parts, T)](
        lanes, output, shares, mixing, matrix, out, sums, squares, lanes.stride(0), lanes.stride(1), H, matrix.shape[0],
        SPREAD=given is not None, LANES=num_lanes, PADDED=padded, COLUMNS=_COLUMNS, num_warps=4, **launch_options(lanes.device),
    )  # fmt: skip
    return out, LaneScores(sums, squares)


def gather_lanes(
    lanes: torch.Tensor, scores: LaneScores, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, eps: float,
    norm: tuple[torch.Tensor, float, torch.dtype] | None,
) -> torch.Tensor:  # fmt: skip
    """The sum of the lanes, each times sigmoid(score * scale + base) + eps.

    Args:
        lanes: [T, num_lanes, H] float32, each lane's values adjacent.
        scores: of them; the first num_lanes are used.
        scale, base: [count] float32.
        norm_eps: of the lanes' norm.
        eps: added to the shares.
        norm: weights [H] float32, eps and dtype of a norm of the sum, or None.

    Returns:
        [T, H] in the norm's dtype, or float32.
    """
    T, _, H = lanes.shape
    weight, own_eps, dtype = norm or (base, 0.0, torch.float32)
    out = torch.empty(T, H, dtype=dtype, device=lanes.device)
    _launch_gather(lanes, scores, scale, base, norm_eps, eps, weight, own_eps, out, out, out, has_norm=norm is not None, iterations=0)
    return out


def gather_and_mix(
    lanes: torch.Tensor, scores: LaneScores, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, eps: float,
    norm: tuple[torch.Tensor, float, torch.dtype], iterations: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """`gather_lanes`, and what `spread_and_score` needs for the block's result.

    Args:
        scores: of num_lanes shares to gather by, as many to spread by, and num_lanes * num_lanes of the mixing.
        iterations: of rows and columns of the mixing brought to sum 1 in turn, at least 1.

    Returns:
        The sum [T, H] in the norm's dtype; shares [T, num_lanes] and mixing [T, num_lanes, num_lanes], float32.
    """
    T, num_lanes, H = lanes.shape
    out = torch.empty(T, H, dtype=norm[2], device=lanes.device)
    shares = torch.empty(T, num_lanes, dtype=torch.float32, device=lanes.device)
    mixing = torch.empty(T, num_lanes, num_lanes, dtype=torch.float32, device=lanes.device)
    _launch_gather(lanes, scores, scale, base, norm_eps, eps, norm[0], norm[1], out, shares, mixing, has_norm=True, iterations=iterations)
    return out, shares, mixing


def _launch_gather(
    lanes: torch.Tensor, scores: LaneScores, scale: torch.Tensor, base: torch.Tensor, norm_eps: float, eps: float, weight: torch.Tensor, own_eps: float,
    out: torch.Tensor, shares: torch.Tensor, mixing: torch.Tensor, *, has_norm: bool, iterations: int,
) -> None:  # fmt: skip
    T, num_lanes, H = lanes.shape
    block = triton.next_power_of_2(H)
    _gather_kernel[(2 if iterations else 1, T)](
        lanes, scores.sums, scores.squares, scale, base, weight, out, shares, mixing, lanes.stride(0), lanes.stride(1), H, scores.squares.shape[1],
        norm_eps, eps, own_eps, iterations, NORM=has_norm, LANES=num_lanes, PADDED=scores.sums.shape[2], BLOCK=block,
        PARTS=triton.next_power_of_2(scores.squares.shape[1]), num_warps=min(16, max(1, block // 256)), **launch_options(lanes.device),
    )  # fmt: skip


@triton.jit
def _score_kernel(
    lanes, output, shares, mixing, matrix, out, sums, squares, token_stride, lane_stride, H, count,
    SPREAD: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    columns = part * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < H
    rows = tl.arange(0, PADDED)
    at = rows[:, None, None] * (LANES * H) + lane[None, :, None] * H + columns[None, None, :]
    weights = tl.load(matrix + at, mask=(rows < count)[:, None, None] & inside[None, None, :], other=0.0)
    wait_for_inputs(PDL)
    if SPREAD:
        given = tl.load(output + token * H + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(shares + token * LANES + lane)[:, None] * given[None, :]
        for other in tl.static_range(LANES):
            old = tl.load(lanes + token * token_stride + other * lane_stride + columns, mask=inside, other=0.0)
            values += tl.load(mixing + (token * LANES + other) * LANES + lane)[:, None] * old[None, :]
        tl.store(out + (token * LANES + lane)[:, None] * H + columns[None, :], values, mask=inside[None, :])
    else:
        values = tl.load(lanes + token * token_stride + lane[:, None] * lane_stride + columns[None, :], mask=inside[None, :], other=0.0)
    products = tl.sum(tl.sum(weights * values[None, :, :], 2), 1)
    parts = tl.num_programs(0)
    tl.store(sums + (token * parts + part) * PADDED + rows, products)
    tl.store(squares + token * parts + part, tl.sum(tl.sum(values * values, 1), 0))


@triton.jit
def _gather_kernel(
    lanes, sums, squares, scale, base, norm_weight, out, shares, mixing, token_stride, lane_stride, H, num_parts, norm_eps, eps, own_eps, iterations,
    NORM: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program 0 of a token gathers, and program 1 finds how its lanes mix."""
    token = tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, LANES)
    part = tl.arange(0, PARTS)
    has_part = part < num_parts
    first = sums + (token * num_parts + part) * PADDED
    if tl.program_id(0) == 0:
        columns = tl.arange(0, BLOCK)
        inside = columns < H
        if NORM:
            weight = tl.load(norm_weight + columns, mask=inside, other=0.0)
        own_scale, own_base = tl.load(scale + lane), tl.load(base + lane)
        wait_for_inputs(PDL)
        values = tl.load(lanes + token * token_stride + lane[:, None] * lane_stride + columns[None, :], mask=inside[None, :], other=0.0)
        square = tl.sum(tl.load(squares + token * num_parts + part, mask=has_part, other=0.0), 0)
        score = tl.sum(tl.load(first[:, None] + lane[None, :], mask=has_part[:, None], other=0.0), 0)
        score = score * tl.rsqrt(square / (LANES * H) + norm_eps) * own_scale + own_base
        x = tl.sum((tl.sigmoid(score) + eps)[:, None] * values, 0)
        if NORM:
            x = x * tl.rsqrt(tl.sum(x * x, 0) / H + own_eps) * weight
        tl.store(out + token * H + columns, x.to(out.dtype.element_ty), mask=inside)
    else:
        place = tl.arange(0, LANES * LANES)
        own_scale, own_base = tl.load(scale + LANES + lane), tl.load(base + LANES + lane)
        pair_scale, pair_base = tl.load(scale + 2 * LANES + place), tl.load(base + 2 * LANES + place)
        wait_for_inputs(PDL)
        square = tl.sum(tl.load(squares + token * num_parts + part, mask=has_part, other=0.0), 0)
        norm = tl.rsqrt(square / (LANES * H) + norm_eps)
        score = tl.sum(tl.load(first[:, None] + LANES + lane[None, :], mask=has_part[:, None], other=0.0), 0)
        tl.store(shares + token * LANES + lane, 2.0 * tl.sigmoid(score * norm * own_scale + own_base))
        mix = tl.sum(tl.load(first[:, None] + 2 * LANES + place[None, :], mask=has_part[:, None], other=0.0), 0)
        mix = mix * norm * pair_scale + pair_base
        if LANES == 4:
            mix = _balance_4(mix, place, eps, iterations)
        else:
            mix = tl.reshape(mix, [LANES, LANES])
            mix = tl.exp(mix - tl.max(mix, 1)[:, None])
            mix = mix / tl.sum(mix, 1)[:, None] + eps
            mix = mix / (tl.sum(mix, 0)[None, :] + eps)
            for _ in range(1, iterations):
                mix = mix / (tl.sum(mix, 1)[:, None] + eps)
                mix = mix / (tl.sum(mix, 0)[None, :] + eps)
            mix = tl.reshape(mix, [LANES * LANES])
        tl.store(mixing + token * LANES * LANES + place, mix)


@triton.jit
def _shares_of(a, b, c, d, eps):
    """Each over the sum of all, and eps."""
    factor = 1.0 / (a + b + (c + d) + eps)
    return a * factor, b * factor, c * factor, d * factor


@triton.jit
def _softmax_of(a, b, c, d):
    top = tl.maximum(tl.maximum(a, b), tl.maximum(c, d))
    return _shares_of(tl.exp(a - top), tl.exp(b - top), tl.exp(c - top), tl.exp(d - top), 0.0)


@triton.jit
def _balance_4(mix, place, eps, iterations):
    """The mixing of four lanes, from its scores [16]. Each thread has all of it: sums over neighbours would each wait for an exchange."""
    a0, a1, a2, a3 = _softmax_of(_at(mix, place, 0), _at(mix, place, 1), _at(mix, place, 2), _at(mix, place, 3))
    b0, b1, b2, b3 = _softmax_of(_at(mix, place, 4), _at(mix, place, 5), _at(mix, place, 6), _at(mix, place, 7))
    c0, c1, c2, c3 = _softmax_of(_at(mix, place, 8), _at(mix, place, 9), _at(mix, place, 10), _at(mix, place, 11))
    d0, d1, d2, d3 = _softmax_of(_at(mix, place, 12), _at(mix, place, 13), _at(mix, place, 14), _at(mix, place, 15))
    a0, b0, c0, d0 = _shares_of(a0 + eps, b0 + eps, c0 + eps, d0 + eps, eps)
    a1, b1, c1, d1 = _shares_of(a1 + eps, b1 + eps, c1 + eps, d1 + eps, eps)
    a2, b2, c2, d2 = _shares_of(a2 + eps, b2 + eps, c2 + eps, d2 + eps, eps)
    a3, b3, c3, d3 = _shares_of(a3 + eps, b3 + eps, c3 + eps, d3 + eps, eps)
    for _ in range(1, iterations):
        a0, a1, a2, a3 = _shares_of(a0, a1, a2, a3, eps)
        b0, b1, b2, b3 = _shares_of(b0, b1, b2, b3, eps)
        c0, c1, c2, c3 = _shares_of(c0, c1, c2, c3, eps)
        d0, d1, d2, d3 = _shares_of(d0, d1, d2, d3, eps)
        a0, b0, c0, d0 = _shares_of(a0, b0, c0, d0, eps)
        a1, b1, c1, d1 = _shares_of(a1, b1, c1, d1, eps)
        a2, b2, c2, d2 = _shares_of(a2, b2, c2, d2, eps)
        a3, b3, c3, d3 = _shares_of(a3, b3, c3, d3, eps)
    row = place // 4
    column = place % 4
    first = _of_four(column, a0, a1, a2, a3)
    second = _of_four(column, b0, b1, b2, b3)
    third = _of_four(column, c0, c1, c2, c3)
    fourth = _of_four(column, d0, d1, d2, d3)
    return _of_four(row, first, second, third, fourth)


@triton.jit
def _at(values, place, number: tl.constexpr):
    return tl.sum(tl.where(place == number, values, 0.0), 0)


@triton.jit
def _of_four(number, a, b, c, d):
    return tl.where(number == 0, a, tl.where(number == 1, b, tl.where(number == 2, c, d)))
